"""Which calls run on `flex` without being forced, on a GPU only.

These are calls whose long mask rules out blocks of keys, and large calls with a soft-cap, ALiBi or the log-sum-exp.
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
#: From this many scores (B · H · L · S) on, `flex` computes what `sdpa` does not. Below it the many
#: operators of `chunked` take milliseconds, and compiled code takes seconds to make.
FEWEST_SCORES = 1 << 22
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_DIM = 128


def leaves_to_flex(layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
    """The reservation of other kernels against calls that `flex` computes faster; empty for all other calls."""
    if layout.device.type != "cuda" or layout.tracing or layout.sequences is not None:
        return ()
    (batch, heads, length, dim), keys, value_dim = layout.query, layout.key[2], layout.value[3]
    # Blocks compute these in many operators, and no other kernel of PyTorch computes them.
    changes_scores = layout.softcap is not None or any(part.structure.slopes for part in bound.parts)
    if layout.lse or changes_scores:
        is_large = min(length, keys) >= SIDE and batch * heads * length * keys >= FEWEST_SCORES
    else:
        is_large = bound.mask is not None and min(length, keys) >= FEWEST
    if not is_large or max(dim, value_dim) > _LARGEST_DIM or layout.dtype not in _DTYPES:
        return ()
    if layout.formula - FlexKernel.formula or FlexKernel().refusals(layout, bound):
        return ()
    fits = _has_rules_alone if layout.lse or changes_scores else _leaves_out
    if bound.mask is not None and not bound.once(fits.__name__, lambda: fits(bound)):
        return ()
    if not _is_trusted(layout.device, layout.dtype):
        return ()
    computes = "skips the keys that the mask rules out"
    if layout.lse or changes_scores:
        computes = f"computes {'the log-sum-exp' if layout.lse else 'a soft-cap or ALiBi'} in one kernel"
    return (Refusal(f"`flex` {computes}"),)


def _leaves_out(bound: BoundMask) -> bool:
    """Whether a mask is made of rules about positions, `documents` and `selected`, and hides more than `causal`."""
    return not hides_nothing(bound) and not is_plain_causal(bound) and _has_rules_alone(bound)


def _has_rules_alone(bound: BoundMask) -> bool:
    """Whether a mask is made of rules about positions, `documents`, ALiBi, and selected blocks that fill its own."""
    for part in bound.parts:
        structure = part.structure
        if structure.slopes is not None:
            continue
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
    ids = torch.arange(SHAPE[2], device=device) // 110
    mask = masks.documents(ids) & masks.sliding_window(70, 20)
    error = largest_error(FlexKernel(), mask, device, dtype, lse=True)
    return problem_of(error)


CHECK = FirstCheck("FlexAttention", "`sdpa` runs long masks.", _compare)
