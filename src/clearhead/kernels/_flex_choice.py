"""Which calls run on `flex` without being forced, on a GPU only.

These are calls whose long mask rules out blocks of keys, and calls with a soft-cap, ALiBi, a learned bias or the
log-sum-exp, if they are large or in a graph.
"""

from __future__ import annotations

import torch

from .. import masks
from .._call.layout import Layout
from ..masks._bound import BoundMask
from ..masks._lowering import hides_nothing, is_plain_causal
from ..masks._structure import Structure
from ._base import Refusal
from ._first_check import FirstCheck
from ._flex import FlexKernel
from ._flex_rule import SIDE
from ._small_call import SHAPE, largest_error, problem_of
from ._triton import available

#: From this many queries and keys on, skipping blocks saves more than compiled code costs.
FEWEST = 4096
#: From this many scores (B · H · L · S) on, `flex` computes what `sdpa` does not. Below it the many operators of
#: `chunked` take milliseconds, and compiled code takes seconds to make. An estimate: `benchmarks.gpu.scored` has the
#: lines that measure it on a GPU.
FEWEST_SCORES = 1 << 22
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_DIM = 128


def leaves_to_flex(layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
    """The reservation of other kernels against calls that `flex` computes faster; empty for all other calls."""
    if layout.formula - FlexKernel.formula or not _gains(layout, bound):
        return ()
    if FlexKernel().refusals(layout, bound) or reservation_of_flex(layout, bound):
        return ()
    if not _changes_scores(layout, bound):
        return (Refusal("`flex` skips the keys that the mask rules out"),)
    what = "the log-sum-exp" if layout.lse else "a soft-cap or ALiBi"
    if layout.learns_bias:
        what = "the gradient of a bias"
    return (Refusal(f"`flex` computes {what} in one kernel"),)


def reservation_of_flex(layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
    """Why a call that `flex` would gain from, or one in a graph, stays where it is; empty for all other calls."""
    if not (layout.tracing or _gains(layout, bound)):
        return ()
    dim, value_dim, changes_scores = layout.query[3], layout.value[3], _changes_scores(layout, bound)
    if not (layout.tracing or _is_large(layout, changes_scores)):
        return (Refusal("the call is smaller than those for which compiling it pays"),)
    if layout.dtype not in _DTYPES or max(dim, value_dim) > _LARGEST_DIM:
        return (Refusal("it is chosen in half precision alone, for head sizes up to {most}", most=_LARGEST_DIM),)
    fits = _is_compiled if changes_scores or layout.tracing else _leaves_out
    if bound.mask is not None and not bound.form(fits.__name__, lambda: fits(bound)):
        return (Refusal("the mask is a tensor or a function, or rules out no blocks of keys"),)
    if layout.tracing and any(part.structure.biases for part in bound.parts):
        return (Refusal("in a graph its gradient of a bias is not checked before it is used"),)
    if not layout.tracing and not _is_trusted(layout):
        return (Refusal("it is switched off, or failed the check of this device"),)
    return ()


def _gains(layout: Layout, bound: BoundMask) -> bool:
    """Whether it may compute a call faster: on a CUDA device, with a mask, or where no other fused kernel runs."""
    if layout.device.type != "cuda" or layout.sequences is not None:
        return False
    return _changes_scores(layout, bound) or (bound.mask is not None and not layout.tracing)


def _changes_scores(layout: Layout, bound: BoundMask) -> bool:
    """Whether blocks compute a call in many operators, and no other kernel of PyTorch computes it."""
    special = layout.lse or layout.learns_bias or layout.softcap is not None
    return special or any(part.structure.slopes for part in bound.parts)


def _is_large(layout: Layout, changes_scores: bool) -> bool:
    (batch, heads, length, _), keys = layout.query, layout.key[2]
    if changes_scores:
        return min(length, keys) >= SIDE and batch * heads * length * keys >= FEWEST_SCORES
    return min(length, keys) >= FEWEST


def _leaves_out(bound: BoundMask) -> bool:
    """Whether a mask is made of rules about positions, `documents` and `selected`, and hides more than `causal`."""
    hides = not hides_nothing(bound) and not is_plain_causal(bound)
    return hides and not bound.has_bias and _is_compiled(bound)


def _is_compiled(bound: BoundMask) -> bool:
    """Whether a mask is made of rules about positions, `documents`, biases, and selected blocks that fill its own."""
    for part in bound.parts:
        structure = part.structure
        if structure.slopes is not None or (structure.exact and structure.biases and not structure.tensors):
            continue
        is_rule = structure.documents is not None or all(map(_is_rule, structure.either or (structure,)))
        is_rule = is_rule or (structure.selection is not None and structure.selection.block >= SIDE)
        if part.has_bias or not is_rule:
            return False
    return True


def _is_rule(structure: Structure) -> bool:
    return structure.exact and not structure.tensors and not structure.biases


def _is_trusted(layout: Layout) -> bool:
    """Whether PyTorch compiles `flex` on a device, and its results are right. The first call compiles a small one."""
    place = layout.device, layout.dtype
    if not available(torch.empty(0, 0, 0, 1, dtype=layout.dtype, device=layout.device)) or not CHECK.passes(*place):
        return False
    return not layout.learns_bias or BIAS_CHECK.passes(*place)


def _compare(device: torch.device, dtype: torch.dtype) -> str | None:
    ids = torch.arange(SHAPE[2], device=device) // 110
    mask = masks.documents(ids) & masks.sliding_window(70, 20)
    error = largest_error(FlexKernel(), mask, device, dtype, lse=True)
    return problem_of(error)


def _compare_bias(device: torch.device, dtype: torch.dtype) -> str | None:
    bias = torch.linspace(-2, 2, SHAPE[1] * SHAPE[2] ** 2, device=device).view(1, SHAPE[1], SHAPE[2], SHAPE[2])
    error = largest_error(FlexKernel(), masks.causal() & masks.bias(bias.requires_grad_()), device, dtype)
    return problem_of(error)


CHECK = FirstCheck("FlexAttention", "`sdpa` runs long masks.", _compare)
BIAS_CHECK = FirstCheck("FlexAttention with a learned bias", "`chunked` computes its gradient.", _compare_bias)
