"""Changing what single heads write, and measuring how much each head matters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from .._call.call import AttentionCall
from .._call.observers import observing
from .._checks import FLOATS, INTEGERS, flag, items, module, shown, strided
from ..errors import ArgumentError, DTypeError, RecordError, ShapeError, shape_text
from ._naming import ModuleNames, uncompiled

#: A factor, ``"mean"``, a tensor put in the output's place, or a function from the head's output to another.
Change = float | Literal["mean"] | Tensor | Callable[[Tensor], Tensor]


@contextmanager
def intervene(model: nn.Module, changes: Mapping[tuple[str, int], Change]) -> Generator[None, None, None]:
    """Scale, ablate or patch the outputs of single heads inside a ``with`` block, under fused kernels.

    A head's output o = Σ_j p_j v_j is changed before heads are merged. This works wherever `clearhead.attention`
    runs: Clearhead's modules, models after `clearhead.upgrade`, transformers models on ``clearhead``. Gradients flow.

    Args:
        model: whose submodules name the attention modules.
        changes: from (qualified module name, query head) to what happens to that head's output (B, L, Dv):

            * a number scales it; 0 ablates it,
            * ``"mean"`` replaces it by its mean over batch and queries that see a key (mean ablation),
            * a tensor that broadcasts to (B, L, Dv) takes its place (activation patching),
            * a function gets it and returns another of the same shape.

    Raises:
        ArgumentError: for a module name the model does not have, a head number it does not have when it runs, or, at
            the end of the block, a module that never ran attention through Clearhead.
        RecordError: for attention that `clearhead.distributed` split over processes.
        DTypeError: for a change of another kind.
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
    changes = _checked_changes(module("model", model), changes)
    _require_all_heads(model)
    running = ModuleNames(model)
    editor = _Editor(running, changes)
    with uncompiled(model), running.following(), observing(editor):
        yield
    missed = sorted({name for name, _ in changes} - editor.seen)
    if missed:
        raise ArgumentError(
            "changes",
            expected="modules whose attention runs through Clearhead",
            got=f"{', '.join(map(repr, missed))}, which never did",
            fix="Call clearhead.upgrade(model) first, or model.set_attn_implementation('clearhead') on a "
            "transformers model.",
        )


def _require_all_heads(model: nn.Module) -> None:
    """Raise for attention whose heads are split over processes, which would be numbered anew in each of them."""
    for part in model.modules():
        if getattr(part, "head_shard", None) is not None:
            raise _of_whole_calls()


def _of_whole_calls() -> RecordError:
    return RecordError(
        "interventions",
        expected="attention that one process computes",
        got="a module after clearhead.distributed.tensor_parallel or context_parallel",
        fix="Change heads on one process.",
    )


def _checked_changes(model: nn.Module, changes: object) -> dict[tuple[str, int], Change]:
    if not isinstance(changes, Mapping):
        expected = "a dictionary {(module name, head): change}"
        raise DTypeError("changes", expected=expected, got=shown(changes))
    names = {name for name, _ in model.named_modules()}
    for key, change in changes.items():
        if not isinstance(key, tuple) or len(key) != 2:
            expected = "pairs of a module name and a head number as keys"
            raise DTypeError("changes", expected=expected, got=shown(key))
        name, head = key
        if not isinstance(name, str) or name not in names:
            fix = _nearest(name, names) if isinstance(name, str) else ""
            expected = "names of the model's modules"
            raise ArgumentError("changes", expected=expected, got=shown(name), fix=fix)
        if isinstance(head, bool) or not isinstance(head, int) or head < 0:
            raise ArgumentError("changes", expected="head numbers ≥ 0", got=shown(head))
        _require_change(change)
    return dict(changes)


def _require_change(change: object) -> None:
    expected = "a number, 'mean', a tensor or a function"
    if isinstance(change, Tensor):
        strided("changes", change, expected)
        if change.dtype not in FLOATS + INTEGERS:
            raise DTypeError("changes", expected=expected, got=f"a {change.dtype} tensor")
    elif not (isinstance(change, (int, float)) or (isinstance(change, str) and change == "mean") or callable(change)):
        raise DTypeError("changes", expected=expected, got=type(change).__name__)


def head_importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    progress: bool = True,
) -> dict[str, Tensor]:
    """Estimate how much each head matters: the gradient of the loss in a gate on the head's output.

    ::

        I_h = mean over examples of | ∂ loss / ∂ ξ_h |   at ξ_h = 1,  where head h writes ξ_h · o_h

    (Michel, Levy and Neubig, "Are sixteen heads really better than one?", 2019.) Each example of a batch has a gate of
    its own. Parameters keep their gradients; the model's mode is left as it is.

    Args:
        model: its attention must run through Clearhead (see `intervene`).
        batches: whatever `loss` takes.
        loss: ``loss(model, batch)`` → scalar; a mean over examples is scaled back by their number.
        progress: show a progress bar, if rich is installed. Default True.

    Returns:
        Module name → (H,) importance, in the order in which modules ran.

    Raises:
        ArgumentError: if there is no batch, or no attention ran through Clearhead.
        RecordError: for attention that `clearhead.distributed` split over processes.
        ShapeError: if `loss` does not return a scalar.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.Sequential(clearhead.MultiHeadAttention(12, 3))
        >>> batches = [torch.randn(2, 5, 12) for _ in range(3)]
        >>> found = clearhead.head_importance(model, batches, lambda m, x: m(x).square().mean(), progress=False)
        >>> found["0"].shape
        torch.Size([3])
    """
    _require_all_heads(module("model", model))
    if not callable(loss):
        raise DTypeError("loss", expected="a function loss(model, batch)", got=shown(loss))
    if isinstance(batches, (str, bytes, Tensor)):
        batches = items("batches", batches, "an iterable of batches")
    try:
        iter(batches)
    except TypeError:
        raise DTypeError("batches", expected="an iterable of batches", got=shown(batches)) from None
    sums: dict[str, Tensor] = {}
    examples: dict[str, int] = {}
    for batch in _with_progress(batches, flag("progress", progress)):
        running = ModuleNames(model)
        gates = _Gates(running)
        with uncompiled(model), running.following(), observing(gates), torch.enable_grad():
            value = _loss_of(loss, model, batch)
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = shape_text(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError("loss", expected="a scalar", got=got)
        named = [(name, gate) for name, found in gates.gates.items() for gate in found]
        gradients = torch.autograd.grad(value, [gate for _, gate in named], allow_unused=True) if named else ()
        for (name, gate), gradient in zip(named, gradients, strict=True):
            if gradient is None:
                raise ArgumentError(
                    "loss",
                    expected="a loss that depends on every head's output",
                    got=f"no gradient for {name!r}",
                    fix="Switch activation checkpointing off, or leave modules out that the loss does not use.",
                )
            per_example = gradient.abs().squeeze((2, 3)) * gate.shape[0]  # (B, H)
            sums[name] = sums.get(name, 0) + per_example.sum(0)
            examples[name] = examples.get(name, 0) + gate.shape[0]
    if not sums:
        raise ArgumentError(
            "model, batches",
            expected="batches on which attention runs through Clearhead",
            got="none",
            fix="Call clearhead.upgrade(model) first, or model.set_attn_implementation('clearhead').",
        )
    return {name: total / examples[name] for name, total in sums.items()}


def _loss_of(loss: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any) -> Tensor:
    try:
        return loss(model, batch)
    except TypeError as error:
        expected = "a function loss(model, batch)"
        raise DTypeError("loss", expected=expected, got=shown(loss), fix=str(error)) from error


class _Editor:
    """Applies the changes of the module that is running."""

    recomputing = True

    def __init__(self, running: ModuleNames, changes: Mapping[tuple[str, int], Change]) -> None:
        self._running = running
        self._changes: dict[str, dict[int, Change]] = {}
        for (name, head), change in changes.items():
            self._changes.setdefault(name, {})[head] = change
        self.seen: set[str] = set()

    def wanted(self) -> NoReturn:
        raise _of_whole_calls()

    def attended(self, call: AttentionCall, output: Tensor) -> Tensor:
        name = self._running.current
        if name is None or name not in self._changes:
            return output
        self.seen.add(name)
        heads = list(output.unbind(1))  # H × (B, L, Dv)
        for head, change in self._changes[name].items():
            if head >= len(heads):
                raise ArgumentError("changes", expected=f"a head of {name!r}, 0 … {len(heads) - 1}", got=str(head))
            heads[head] = _changed(heads[head], change, call, head)
        return torch.stack(heads, 1)  # (B, H, L, Dv)


class _Gates:
    """Multiplies every head's output with a gate of one per example."""

    recomputing = True

    def __init__(self, running: ModuleNames) -> None:
        self._running = running
        self.gates: dict[str, list[Tensor]] = {}

    def wanted(self) -> NoReturn:
        raise _of_whole_calls()

    def attended(self, call: AttentionCall, output: Tensor) -> Tensor:
        gate = torch.ones(*output.shape[:2], 1, 1, dtype=output.dtype, device=output.device, requires_grad=True)
        self.gates.setdefault(self._running.current or "", []).append(gate)
        return output * gate


def _changed(output: Tensor, change: Change, call: AttentionCall, head: int) -> Tensor:
    if isinstance(change, Tensor):
        try:
            return change.to(output).expand_as(output)
        except RuntimeError as error:
            raise ShapeError(
                "changes",
                expected=f"a patch that broadcasts to (B, L, Dv) = {shape_text(output.shape)}",
                got=shape_text(change.shape),
            ) from error
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


def _mean(output: Tensor, call: AttentionCall, head: int) -> Tensor:
    """Mean over batch and the queries that see a key, (1, 1, Dv)."""
    if call.coverage.queries is None:
        return output.mean((0, 1), keepdim=True)
    seeing = call.coverage.queries.expand(output.shape[0], -1, output.shape[1], 1)
    seeing = seeing[:, min(head, seeing.shape[1] - 1)]  # (B, L, 1)
    return (output * seeing).sum((0, 1), keepdim=True) / seeing.sum().clamp(min=1)


def _nearest(name: str, names: Iterable[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, list(names), n=3)
    return f"Near: {', '.join(close)}." if close else ""


def _with_progress(batches: Iterable[Any], progress: bool) -> Iterable[Any]:
    if progress:
        try:
            from rich.progress import track
        except ImportError:
            return batches
        return track(batches, description="head importance")
    return batches
