"""Changing the outputs of single heads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn

from .._call.call import Call
from .._call.observers import observing
from .._checks import FLOATS, INTEGERS, module, shown, strided
from .._torch_private import in_backward
from ..errors import ArgumentError, DTypeError, RecordError, ShapeError, shape_text
from ._flow import Flow, FlowMode
from ._naming import Layer, ModuleNames, module_of, uncompiled

#: A factor, ``"mean"``, a tensor that replaces the output, or a function of the head's output.
Change = float | Literal["mean"] | Tensor | Callable[[Tensor], Tensor]

#: What to do where attention does not run through Clearhead.
UPGRADE = "Call clearhead.upgrade(model) first, or model.set_attn_implementation('clearhead') on a transformers model."

#: A function of the running layer, its call and its output, which returns another output.
Edit = Callable[[Layer, Call, Tensor], Tensor]


@contextmanager
def intervene(model: nn.Module, changes: Mapping[tuple[str, int], Change]) -> Generator[None, None, None]:
    """Scale, ablate or patch the outputs of single heads inside a ``with`` block, under fused kernels.

    The output o = Σ_j p_j v_j of a head changes before heads are merged. Supported is all attention that
    `clearhead.attention` computes: Clearhead's modules, models after `clearhead.upgrade`, and transformers models on
    ``clearhead``. Gradients flow.

    Args:
        model: the model. The names of its submodules are the module names in `changes`.
        changes: a dictionary from (qualified module name, query head) to the change of that head's output (B, L, Dv).
            A module that the model uses for several layers changes in all of them. ``"<module>/2"``, the name of a
            layer in a record, is its third one alone.

            * a number scales it, and 0 ablates it,
            * ``"mean"`` replaces it by its mean over batch and queries that see a key (mean ablation),
            * a tensor that broadcasts to (B, L, Dv) replaces it (activation patching),
            * a function receives it and returns another of the same shape.

    Raises:
        ArgumentError: for a module name that the model does not have. During the block, for a head number that the
            module does not have. At its end, for a module that never ran attention through Clearhead.
        RecordError: for attention that `clearhead.distributed` split over processes, and for a change of one of several
            layers under activation checkpointing.
        DTypeError: for a change of another type.
        ShapeError: for a patch that does not fit.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.Sequential(clearhead.MultiHeadAttention(12, 3))
        >>> x = torch.randn(2, 5, 12)
        >>> with clearhead.intervene(model, {("0", 1): 0.0}):
        ...     without_head_1 = model(x)
        >>> torch.allclose(without_head_1, model(x))
        False
    """
    by_module = _checked_changes(module("model", model), changes)
    ran: set[str] = set()

    def change_heads(layer: Layer, call: Call, output: Tensor) -> Tensor:
        names = layer.module, f"{layer.module}/{layer.run}"
        ran.update(names)
        edits: dict[int, Change] = {head: change for name in names for head, change in by_module.get(name, {}).items()}
        if not edits:
            return output
        heads = list(output.unbind(1))  # H × (B, L, Dv)
        for head, change in edits.items():
            if head >= len(heads):
                raise ArgumentError(
                    "changes", expected=f"a head of {layer.module!r}, 0 … {len(heads) - 1}", got=str(head)
                )
            heads[head] = changed(heads[head], change, call, head)
        return torch.stack(heads, 1)  # (B, H, L, Dv)

    by_run = {name for name in by_module if module_of(name) != name}
    with editing(model, change_heads, by_run=bool(by_run)):
        yield
    missed = sorted(by_module.keys() - ran)
    if missed:
        got = f"{', '.join(map(repr, missed))}, which never did"
        raise ArgumentError("changes", expected="modules whose attention runs through Clearhead", got=got, fix=UPGRADE)


class _Editor:
    """An observer that replaces the outputs of attention calls.

    Args:
        running: follows the model.
        edit: a function of the running layer, its call and its output, which returns another output.
        flow: tells the runs of one module apart. Without it, all are run 0.
    """

    recomputing = True

    def __init__(self, running: ModuleNames, edit: Edit, flow: Flow | None) -> None:
        self._running, self._edit, self._flow = running, edit, flow

    def wanted(self) -> NoReturn:
        raise _of_whole_calls()

    def attended(self, call: Call, output: Tensor) -> Tensor:
        name, flow = self._running.current, self._flow
        if name is None:
            return output
        if flow is None:
            return self._edit(Layer(name), call, output)
        if in_backward():
            expected, got = "a forward pass that runs once", "activation checkpointing, which repeats it"
            fix = "Switch it off, or name the module without a run, as in {('attention', 0): 0.0}."
            raise RecordError("interventions in one of several runs of a module", expected=expected, got=got, fix=fix)
        layer = flow.layer(name, call.query)
        _, origins = flow.attended(layer, call.query, call.key)
        output = self._edit(layer, call, output)
        flow.mark(output, origins)
        return output


@contextmanager
def editing(model: nn.Module, edit: Edit, *, by_run: bool) -> Generator[None, None, None]:
    """Replace the outputs of the model's attention calls inside the block. `by_run` tells runs of a module apart."""
    # Attention whose heads are split over processes numbers its heads anew on each of them.
    if any(getattr(submodule, "head_shard", None) is not None for submodule in model.modules()):
        raise _of_whole_calls()
    running = ModuleNames(model)
    flow = Flow(running) if by_run else None
    following = nullcontext() if flow is None else FlowMode(flow)
    with uncompiled(model), running.following(), following, observing(_Editor(running, edit, flow)):
        yield


def _of_whole_calls() -> RecordError:
    expected = "attention that one process computes"
    got = "a module after clearhead.distributed.tensor_parallel or context_parallel"
    return RecordError("interventions", expected=expected, got=got, fix="Change heads on one process.")


def _checked_changes(model: nn.Module, changes: object) -> dict[str, dict[int, Change]]:
    """The changes by module name and head."""
    if not isinstance(changes, Mapping):
        expected = "a dictionary {(module name, head): change}"
        raise DTypeError("changes", expected=expected, got=shown(changes))
    names = [name for name, _ in model.named_modules()]
    by_module: dict[str, dict[int, Change]] = {}
    for key, change in changes.items():
        if not isinstance(key, tuple) or len(key) != 2:
            expected = "pairs of a module name and a head number as keys"
            raise DTypeError("changes", expected=expected, got=shown(key))
        name, head = key
        if not isinstance(name, str) or not {name, module_of(name)} & set(names):
            close = get_close_matches(name, names, n=3) if isinstance(name, str) else []
            fix = f"Near: {', '.join(close)}." if close else ""
            raise ArgumentError("changes", expected="names of the model's modules", got=shown(name), fix=fix)
        if isinstance(head, bool) or not isinstance(head, int) or head < 0:
            raise ArgumentError("changes", expected="head numbers ≥ 0", got=shown(head))
        _require_change(change)
        by_module.setdefault(name, {})[head] = change
    return by_module


def _require_change(change: object) -> None:
    expected = "a number, 'mean', a tensor or a function"
    if isinstance(change, Tensor):
        strided("changes", change, expected, dtypes=FLOATS + INTEGERS)
    elif not (isinstance(change, (int, float)) or (isinstance(change, str) and change == "mean") or callable(change)):
        raise DTypeError("changes", expected=expected, got=type(change).__name__)


def changed(output: Tensor, change: Change, call: Call, head: int) -> Tensor:
    """The output (B, L, Dv) of a head of a call after a change."""
    if isinstance(change, Tensor):
        try:
            return change.to(output).expand_as(output)
        except RuntimeError as error:
            expected = f"a patch that broadcasts to (B, L, Dv) = {shape_text(output.shape)}"
            raise ShapeError("changes", expected=expected, got=shape_text(change.shape)) from error
    if isinstance(change, (int, float)):
        return output * float(change)
    if callable(change):
        try:
            result = change(output)
        except TypeError as error:
            expected = "a function from a head's output to another"
            raise DTypeError("changes", expected=expected, got=shown(change), fix=str(error)) from error
        if not isinstance(result, Tensor) or result.shape != output.shape:
            got = shape_text(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ShapeError("changes", expected=f"a tensor {shape_text(output.shape)}", got=got)
        return result
    return _mean(output, call, head).expand_as(output)


def _mean(output: Tensor, call: Call, head: int) -> Tensor:
    """Mean over the batch and the queries that see a key, (1, 1, Dv)."""
    if call.coverage.queries is None:
        return output.mean((0, 1), keepdim=True)
    seeing = call.coverage.queries.expand(output.shape[0], -1, output.shape[1], 1)
    seeing = seeing[:, min(head, seeing.shape[1] - 1)]  # (B, L, 1)
    return (output * seeing).sum((0, 1), keepdim=True) / seeing.sum().clamp(min=1)
