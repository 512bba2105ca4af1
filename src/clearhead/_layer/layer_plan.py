"""The plan of a module's calls: what a call with equal inputs, parameters and settings need not find out again."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import PLAIN
from .._environment import Environment, forced_linears
from .._torch_private import function_modes
from .linear import Multiply, gemm_of, linear
from .plan import Known
from .unmodified import Linears

_STRIDED = torch.strided


class LayerPlan:
    """What all calls of a module with one key share. It holds no tensor, mask or module."""

    __slots__ = ("attention", "fits", "keeps_padding", "multiply")

    def __init__(self) -> None:
        #: The GEMM of its projections; `linear` until it is chosen.
        self.multiply: Multiply = linear
        #: Whether the module has checked inputs of this key, which then fit in every call.
        self.fits = False
        #: Whether so few tokens are cheaper with their padding.
        self.keeps_padding = False
        #: What is known about the attention inside, by the layout of the projections.
        self.attention: dict[Hashable, Known] = {}


def plan_of_layer(
    inputs: tuple[Tensor, Tensor, Tensor], linears: Linears | None, settings: Hashable, environment: Environment
) -> LayerPlan | None:
    """The plan of a module's call, and the list of what every call looks at; ``None`` for a call without a plan.

    Args:
        inputs: query, key and value of the module.
        linears: the parameters of its projections, if each is an unmodified linear layer (`parameters_of_all`).
        settings: all else of the module that determines its projections and its attention.
        environment: of the call.
    """
    if linears is None or environment.transformed or environment.dispatching or environment.autocast:
        return None
    query, key, value = inputs
    distinct = inputs if key is not query or value is not key else inputs[:1]
    for x in distinct:
        if type(x) is not Tensor or x.is_nested or x.layout is not _STRIDED or x.dim() < 2:
            return None
    # A mode may compute other projections than the operators do.
    if function_modes():
        return None
    # What determines the layouts of the projections, besides the weights.
    layout = tuple([(x.shape, x.stride(), x.dtype, x.device) for x in distinct]), key is value
    on_cpu = query.is_cpu
    for weight in linears[::2]:
        if type(weight) not in PLAIN or weight.is_cpu is not on_cpu:
            return None
    gradients, kernel, forced = environment.gradients, environment.kernel, forced_linears.value
    plan = _plan_of_key(layout, linears[-2].shape, settings, gradients, kernel, forced, F.linear)
    if plan.multiply is linear:
        plan.multiply = gemm_of(inputs, linears, environment)
    return plan


@lru_cache(512)
def _plan_of_key(*key: Hashable) -> LayerPlan:
    return LayerPlan()
