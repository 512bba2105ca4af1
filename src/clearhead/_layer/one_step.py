"""Attention layers as one step of autograd: for tiny calls, whose time goes into the number of operations.

The numbers are computed as the layer's modules compute them, product for product and in the same order, forward and
backward. So nobody can tell from the result which way it went: a hook, a recorder or checkpointing changes no bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore[reportPrivateUsage]

from .._call.observers import watched
from .._call.spec import build_call
from .._environment import is_tracing
from .._native import extension
from ..errors import ClearheadError
from ..kernels._dispatch import choose, forced_kernel
from ..masks._base import Mask
from ..masks._coverage import COVERS_ALL
from ..masks._kinds import has_tensors, kind_of_mask
from .known_calls import keep, recall
from .linear import forced_product, is_pytorchs_product
from .one_step_layer import Heads, OptionalTensors, Step, cut, differentiable_step

__all__ = ["may_be_one_step", "one_step"]


def may_be_one_step(x: Tensor) -> bool:
    """Whether a layer's parameters are worth looking at; to be asked before `one_step`."""
    return extension is not None and type(x) is Tensor and x.is_cpu and not is_tracing()


def one_step(
    inputs: tuple[Tensor, ...],
    parameters: OptionalTensors,
    heads: tuple[int, int, int, bool],
    scale: object,
    mask: Mask | None,
    average: bool | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Attention between its projections.

    Args:
        inputs: what each projection takes, (B, length, E) or (length, B, E): that of query, key and value; that of
            query, and that of key and value; or that of all three.
        parameters: weight and bias or ``None`` of each projection, or of one that gives all three side by side, and of
            the output's; of modules on which nothing hangs.
        heads: H, Hkv, D, and whether batches come before positions.
        scale: ``None``, or a float.
        mask: of any kind; without tensors where weights are wanted.
        average: whether the weights are averaged over the heads. Default: no weights.

    Returns:
        The output, laid out like the first input, and the weights (B, L, S) or (B, H, L, S) if they are wanted;
        ``None`` where the call is no tiny one, where something looks at single operations, and where an input is wrong.
    """
    shapes, last, shape = [], None, None
    for x in inputs:
        if x is not last:
            if type(x) is not Tensor or x.is_nested or not _is_ordinary(x):
                return None
            last, shape = x, x.shape
        shapes.append(shape)
    if not _is_undisturbed() or not (scale is None or type(scale) is float):
        return None
    weights: Any = parameters[::2]
    biases = parameters[1::2]
    for weight in weights:
        if type(weight) not in _TYPES or not _is_ordinary(weight):
            return None
        shapes.append(weight.shape)
    for bias in biases:
        if bias is not None and (type(bias) not in _TYPES or bias.dtype is not _FLOAT):
            return None
    rule = None
    if mask is not None and (rule := kind_of_mask(mask)) is None:
        return None
    if average is not None and has_tensors(rule):
        return None
    kind = (*shapes, len(inputs), heads, scale, rule, average)
    step = recall(kind, _UNKNOWN)
    if step is _UNKNOWN:
        step = _prepare(inputs, shapes[len(inputs) :], Heads(*heads), scale, mask, average)
        keep(kind, step)
    if step is None:
        return None
    tensors = mask if has_tensors(rule) else None
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (*inputs, *parameters)):
        return differentiable_step(step, inputs, parameters, tensors)
    return step.compute(inputs, weights, biases, tensors, None)[:2]


_TYPES: Final = (nn.Parameter, Tensor)  # no subclasses: they mean something of their own by a product
_FLOAT: Final = torch.float32
_STRIDED: Final = torch.strided
_UNKNOWN: Final = object()


def _is_ordinary(tensor: Tensor) -> bool:
    return tensor.dtype is _FLOAT and tensor.is_cpu and tensor.layout is _STRIDED and tensor.is_contiguous()


def _is_undisturbed() -> bool:
    """Whether nothing around this call sees, changes or repeats single operations."""
    inner: Any = torch._C  # pyright: ignore[reportPrivateUsage]  # nothing public asks these as cheaply
    return not (
        watched()
        or inner._are_functorch_transforms_active()
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or inner._is_any_autocast_enabled()
        or inner._len_torch_dispatch_stack()
        or inner._len_torch_function_stack()
        or inner._autograd._top_saved_tensors_default_hooks(True) is not None  # checkpointing, offloading
        or _has_any_global_hook()
        or forced_kernel() is not None
        or forced_product() is not None
    )


def _prepare(
    inputs: tuple[Tensor, ...],
    weights: list[torch.Size],
    heads: Heads,
    scale: float | None,
    mask: Mask | None,
    average: bool | None,
) -> Step | None:
    """What is the same in every call of a kind; ``None`` for those that go another way."""
    shapes = [x.shape for x in inputs]
    sizes = (*(size for shape in shapes for size in shape), *heads[:3], *weights[-1])
    if any(len(shape) != 3 for shape in shapes) or any(len(shape) != 2 for shape in weights) or 0 in sizes:
        return None
    if not _fit(shapes, weights, heads):
        return None
    rows = [shape[0] * shape[1] for shape in shapes]
    widths = heads.widths(len(inputs))
    products = [*zip(rows, (w * shape[2] for w, shape in zip(widths, shapes, strict=True)), strict=True)]
    if not all(is_pytorchs_product(*each) for each in (*products, (rows[0], weights[-1].numel()))):
        return None
    projected = tuple(inputs[0].new_empty(count, width) for count, width in zip(rows, widths, strict=True))
    attended = cut(projected, (shapes[0][:2], shapes[-1][:2]), heads)
    nothing: dict[str, Any] = dict.fromkeys(("softcap", "sinks", "query_positions", "key_positions"))
    try:
        call = build_call(*attended, mask, scale=scale, dropout_p=0.0, return_lse=False, **nothing)
    except ClearheadError:
        return None
    masked = has_tensors(kind_of_mask(mask))
    if masked:  # what is hidden may be other keys the next time
        query, key, value = attended
        call = replace(call, query=query, key=key, value=value, reach=COVERS_ALL)
    elif call.reach.queries is not None or call.reach.keys is not None:
        return None
    attention = choose(call).prepare_flat(call, projected)
    if attention is None:
        return None
    template = replace(call.without_tensors(), mask=None if masked else mask)  # a mask's tensors are not to be kept
    return Step(template, attention, heads, shapes, weights[-1][0], average)


def _fit(shapes: list[torch.Size], weights: list[torch.Size], heads: Heads) -> bool:
    """Whether inputs fit their weights and each other."""
    batch = 0 if heads.batch_first else 1
    if any(shape[:2] != shapes[-1][:2] for shape in shapes[1:]) or shapes[0][batch] != shapes[-1][batch]:
        return False
    *projections, last = weights
    features = [shape[2] for shape in shapes]
    if len(projections) == 1:
        expected = [(sum(heads.widths(3)), features[0])]
        if len(set(features)) > 1:
            return False
    else:
        expected = [*zip(heads.widths(3), features, strict=False)]
    return [tuple(shape) for shape in projections] == expected and last[1] == heads.queries * heads.dim
