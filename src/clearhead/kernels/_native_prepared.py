"""Kinds of native call that came before: all numbers worked out but the addresses of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor

from .._call.spec import AttentionCall
from .._native import extension, instruction_set_number
from ..masks._base import Mask
from ..masks._kinds import marks_and_numbers
from ..masks._tensors import as_mask
from ._base import UNMASKED, Masks, rows_interleave
from ._native_calls import (
    LEAVE_NOBODY,
    LEAVE_OUT,
    LEAVE_TO_OTHERS,
    Fixed,
    Request,
    address,
    empty_output,
    fixed_numbers,
    threads_for,
)
from ._second_order import backward_pass, reference_results

__all__ = ["HidesSomebody", "Prepared", "differentiable", "prepare_apart", "prepare_flat"]

Tensors = tuple[Tensor, ...]
_NO_BIAS = (0,) * 4
_NO_STATISTICS = (0,) * 11
_NO_MAP = (0, 0, 0, False)
Steps = tuple[int, int, int]  # from one batch item, head and row to the next


class _Layout(Protocol):
    """Where queries, keys and values lie in one or three tensors."""

    def numbers(self, tensors: Tensors) -> tuple[int, ...]: ...


@final
@dataclass(frozen=True)
class _Apart:
    query: Steps
    key: Steps
    value: Steps

    def numbers(self, tensors: Tensors) -> tuple[int, ...]:
        query, key, value = tensors
        return (query.data_ptr(), *self.query, key.data_ptr(), *self.key, value.data_ptr(), *self.value)


@final
@dataclass(frozen=True)
class _Within:
    """For each of the three in which tensor it is, how many bytes behind its beginning, and its steps."""

    places: tuple[tuple[int, int, Steps], ...]

    def numbers(self, tensors: Tensors) -> tuple[int, ...]:
        (q, after_q, steps_q), (k, after_k, steps_k), (v, after_v, steps_v) = self.places
        key = tensors[k].data_ptr()
        query, value = key if q == k else tensors[q].data_ptr(), key if v == k else tensors[v].data_ptr()
        return (query + after_q, *steps_q, key + after_k, *steps_k, value + after_v, *steps_v)


@final
class Prepared:
    """Both passes for requests that differ from this one in the numbers of query, key, value and masks alone.

    Args:
        request: without sinks and dropout.
        fixed: its `fixed_numbers`.
        inputs: where query, key and value lie.
        gradients: where theirs do, in tensors that `torch.empty_like` gives.
        shape, strides: of the output.
        steps: of the heads in an output, or in a gradient of it.
        leaving: what is done where masks hide anybody altogether.
    """

    def __init__(
        self,
        request: Request,
        fixed: Fixed,
        inputs: _Layout,
        gradients: _Layout,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        steps: Callable[[Tensor], Steps],
        leaving: int,
    ) -> None:
        self._sizes, self._fixed = fixed.sizes, fixed
        self._unmasked = (*fixed.band, 0, *fixed.visible, 0, *fixed.bias, *fixed.dropout)
        self._threads = threads_for(request)
        self._inputs, self._gradients = inputs, gradients
        self._shape, self._strides, self._steps = shape, strides, steps
        self._wide = request.query.dtype == torch.float32
        self._of_output = steps(request.query.new_empty_strided(shape, strides))
        self._lse_shape, self._keys = tuple(request.query.shape[:3]), request.key.shape[2]
        self._leaving = leaving
        module = cast(Any, extension)
        self._forward, self._backward, self._statistics = module.forward, module.backward, module.statistics

    def empty_lse(self, like: Tensor) -> Tensor:
        """(B, H, L)."""
        return like.new_empty(self._lse_shape, dtype=torch.float64)

    def forward(self, tensors: Tensors, lse: Tensor | None = None, masks: Masks = UNMASKED) -> tuple[Tensor, bool]:
        """The output, and whether masks hide anybody altogether; the output is then as `leaving` says."""
        output = tensors[0].new_empty_strided(self._shape, self._strides)
        hides = self._forward(
            instruction_set_number(),
            self._threads or torch.get_num_threads(),
            *self._sizes,
            *self._inputs.numbers(tensors),
            0 if lse is None else lse.data_ptr(),
            *(self._unmasked if masks is UNMASKED else self._of_masks(masks)),
            output.data_ptr(),
            *self._of_output,
            self._wide,
            LEAVE_NOBODY if masks is UNMASKED else self._leaving,
        )
        return output, hides

    def forward_with_weights(self, tensors: Tensors, lse: Tensor | None, average: bool) -> tuple[Tensor, Tensor]:
        """The output, and weights (B, H, L, S), or (B, L, S) averaged, as `native_statistics` has them computed."""
        output = tensors[0].new_empty_strided(self._shape, self._strides)
        (batch, heads, length), keys = self._lse_shape, self._keys
        shape = (batch, length, keys) if average else (batch, heads, length, keys)
        weights = tensors[0].new_zeros(shape, dtype=torch.float32)
        matrix = length * keys
        self._statistics(
            instruction_set_number(),
            self._threads or torch.get_num_threads(),
            *self._sizes,
            *self._inputs.numbers(tensors),
            0 if lse is None else lse.data_ptr(),
            *self._unmasked,
            output.data_ptr(),
            *self._of_output,
            *_NO_STATISTICS,
            weights.data_ptr(),
            *((matrix, 0, keys) if average else (heads * matrix, matrix, keys)),
            *_NO_MAP,
        )
        return output, weights

    def _of_masks(self, masks: Masks) -> tuple[float, ...]:
        visible, bias = masks
        if visible is bias is None:
            return self._unmasked
        fixed, shown, added = self._fixed, address(visible), address(bias)
        return (*fixed.band, shown, *fixed.visible, added, *fixed.bias, *fixed.dropout)

    def backward(
        self,
        tensors: Tensors,
        output: Tensor,
        lse: Tensor,
        gradient: Tensor,
        masks: Masks = UNMASKED,
        hides: bool = False,
    ) -> Tensors:
        if gradient.stride(-1) != 1 or gradient.is_neg():
            gradient = gradient.resolve_neg().contiguous()
        gradients = tuple(map(torch.empty_like, tensors))
        correction = torch.empty_like(lse, dtype=torch.float32)
        self._backward(
            instruction_set_number(),
            self._threads or torch.get_num_threads(),
            *self._sizes,
            *self._inputs.numbers(tensors),
            lse.data_ptr(),
            *self._of_masks(masks),
            gradient.data_ptr(),
            *self._steps(gradient),
            output.data_ptr(),
            *self._of_output,
            *self._gradients.numbers(gradients),
            0,  # nobody asks for lse, so that it has no gradient
            correction.data_ptr(),
            *_NO_BIAS,
            self._leaving if hides else LEAVE_NOBODY,
        )
        return gradients


def prepare_apart(request: Request) -> Prepared | None:
    """For tensors (B, H, L, D) and twice (B, Hkv, S, D); ``None`` where their rows have to be laid out first."""
    fixed = fixed_numbers(request)
    tensors = (request.query, request.key, request.value)
    if fixed is None or any(map(rows_interleave, tensors)):
        return None
    output = empty_output(request.query, request.value)
    inputs, gradients = _Apart(*map(_of_heads, tensors)), _Apart(*(_of_heads(torch.empty_like(x)) for x in tensors))
    return Prepared(request, fixed, inputs, gradients, tuple(output.shape), output.stride(), _of_heads, LEAVE_TO_OTHERS)


def prepare_flat(request: Request, projected: Tensors) -> Prepared | None:
    """Query (B·L, H·D), key and value (B·S, Hkv·D), the last two or all three side by side, → (B·L, H·D).

    The request is about views of `projected`, which are contiguous; rows count batches within positions as it does.
    """
    fixed = fixed_numbers(request)
    if fixed is None or not all(tensor.is_contiguous() for tensor in projected):
        return None
    query, value, last = request.query, request.value, len(projected) - 1
    views = enumerate((query, request.key, value))
    places = [(min(index, last), view) for index, view in views]
    if last == 2:
        layout = _Apart(*(_of_heads(view) for _, view in places))
    else:
        layout = _Within(tuple((i, view.data_ptr() - projected[i].data_ptr(), _of_heads(view)) for i, view in places))
    batch, heads, length, _ = query.shape
    dim = value.shape[-1]
    shape = (batch * length, heads * dim)

    batches, rows = (1, batch) if query.stride(0) < query.stride(2) else (length, 1)  # from one to the next

    def steps(merged: Tensor) -> Steps:
        step = merged.stride(0)
        return batches * step, dim, rows * step

    return Prepared(request, fixed, layout, layout, shape, (shape[1], 1), steps, LEAVE_OUT)


def _of_heads(tensor: Tensor) -> Steps:
    batch, head, row, _ = tensor.stride()
    return batch, head, row


def differentiable(
    template: AttentionCall, prepared: Prepared
) -> Callable[[Tensor, Tensor, Tensor, Mask | Tensor | None], Tensor]:
    """The output with gradients of every order; `template` is the call without its tensors, but for a mask's.

    Raises:
        HidesSomebody: if a mask hides anybody altogether.
    """
    apply = cast("Callable[..., Tensor]", _Known.apply)
    return lambda query, key, value, mask: apply(template, prepared, mask, query, key, value)


class HidesSomebody(Exception):
    """Instead of an output, where tensors have to be changed first."""


class _Known(torch.autograd.Function):
    """Saves what `native._Native` saves: a call may be computed there and, for a backward pass, again here."""

    @staticmethod
    def forward(
        ctx: Any, template: AttentionCall, prepared: Prepared, mask: Mask | Tensor | None, *inputs: Tensor
    ) -> Tensor:
        lse, masks = prepared.empty_lse(inputs[0]), UNMASKED if mask is None else marks_and_numbers(mask)
        output, hides = prepared.forward(inputs, lse, masks)
        if hides:
            raise HidesSomebody
        ctx.template, ctx.prepared, ctx.mask = template, prepared, mask
        ctx.save_for_backward(output, lse, *inputs, *(masks[1:] if masks[1] is not None else ()))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        output, lse, *inputs = ctx.saved_tensors

        def own() -> Tensors:
            masks = UNMASKED if ctx.mask is None else marks_and_numbers(ctx.mask)
            return ctx.prepared.backward(tuple(inputs[:3]), output, lse, gradients[0], masks)

        def recompute(*tensors: Tensor) -> Sequence[Tensor | None]:
            template = ctx.template if ctx.mask is None else replace(ctx.template, mask=as_mask(ctx.mask))
            return reference_results(template)(*tensors, *inputs[3:])

        return backward_pass(ctx, gradients, inputs[:3], own, recompute)
