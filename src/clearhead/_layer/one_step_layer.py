"""What a layer computes in one step of autograd, forward and backward, and the same from operations of PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor

from .._call.spec import AttentionCall, without_hidden
from ..kernels._base import UNMASKED, FlatAttention
from ..kernels._reference import ReferenceKernel, reference_weights
from ..kernels._second_order import backward_pass, gradients_through
from ..masks._base import Mask
from ..masks._coverage import COVERS_ALL, coverage
from ..masks._kinds import marks_and_numbers

__all__ = ["Heads", "OptionalTensors", "Step", "cut", "differentiable_step"]

OptionalTensors = Sequence["Tensor | None"]


class Heads(NamedTuple):
    """H, Hkv and D, and whether batches come before positions."""

    queries: int
    keys: int
    dim: int
    batch_first: bool

    def widths(self, products: int) -> list[int]:
        """Features that so many projections give, of which the last gives those of all that follow too."""
        query, key = self.queries * self.dim, self.keys * self.dim
        return {1: [query + 2 * key], 2: [query, 2 * key], 3: [query, key, key]}[products]


def cut(projected: Sequence[Tensor], lengths: Sequence[Sequence[int]], heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Projections to (B, H, L, D) and twice (B, Hkv, S, D).

    Args:
        projected: of query, key and value, (B·L, H·D) and twice (B·S, Hkv·D), or the last two or all three in one.
        lengths: (B, L) and (B, S), or (L, B) and (S, B).
        heads: of the layer.
    """
    *apart, last = projected
    parts = [*apart, *last.split(heads.widths(3)[len(apart) :], -1)]
    order = (0, 2, 1, 3) if heads.batch_first else (1, 2, 0, 3)
    shapes = (lengths[0], lengths[1], lengths[1])
    q, k, v = (part.view(*shape, -1, heads.dim).permute(order) for part, shape in zip(parts, shapes, strict=True))
    return q, k, v


@final
class Step:
    """One kind of call.

    Args:
        template: the attention call in it, without its tensors.
        attention: which computes it.
        heads: how the projections are cut.
        inputs: shapes of what is projected, once for each projection.
        features: of the output.
        average: whether the weights that are wanted too are their mean over heads; ``None`` if none are.
    """

    def __init__(
        self,
        template: AttentionCall,
        attention: FlatAttention,
        heads: Heads,
        inputs: list[torch.Size],
        features: int,
        average: bool | None,
    ) -> None:
        self.template, self.attention, self.heads, self.average = template, attention, heads, average
        self.products = len(inputs)
        self.lengths = (inputs[0][:2], inputs[-1][:2])
        self._rows = [(shape[0] * shape[1], shape[2]) for shape in inputs]
        self._shape = (*inputs[0][:2], features)
        self._widths = heads.widths(self.products)

    def compute(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        biases: OptionalTensors,
        mask: Mask | None,
        lse: Tensor | None,
    ) -> Computed:
        """What the step gives.

        Args:
            inputs: as many as there are projections.
            weights, biases: of each projection, or of one that is to be cut, and of the output.
            mask: with the tensors of this call; ``None`` where the template has all there is.
            lse: (B, H, L), written if it is given.
        """
        products, shapes, first = self.products, self._rows, inputs[0]
        # Written so as to cost least: sizes one by one and no loop where there is one input, which is nearly always.
        if inputs[-1] is inputs[products // 2] is first:
            rows = (first.view(*shapes[0]),) * products
        else:
            rows = map(Tensor.view, inputs, shapes)
        own = (weights, biases) if len(weights) > products else self._cut(weights, biases)
        projected = tuple(map(_linear, rows, *own))  # weight and bias of the output are left over
        hides, attended = False, None
        if self.average is not None:
            merged, attended = self.attention.forward_with_weights(projected, lse, self.average)
        elif mask is None:
            merged, hides = self.attention.forward(projected, lse)
        else:
            merged, hides = self.attention.forward(projected, lse, marks_and_numbers(mask))
        output = _linear(merged, weights[-1], biases[-1]).view(*self._shape)
        return Computed(output, attended, projected, merged, hides)

    def _cut(self, weights: Sequence[Tensor], biases: OptionalTensors) -> tuple[Sequence[Tensor], OptionalTensors]:
        """Those of the projections, and perhaps more behind them."""
        if len(weights) > self.products:
            return weights, biases
        bias = biases[0]
        widths = self._widths
        return weights[0].split(widths), (None,) * self.products if bias is None else bias.split(widths)

    def derive(self, gradient: Tensor, needed: Sequence[bool], saved: _Saved) -> OptionalTensors:
        """Gradients of inputs and parameters, the last ones first, of which `needed` says who wants one."""
        products, rows = self.products, gradient.reshape(-1, gradient.shape[2])
        of_inputs, of_output, wanted = needed[:products], needed[products : products + 2], needed[products + 2 :]
        found = _of_projection(rows, saved.merged, *of_output)
        if not any(of_inputs) and not any(wanted):
            return [*[None] * products, *found, *[None] * len(wanted)]
        inputs, weights, biases = _in_order(saved.tensors, products)
        masks = UNMASKED if saved.mask is None else marks_and_numbers(saved.mask)
        of_merged = rows.mm(weights[-1])
        parts = self.attention.backward(saved.projected, saved.merged, saved.lse, of_merged, masks, saved.hides)
        of_x = [
            part.mm(weight).view_as(x) if needs else None
            for part, weight, x, needs in zip(
                parts, self._cut(weights, biases)[0], inputs, of_inputs[::-1], strict=False
            )
        ]
        both = [*zip(parts, map(Tensor.view, inputs, self._rows), strict=True)]
        if len(wanted) == 2 and products > 1:
            pairs = [_of_projection(*each, *wanted) for each in both]
            found += map(_joined, zip(*pairs, strict=True))
        else:
            for each, bias, weight in zip(both[::-1], wanted[::2], wanted[1::2], strict=True):
                found += _of_projection(*each, bias, weight)
        return [*of_x[::-1], *found]

    def recompute(self, tensors: OptionalTensors, mask: Mask | None, hides: bool) -> list[Tensor]:
        """The output and, if they are wanted, the weights, by PyTorch's operations.

        Args:
            tensors: inputs and parameters, the last ones first.
            mask, hides: as saved.
        """
        inputs, weights, biases = _in_order(tensors, self.products)
        projected = tuple(map(_linear, [x.flatten(0, 1) for x in inputs], *self._cut(weights, biases)))
        seen = coverage(cast(Mask, mask), self.template.grid) if hides else COVERS_ALL
        q, k, v = without_hidden(*cut(projected, self.lengths, self.heads), seen)
        mask = self.template.mask if mask is None else mask
        call = replace(self.template, query=q, key=k, value=v, mask=mask, reach=seen)
        mixed = ReferenceKernel().run(call)[0]  # (B, H, L, D)
        results = [_linear(self._merged(mixed), weights[-1], biases[-1])]
        if self.average is not None:
            attended = reference_weights(call)[0]
            results.append(attended.mean(1) if self.average else attended)
        return results

    def _merged(self, mixed: Tensor) -> Tensor:
        """(B, H, L, D) → (B, L, H·D), or (L, B, H·D)."""
        return mixed.permute((0, 2, 1, 3) if self.heads.batch_first else (2, 0, 1, 3)).flatten(2)


_linear: Any = F.linear


def _in_order(tensors: Any, products: int) -> tuple[Any, Any, Any]:
    """Inputs, weights and biases from inputs and parameters that stand last first."""
    return tensors[:products][::-1], tensors[:products:-2], tensors[-2 : products - 1 : -2]


def _of_projection(rows: Tensor, inputs: Tensor, bias: bool, weight: bool) -> list[Tensor | None]:
    """Gradients of a projection's bias and weight, from its input and the gradient of its output, (rows, …) each."""
    return [rows.sum(0) if bias else None, rows.t().mm(inputs) if weight else None]


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    whole = [part for part in parts if part is not None]
    return torch.cat(whole) if whole else None


class _Saved(NamedTuple):
    """For a backward pass; `tensors` are inputs and parameters, the last ones first."""

    lse: Tensor
    merged: Tensor
    projected: tuple[Tensor, ...]
    tensors: tuple[Tensor | None, ...]
    mask: Mask | None
    hides: bool


class Computed(NamedTuple):
    """What a step gives: projections are (rows, features), merged heads (B·L, H·D)."""

    output: Tensor
    weights: Tensor | None
    projected: tuple[Tensor, ...]
    merged: Tensor
    hides: bool


def differentiable_step(
    step: Step, inputs: Sequence[Tensor], parameters: OptionalTensors, mask: Mask | None
) -> tuple[Tensor, Tensor | None]:
    """The output, and the weights if they are wanted, with gradients of every order."""
    # Last first: so autograd meets the modules' gradients, and adds up those of what they share.
    found = cast(Any, _OneStep.apply)(step, mask, *inputs[::-1], *parameters[::-1])
    return (found, None) if step.average is None else found


class _OneStep(torch.autograd.Function):
    """Takes an input once for each projection, so that its gradients are added up where the modules' would be."""

    @staticmethod
    def forward(ctx: Any, step: Step, mask: Mask | None, *tensors: Tensor | None) -> Any:
        inputs, weights, biases = _in_order(tensors, step.products)
        lse = step.attention.empty_lse(inputs[0])
        output, attended, projected, merged, hides = step.compute(inputs, weights, biases, mask, lse)
        added = () if mask is None else marks_and_numbers(mask)[1:]  # saved, so that nobody changes it meanwhile
        ctx.step, ctx.mask, ctx.hides = step, mask, hides
        ctx.save_for_backward(lse, merged, *projected, *tensors, *added)
        output = output.detach()  # no view, so that it may be changed in place
        if attended is None:
            return output
        ctx.set_materialize_grads(False)
        return output, attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        step, (lse, merged, *rest) = ctx.step, ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        projected, tensors = rest[: step.products], rest[step.products :][: len(needed)]
        saved = _Saved(lse, merged, tuple(projected), tuple(tensors), ctx.mask, ctx.hides)

        def own() -> OptionalTensors:
            gradient, *of_weights = gradients
            if gradient is None or any(each is not None for each in of_weights):
                return gradients_through(recompute, saved.tensors, gradients)
            return step.derive(gradient, needed, saved)

        def recompute(*given: Tensor | None) -> list[Tensor]:
            return step.recompute(given, ctx.mask, ctx.hides)

        return backward_pass(ctx, gradients, saved.tensors, own, recompute)
