"""The dispatch mode of the pretended device: it runs every operator on the CPU and counts what a GPU would notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import flex, triton
from .kernels import BACKENDS, FUSED
from .memory import bytes_of, device

#: Operators that start no kernel.
_FREE = {
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"),
    *("is_same_size", "_unsafe_view", "record_stream", "is_pinned", "_has_same_storage_numel", "_fused_sdp_choice"),
}
#: Operators whose result has a shape that depends on values, or that read values themselves.
_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "is_nonzero")
#: Operators that take tensors of two devices.
_MIXED = ("copy_", "_to_copy", "set_", "index", "index_put_", "_index_put_impl_")


@dataclass
class Seen:
    """What the pretended device noticed.

    Args:
        operators: dispatches by name, views and allocations left out.
        values: values that Python read.
        copies: copies between devices: from, to, and the shape.
        shapes: operators whose result has a shape that depends on values.
        backends: PyTorch's fused attention, in order.
        largest: bytes of the largest result; dimensions of stride 0 count once.
    """

    operators: Counter[str] = field(default_factory=Counter)
    values: list[str] = field(default_factory=list)
    copies: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    largest: int = 0

    @property
    def count(self) -> int:
        """All dispatches."""
        return self.operators.total()

    @property
    def waits(self) -> list[Any]:
        """Everything for which the host waits for the device."""
        return [*self.values, *self.copies, *self.shapes]


class PretendedDevice(TorchDispatchMode):
    """While it is on, tensors of ``cuda:0`` and ``cuda:1`` compute on the CPU, and `seen` counts.

    Mixed devices are refused, as PyTorch's kernels refuse them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = Seen()

    def count(self, run: Callable[[], object]) -> Seen:
        """What a function makes the device notice."""
        self.seen = seen = Seen()
        run()
        self.seen = Seen()
        return seen

    @contextmanager
    def unseen(self) -> Generator[None, None, None]:
        """Nothing that runs inside the block is counted."""
        seen, self.seen = self.seen, Seen()
        yield
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in tensors if each.is_cuda]
        wanted = kwargs.get("device")
        target = torch.device(wanted) if wanted is not None else (on_device[0] if on_device else torch.empty(0)).device
        if not on_device and target.type != "cuda":
            return func(*args, **kwargs)
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        self._look(name, args, kwargs, tensors, on_device, target)
        if name == "_fused_sdp_choice":
            return device.choose(*_choice(*args, **kwargs))

        memory: dict[int, Tensor] = {}

        def to_memory(each: Any) -> Any:
            if isinstance(each, Tensor) and each.is_cuda:
                return memory.setdefault(id(each), device.to_cpu(each))
            return each

        run: Any = FUSED.get(func, func)
        if run in BACKENDS:
            self.seen.backends.append(BACKENDS[run])
        cpu_args, cpu_kwargs = tree_map(to_memory, args), tree_map(to_memory, kwargs)
        result = run(*cpu_args, **cpu_kwargs)
        free = func.is_view or name in _FREE
        if not free:
            self.seen.operators[name] += 1
        same = {id(memory[id(each)]): each for each in on_device if id(each) in memory}
        base = args[0] if func.is_view and isinstance(args[0], Tensor) and args[0].is_cuda else None
        index = target.index or 0

        def to_result(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            if id(each) in same:  # written in place
                return same[id(each)]
            if target.type != "cuda":
                return each
            if base is not None:
                return device.view_of(each, base)
            if not free:
                self.seen.largest = max(self.seen.largest, bytes_of(each))
            return device.to_device(each, index)

        return tree_map(to_result, result)

    def _look(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        on_device: list[Tensor],
        target: torch.device,
    ) -> None:
        """Note what makes the host wait, and refuse mixed devices."""
        seen = self.seen
        if name == "_local_scalar_dense":
            seen.values.append(name)
        elif name in _VALUES or (name == "repeat_interleave" and "output_size" not in kwargs):
            seen.shapes.append(name)
        if name in ("index", "index_put_", "_index_put_impl_", "index_put"):
            for each in tree_leaves(args[1]):
                if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8):
                    seen.shapes.append(f"{name} by bools")
                if isinstance(each, Tensor) and not each.is_cuda:
                    seen.copies.append(("cpu", "cuda", tuple(each.shape)))
        moved = name == "_to_copy" and tensors and tensors[0].device != target
        if moved or (name == "copy_" and tensors[0].device != tensors[-1].device):
            source = tensors[0] if moved else tensors[-1]
            to = target if moved else tensors[0].device
            seen.copies.append((str(source.device), str(to), tuple(source.shape)))
        elif name not in _MIXED:
            # A number in a tensor without dimensions passes as a number does.
            devices = {str(each.device) for each in tensors if each.is_cuda or each.dim() > 0}
            if len(devices) > 1:
                raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {devices}")


def _choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...]:
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


def connect(major: int) -> PretendedDevice:
    """Connect the device to PyTorch, with this compute capability, and return its mode."""
    device.connect(major)
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 2
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda _=None: (major, 0)
    properties = SimpleNamespace(major=major, minor=0, name="pretended", multi_processor_count=1, total_memory=1 << 40)
    cuda.get_device_properties = lambda _=None: properties
    cuda.get_device_name = lambda _=None: f"a pretended device of compute capability {major}.0"
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.synchronize = lambda _=None: None
    cuda.is_current_stream_capturing = lambda: False
    available: Any = import_module("clearhead.kernels._triton._available")
    available._is_installed = lambda: True
    mode = PretendedDevice()
    flex.connect(mode)
    triton.connect(mode)
    getattr(torch, "_C")._set_only_lift_cpu_tensors(True)  # noqa: B009
    torch.autograd.set_multithreading_enabled(False)  # the mode is on in one thread
    return mode
