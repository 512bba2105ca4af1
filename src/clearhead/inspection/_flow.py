"""Which tensors were computed from which: how the layers of a record are told from those of another stack."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .._call.observers import is_computing
from .._statistics.stacks import Sides
from .._torch_private import viewed
from ._naming import Frame, Layer, ModuleNames


@dataclass(eq=False)
class _Stack:
    """Layers over the same tokens, each of which reads what the one before it wrote.

    Args:
        number: its number.
        calls: bits of its layers' calls.
        origins: those, and the bits of everything that the layers were computed from.
        patterns: names of its modules, without their numbers.
    """

    number: int
    calls: int = 0
    origins: int = 0
    patterns: set[str] = field(default_factory=set[str])


class Flow:
    """Follows what the tensors of a model were computed from: arguments of root calls, and attention calls.

    Each argument and each call has a bit, and a tensor has the bits of all that it was computed from. No value is read.
    The output of cross-attention has the bits of its query only, because it stays on the query's side. Integers have no
    bits of calls: a text that a model wrote is a new text.

    Args:
        running: follows the model, and holds the arguments of its root call.
    """

    def __init__(self, running: ModuleNames) -> None:
        self._running = running
        self._root_call = running.root_calls
        self._origins: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._next = 1  # the next bit
        self._calls = 0  # the bits of attention calls
        self._stack_of: dict[int, _Stack] = {}  # the stack of the queries, by the bit of the call
        self._by_arguments: dict[int, _Stack] = {}  # keys that no attention computed, by the bits of their arguments
        self._runs: dict[str, list[tuple[int, int]]] = {}  # module → bit and run of its calls in this root call
        self._count = 0
        running.left = self._left

    def follow(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> None:
        """Note that a function of PyTorch computed `result` from these arguments.

        Inside an attention call only the first argument counts, because its masks are no origin of its output.
        """
        if torch.compiler.is_dynamo_compiling():
            return
        # Functions that change their first argument in place, such as __setitem__, return None.
        computed = _tensors(args[:1] if result is None else (result,))
        if not computed:  # a size or a dtype, as most functions of a small model return
            return
        if is_computing():
            args, kwargs = args[:1], {}
        self._notice_root_call()
        arguments, origins = _tensors((*args, *kwargs.values())), 0
        for tensor in arguments:
            origins |= self.origins(tensor)
        if origins:
            # A result that is an argument was written to. Through a view, so was the tensor that it shows. A function
            # may also return a view of a tensor that it made, such as the matrix of a linear layer.
            shown = [
                base
                for tensor in computed
                if (base := viewed(tensor)) is not None
                and (
                    any(tensor is each for each in arguments)
                    or not any(base is each or base is viewed(each) for each in arguments)
                )
            ]
            self.mark([*computed, *shown], origins)

    def mark(self, result: object, origins: int) -> None:
        """Add origins to the tensors in a result."""
        for tensor in _tensors((result,)):
            added = origins if tensor.is_floating_point() or tensor.is_complex() else origins & ~self._calls
            before = self._origins.get(tensor, 0)
            if added & ~before:
                self._origins[tensor] = before | added

    def origins(self, tensor: Tensor) -> int:
        """The bits of everything that a tensor was computed from."""
        shown = viewed(tensor)
        written = 0 if shown is None else self._origins.get(shown, 0)  # also after the view was made
        return self._origins.get(tensor, 0) | written

    def layer(self, module: str, query: Tensor) -> Layer:
        """The layer whose attention runs in a module over this query."""
        self._notice_root_call()
        origins = self.origins(query)
        return Layer(module, max((run + 1 for bit, run in self._runs.get(module, ()) if bit & origins), default=0))

    def attended(self, layer: Layer, query: Tensor, key: Tensor) -> tuple[Sides, int]:
        """The sides of the layer's attention call, and the origins of its output."""
        origins, of_keys = self.origins(query), self.origins(key)
        pattern = re.sub(r"\d+", "*", layer.module)
        same = self._keys_are_queries(origins, of_keys)
        stack = self._stack_of_queries(origins | of_keys if same else origins, pattern)
        sides = Sides(stack.number, stack.number if same else self._stack_of_keys(of_keys).number)
        bit = self._bit()
        self._calls |= bit
        self._runs.setdefault(layer.module, []).append((bit, layer.run))
        self._stack_of[bit] = stack
        output = origins | (of_keys if same else 0) | bit
        stack.calls |= bit
        stack.origins |= output
        self._running.frames[-1].origins |= output
        stack.patterns.add(pattern)
        return sides, output

    def shares_origin(self, tensor: Tensor, other: Tensor | None) -> bool:
        """Whether both were computed from the same argument or call. True if the origin of `other` is unknown."""
        origins = 0 if other is None else self.origins(other)
        return not origins or bool(origins & self.origins(tensor))

    def _left(self, frame: Frame, output: object) -> None:
        """Give the output of a module the origins of its attention, whose own output may be a copy."""
        if frame.origins:
            self.mark(output, frame.origins)

    def _notice_root_call(self) -> None:
        """Give the arguments of a new root call their bits."""
        if self._running.root_calls == self._root_call:
            return
        self._root_call, frames = self._running.root_calls, self._running.frames
        self._runs.clear()
        for tensor in _tensors((frames[0].args, frames[0].kwargs)) if frames else ():
            self.mark(tensor, self._bit())

    def _bit(self) -> int:
        bit, self._next = self._next, self._next << 1
        return bit

    def _keys_are_queries(self, origins: int, of_keys: int) -> bool:
        """Whether queries and keys are of the same tokens."""
        last, last_of_keys = (self._last(bits) for bits in (origins, of_keys))
        if last_of_keys is not None:
            return last is last_of_keys
        # Layers may reuse keys of the first layer, which no attention computed.
        arguments = ~self._calls
        return origins == of_keys or bool(origins & of_keys & arguments)

    def _stack_of_queries(self, origins: int, pattern: str) -> _Stack:
        """The stack that computed the queries. A new one begins if something else was merged into them."""
        last = self._last(origins)
        if last is not None and not origins & ~last.origins:
            return last
        if last is not None or not origins:  # an origin may be unknown
            for stack in reversed(list(dict.fromkeys(self._stack_of.values()))):
                if pattern in stack.patterns and (not origins or origins & stack.calls):
                    return stack
        # Layers side by side, which read the same tokens and whose outputs no other layer reads, are one stack.
        for stack in self._stack_of.values() if last is None else ():
            if pattern in stack.patterns and origins and stack.origins & ~self._calls == origins:
                return stack
        return self._new_stack()

    def _stack_of_keys(self, of_keys: int) -> _Stack:
        last = self._last(of_keys)
        if last is not None:
            return last
        if of_keys not in self._by_arguments:
            self._by_arguments[of_keys] = self._new_stack()
        return self._by_arguments[of_keys]

    def _new_stack(self) -> _Stack:
        self._count += 1
        return _Stack(self._count - 1)

    def _last(self, origins: int) -> _Stack | None:
        """The stack of the last attention call among these origins."""
        calls = origins & self._calls
        return self._stack_of[1 << calls.bit_length() - 1] if calls else None


class FlowMode(TorchFunctionMode):
    """Shows every function of PyTorch to a `Flow`."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._flow.follow(args, kwargs or {}, result)
        return result


def _tensors(values: Iterable[object]) -> list[Tensor]:
    """The tensors among arguments or results, also inside lists and dictionaries."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(cast("Iterable[object]", value))
        elif isinstance(value, Mapping):
            found += _tensors(cast("Mapping[object, object]", value).values())
    return found
