"""Which calls run on `flex` without being forced, on a GPU only.

These are calls whose long mask rules out blocks of keys, and large calls that ask for the log-sum-exp.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .. import masks
from .._call.call import Call, valid_call
from .._call.layout import Layout
from .._environment import autocast_off
from ..masks._base import Mask
from ..masks._bound import BoundMask
from ..masks._lowering import hides_nothing, is_plain_causal
from ..masks._structure import Structure
from ._base import Refusal
from ._first_check import FirstCheck
from ._flex import FlexKernel
from ._flex_rule import SIDE
from ._reference import ReferenceKernel
from ._triton import available

#: From this many queries and keys on, skipping blocks saves more than compiled code costs.
FEWEST = 4096
#: From this many scores (B · H · L · S) on, `flex` computes the log-sum-exp where `sdpa` does not. Below it the many
#: operators of `chunked` take milliseconds, and compiled code takes seconds to make.
FEWEST_SCORES = 1 << 22
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_DIM = 128
#: The largest error of a result or gradient of the check, relative to the largest number.
_TOLERANCE = 5e-2


def leaves_to_flex(layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
    """The reservation of other kernels against calls that `flex` computes faster; empty for all other calls."""
    if layout.device.type != "cuda" or layout.tracing or layout.sequences is not None:
        return ()
    (batch, heads, length, dim), keys, value_dim = layout.query, layout.key[2], layout.value[3]
    if layout.lse:
        is_large = min(length, keys) >= SIDE and batch * heads * length * keys >= FEWEST_SCORES
    else:
        is_large = bound.mask is not None and min(length, keys) >= FEWEST
    if not is_large or max(dim, value_dim) > _LARGEST_DIM or layout.dtype not in _DTYPES:
        return ()
    if layout.formula or FlexKernel().refusals(layout, bound):
        return ()
    fits = _has_rules_alone if layout.lse else _leaves_out
    if bound.mask is not None and not bound.form(fits.__name__, lambda: fits(bound)):
        return ()
    if not _is_trusted(layout.device, layout.dtype):
        return ()
    computes = "computes the log-sum-exp in one kernel" if layout.lse else "skips the keys that the mask rules out"
    return (Refusal(f"`flex` {computes}"),)


def _leaves_out(bound: BoundMask) -> bool:
    """Whether a mask is made of rules about positions, `documents` and `selected`, and hides more than `causal`."""
    return not hides_nothing(bound) and not is_plain_causal(bound) and _has_rules_alone(bound)


def _has_rules_alone(bound: BoundMask) -> bool:
    """Whether a mask is made of rules about positions, of `documents`, and of selected blocks that fill its own."""
    for part in bound.parts:
        structure = part.structure
        is_rule = structure.documents is not None or all(map(_is_rule, structure.either or (structure,)))
        is_rule = is_rule or (structure.selection is not None and structure.selection.block >= SIDE)
        if part.has_bias or not is_rule:
            return False
    return True


def _is_rule(structure: Structure) -> bool:
    return structure.exact and not structure.tensors and not structure.biases


def _is_trusted(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch compiles `flex` on a device, and its results are right. The first call compiles a small one."""
    return available(torch.empty(0, 0, 0, 1, dtype=dtype, device=device)) and CHECK.passes(device, dtype)


def _compare(device: torch.device, dtype: torch.dtype) -> str | None:
    error = _error(device, dtype)
    return None if error <= _TOLERANCE else f"its numbers are wrong by {error:.2g}"


CHECK = FirstCheck("FlexAttention", "`sdpa` runs long masks.", _compare)


def _error(device: torch.device, dtype: torch.dtype) -> float:
    """The largest error of the results and the gradients of a small call, relative to the largest number."""
    generator, shape = torch.Generator().manual_seed(0), (2, 2, 300, 64)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]
    ids = torch.arange(300, device=device) // 110
    mask = masks.documents(ids) & masks.sliding_window(70, 20)
    with torch.inference_mode(False), torch.enable_grad(), autocast_off(inputs[0]):
        results = _results(FlexKernel(), mask, inputs)
        expected = _results(ReferenceKernel(), mask, [each.double() for each in inputs])
    errors = [((a.double() - b).abs().amax() / b.abs().amax()) for a, b in zip(results, expected, strict=True)]
    return float(torch.stack(errors).nan_to_num(nan=torch.inf).amax())


def _results(kernel: FlexKernel | ReferenceKernel, mask: Mask, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the log-sum-exp, and the gradients of query, key and value."""
    *leaves, gradient = (each.clone().requires_grad_() for each in inputs)
    query, key, value = leaves
    call = valid_call(Call(query, key, value, mask, lse=True))
    results = kernel.plan(call.layout, call.bound)(call)
    output, lse = results.output, cast(Tensor, results.lse)
    gradients = gradient.detach(), gradient.detach()[..., 0].to(lse.dtype)
    return [output.detach(), lse.detach(), *torch.autograd.grad((output, lse), leaves, gradients)]
