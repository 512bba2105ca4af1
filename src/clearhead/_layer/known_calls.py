"""Kinds of attention call that came before: validated and dispatched once, and after that only computed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._call.observers import watched
from .._call.spec import AttentionCall
from .._environment import is_tracing, is_transformed
from ..kernels._base import Plan
from ..kernels._dispatch import choose, forced_kernel
from ..kernels._second_order import allow_second_derivatives
from ..masks._coverage import COVERS_ALL
from ..masks._kinds import has_tensors, kind_of_mask

__all__ = ["forget_calls", "keep", "kind_of_call", "recall", "remember"]

_NUMBERS = (float, int)
_MOST = 256  # a decoder meets a new kind with every token, and none of them again
_plans: dict[Hashable, Any] = {}


def kind_of_call(
    query: Tensor, key: Tensor, value: Tensor, mask: object, scale: object, dropout_p: object
) -> Hashable | None:
    """All that validation and the choice of a kernel look at, for calls on the CPU of which they look at nothing else.

    Kernels that the user has switched off in PyTorch since then are left to PyTorch, which computes the same without.

    Returns:
        Equal objects for calls of one kind; ``None`` for a call whose values, mask or surroundings matter too.
    """
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
        return None
    # Numbers of other types may be equal to these, and are refused.
    if type(dropout_p) not in _NUMBERS or dropout_p or not (scale is None or type(scale) is float):
        return None
    if not (query.is_cpu and key.is_cpu and value.is_cpu) or is_tracing() or watched():
        return None
    inner: Any = torch._C  # pyright: ignore[reportPrivateUsage]  # nothing public asks these as cheaply
    if is_transformed() or inner._is_any_autocast_enabled():
        return None
    if inner._len_torch_dispatch_stack() or query.is_neg() or key.is_neg() or value.is_neg():
        return None
    wanted = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    rule = None
    try:
        if mask is not None and (rule := kind_of_mask(mask)) is None:
            return None
        shapes = (query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride())
    except RuntimeError:  # nested and sparse tensors have none
        return None
    return shapes, query.dtype, key.dtype, value.dtype, rule, scale, wanted, forced_kernel()


def recall(kind: Hashable, otherwise: object = None) -> Any:
    """How a call of this kind is computed, if there was one before."""
    return _plans.get(kind, otherwise)


def keep(kind: Hashable, plan: object) -> None:
    """Remember how calls of this kind are computed."""
    if len(_plans) >= _MOST:
        _plans.clear()
    _plans[kind] = plan


def remember(kind: Any, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Plan | None:
    """Choose the kernel for a call of this kind, which has been validated, and keep the choice.

    Args:
        kind: of the call.
        call: with what its mask hides set to zero, perhaps in copies.
        query, key, value: as they were given.

    Returns:
        The function of query, key, value and mask that computes it; ``None`` where the call is to be computed as it is.
    """
    if kind in _plans or call.query.dim() != 4 or len(kind[0][0]) != 4:
        return None
    if has_tensors(kind[4]):
        plan = _plan_masked(replace(call, query=query, key=key, value=value, reach=COVERS_ALL))
    else:
        plan = _plan(call)
    keep(kind, plan)
    return plan if call.reach.queries is call.reach.keys is None else None  # what is hidden is set to zero already


def _plan_masked(call: AttentionCall) -> Plan | None:
    kernel = choose(call)
    return kernel.prepare_masked(call) if kernel.twice_differentiable else None


def _plan(call: AttentionCall) -> Plan | None:
    if call.reach.queries is not None or call.reach.keys is not None:
        return None
    kernel = choose(call)
    compute = kernel.prepare(call)
    if kernel.twice_differentiable or not call.needs_gradients:
        return compute
    template = call.without_tensors()

    def differentiable_twice(query: Tensor, key: Tensor, value: Tensor, mask: object) -> Tensor:
        output = compute(query, key, value, mask)
        return allow_second_derivatives(kernel.name, template, output, None, (query, key, value))[0]

    return differentiable_twice


def forget_calls() -> None:
    """Validate and dispatch every kind anew."""
    _plans.clear()
