"""How much a loss depends on each head: from gradients, and by running without it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .._call.call import Call
from .._checks import flag, items, module, shown
from ..errors import ArgumentError, DTypeError, ShapeError, shape_text
from ._intervene import UPGRADE, Edit, changed, editing
from ._naming import Layer, layer_names

_Loss = Callable[[nn.Module, Any], Tensor]


def head_importance(
    model: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor], *, progress: bool = True
) -> dict[str, Tensor]:
    """Estimate how much each head matters: the gradient of the loss with respect to a gate on the head's output.

    ::

        I_h = mean over examples of | ∂ loss / ∂ ξ_h |   at ξ_h = 1,  where head h writes ξ_h · o_h

    (Michel, Levy and Neubig, "Are sixteen heads really better than one?", 2019.) Each example of a batch has its own
    gate. The gradients of parameters and the mode of the model do not change.

    Args:
        model: a model whose attention runs through Clearhead (see `intervene`).
        batches: the batches for `loss`.
        loss: ``loss(model, batch)`` → scalar, the mean over examples.
        progress: show a progress bar, if rich is installed. Default True.

    Returns:
        Layer → (H,) importance, in the order in which layers ran. The names are those of a record: a module that the
        model uses for several layers has one entry for each.

    Raises:
        ArgumentError: if there is no batch, or no attention ran through Clearhead.
        RecordError: for attention that `clearhead.distributed` split over processes.
        ShapeError: if `loss` does not return a scalar.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.Sequential(clearhead.MultiHeadAttention(12, 3))
        >>> batches = [torch.randn(2, 5, 12) for _ in range(3)]
        >>> importance = clearhead.head_importance(model, batches, lambda m, x: m(x).square().mean(), progress=False)
        >>> importance["0"].shape
        torch.Size([3])
    """
    measure = partial(_gate_gradients, module("model", model), loss)
    return _means(measure, _tracked(batches, progress, "head importance"))


def head_ablation(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    change: float | Literal["mean"] = 0.0,
    progress: bool = True,
) -> dict[str, Tensor]:
    """Measure how much the loss grows without each head: one pass for each head, and one with all of them.

    ::

        A_h = loss with o_h ablated − loss

    This is what `head_importance` estimates from one backward pass. Gradients are not recorded. The model runs in the
    mode that it is in, so call ``model.eval()`` first.

    Args:
        model: a model whose attention runs through Clearhead (see `intervene`).
        batches: the batches for `loss`.
        loss: ``loss(model, batch)`` → scalar, the mean over examples.
        change: what replaces the head's output: 0, another factor, or its mean (see `intervene`). Default 0.
        progress: show a progress bar, if rich is installed. Default True.

    Returns:
        Layer → (H,), the mean over examples, in the order in which layers ran and with the names of a record. A
        negative number means that the loss is lower without the head. `Census.with_column` takes it.

    Raises:
        ArgumentError: if there is no batch, or no attention ran through Clearhead.
        DTypeError: for another `change`.
        RecordError: for attention that `clearhead.distributed` split over processes.
        ShapeError: if `loss` does not return a scalar.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.Sequential(clearhead.MultiHeadAttention(12, 3)).eval()
        >>> batches = [torch.randn(2, 5, 12) for _ in range(3)]
        >>> ablation = clearhead.head_ablation(model, batches, lambda m, x: m(x).square().mean(), progress=False)
        >>> ablation["0"].shape
        torch.Size([3])
    """
    if not (change == "mean" if isinstance(change, str) else isinstance(change, (int, float))):
        raise DTypeError("change", expected="a number or 'mean'", got=shown(change))
    measure = partial(_losses_without, module("model", model), loss, change)
    return _means(measure, _tracked(batches, progress, "head ablation"))


def _tracked(batches: Iterable[Any], progress: bool, description: str) -> Iterable[Any]:
    """The batches, with a progress bar."""
    if isinstance(batches, (str, bytes, Tensor)):
        batches = items("batches", batches, "an iterable of batches")
    try:
        iter(batches)
    except TypeError:
        raise DTypeError("batches", expected="an iterable of batches", got=shown(batches)) from None
    if flag("progress", progress):
        with suppress(ImportError):
            from rich.progress import track

            return track(batches, description=description)
    return batches


def _means(measure: Callable[[Any], Iterator[tuple[Layer, Tensor]]], batches: Iterable[Any]) -> dict[str, Tensor]:
    """The mean over all examples of what `measure` yields for a batch: (B, H) numbers of each layer."""
    sums: dict[Layer, Tensor] = {}
    examples: dict[Layer, int] = {}
    for batch in batches:
        for layer, numbers in measure(batch):
            sums[layer] = sums.get(layer, 0) + numbers.sum(0)
            examples[layer] = examples.get(layer, 0) + len(numbers)
    if not sums:
        expected = "batches on which attention runs through Clearhead"
        raise ArgumentError("model, batches", expected=expected, got="none", fix=UPGRADE)
    return {name: sums[layer] / examples[layer] for name, layer in layer_names(sums).items()}


def _loss_of(model: nn.Module, loss: _Loss, batch: Any, edit: Edit) -> Tensor:
    """The loss of a batch while attention is edited."""
    with editing(model, edit, by_run=True):
        try:
            value = cast(Any, loss(model, batch))
        except TypeError as error:
            expected = "a function loss(model, batch)"
            raise DTypeError("loss", expected=expected, got=shown(loss), fix=str(error)) from error
    if not isinstance(value, Tensor) or value.dim() != 0:
        got = shape_text(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ShapeError("loss", expected="a scalar", got=got)
    return value


def _gate_gradients(model: nn.Module, loss: _Loss, batch: Any) -> Iterator[tuple[Layer, Tensor]]:
    """The size (B, H) of the gradients with respect to the gates of each attention call, with its layer."""
    gates: list[tuple[Layer, Tensor]] = []

    def gated(layer: Layer, call: Call, output: Tensor) -> Tensor:
        gate = torch.ones(*output.shape[:2], 1, 1, dtype=output.dtype, device=output.device, requires_grad=True)
        gates.append((layer, gate))
        return output * gate

    with torch.enable_grad():
        value = _loss_of(model, loss, batch, gated)
    gradients = torch.autograd.grad(value, [gate for _, gate in gates], allow_unused=True) if gates else ()
    for (layer, _), gradient in zip(gates, gradients, strict=True):
        if gradient is None:
            expected, got = "a loss that depends on every head's output", f"no gradient for {layer.module!r}"
            fix = "Switch activation checkpointing off, or leave modules out that the loss does not use."
            raise ArgumentError("loss", expected=expected, got=got, fix=fix)
        yield layer, gradient.squeeze((2, 3)).abs() * len(gradient)  # (B, H); the loss is a mean over B examples


@torch.no_grad()
def _losses_without(
    model: nn.Module, loss: _Loss, change: float | Literal["mean"], batch: Any
) -> Iterator[tuple[Layer, Tensor]]:
    """By how much the loss of a batch grows without each head, (B, H) with equal rows, with its layer."""
    sizes: dict[Layer, tuple[int, int]] = {}

    def noted(layer: Layer, call: Call, output: Tensor) -> Tensor:
        sizes[layer] = (output.shape[0], output.shape[1])
        return output

    whole = _loss_of(model, loss, batch, noted)
    for layer, (examples, heads) in sizes.items():
        without = [_loss_of(model, loss, batch, partial(_ablated, (layer, head), change)) for head in range(heads)]
        yield layer, (torch.stack(without) - whole).expand(examples, heads)


def _ablated(
    place: tuple[Layer, int], change: float | Literal["mean"], layer: Layer, call: Call, output: Tensor
) -> Tensor:
    if layer != place[0]:
        return output
    heads = list(output.unbind(1))  # H × (B, L, Dv)
    heads[place[1]] = changed(heads[place[1]], change, call, place[1])
    return torch.stack(heads, 1)  # (B, H, L, Dv)
