"""Refusals of the native kernel, for outputs and for statistics."""

from __future__ import annotations

import torch

from .._call.layout import Layout
from .._native import extension, why_missing
from ..masks._bound import BoundMask
from ._base import Refusal, refusals_of_formula, refusals_of_heads
from ._gathered import gathers
from ._native_arguments import DTYPES

NATIVE_FORMULA = frozenset({"softcap", "sinks", "row_sinks"})
_MOST_CELLS = 1 << 26  # of a mask that has to be written to memory for statistics


def native_refusals(layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
    """All reasons against a call."""
    return (*refusals_of_formula(layout, NATIVE_FORMULA), *refusals_besides_formula(layout, bound))


def refusals_besides_formula(layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
    """All reasons against a call whose formula it computes, for `Kernel.refusals`."""
    if extension is None:
        return (Refusal("{reason}", reason=why_missing),)
    reasons: list[Refusal] = []
    if layout.device.type != "cpu":
        reasons.append(Refusal("it runs on the CPU, and the tensors are on {device}", device=layout.device))
    if layout.dtype not in DTYPES:
        reasons.append(Refusal("it computes in float32, and the tensors are {dtype}", dtype=layout.dtype))
    if layout.learns_bias and (layout.tracing or layout.dispatching or learnt_shape(bound) is None):
        reasons.append(Refusal("it gives a gradient for one bias (1 or B, H, L, S) only, and none in a graph"))
    if layout.learns_bias and gathers(bound):
        reasons.append(Refusal("it gives no gradient of a bias where it gathers selected keys"))
    if layout.sequences is not None:
        if layout.tracing or layout.dispatching:
            reasons.append(Refusal("packed sequences are no operator that a graph could hold"))
        elif bound.band is None:
            reasons.append(Refusal("within packed sequences it has masks that are bands only"))
    if layout.tracing and (torch.compiler.is_exporting() or torch.jit.is_tracing()):
        reasons.append(Refusal("an exported graph holds PyTorch's own operators only"))
    if layout.transformed:
        reasons.append(Refusal("its own backward cannot be transformed by torch.func or derived forwards"))
    elif not layout.tracing and layout.subclass is not None:
        reasons.append(Refusal("it reads plain tensors only, and one is a {kind}", kind=layout.subclass))
    elif not layout.tracing and layout.sequences is None:
        reasons += refusals_of_heads(bound, gathers(bound))
    return tuple(reasons)


def learnt_shape(bound: BoundMask) -> tuple[int, int, int, int] | None:
    """The shape (1 or B, H, L, S) of the only bias that needs a gradient, or ``None`` for several or other shapes."""
    grid = bound.grid
    batch, heads, length, keys = grid.batch_size, grid.num_heads, grid.query_length, grid.key_length
    learnt = [part for part in bound.parts if any(bias.requires_grad for bias in part.bias_tensors)]
    biases = learnt[0].structure.biases if len(learnt) == 1 else ()
    if len(biases) != 1:
        return None
    items, *matrix = biases[0].shape
    if items not in (1, batch) or matrix != [heads, length, keys]:
        return None
    return items, heads, length, keys


def refusals_of_statistics(layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
    """Reasons against weights, and statistics of them, of a call that the kernel can run."""
    if layout.dispatching:
        return (Refusal("its weights and statistics are no operator that a TorchDispatchMode could see"),)
    if layout.sequences is not None:
        return (Refusal("it has no weights or statistics of packed sequences"),)
    cells = bound.grid.batch_size * bound.grid.query_length * bound.grid.key_length
    if cells > _MOST_CELLS and not reads_in_place(bound):
        return (Refusal("for weights and statistics it would write down a mask of {cells:,} cells", cells=cells),)
    return ()


def reads_in_place(bound: BoundMask) -> bool:
    """Whether the kernel reads the whole mask without writing a part of it down."""
    gathered = gathers(bound)
    structures = (part.structure for part in bound.parts)
    return all(each.exact or (gathered and each.selection is not None) for each in structures)
