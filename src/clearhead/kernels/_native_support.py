"""Refusals of the native kernel, for outputs and for statistics."""

from __future__ import annotations

import torch

from .._call.spec import AttentionSpec
from .._native import extension, why_missing
from ..masks._base import Mask
from ..masks._grid import Grid
from ..masks._structure import structure_of
from ._base import Refusal, refusals_of_heads
from ._native_arguments import DTYPES

_MOST_CELLS = 1 << 26  # of a mask that has to be written to memory for statistics


def native_refusals(spec: AttentionSpec, mask: Mask | None, grid: Grid) -> tuple[Refusal, ...]:
    """All reasons against a call, for `Kernel.refusals`."""
    if extension is None:
        return (Refusal("{reason}", reason=why_missing),)
    reasons: list[Refusal] = []
    if spec.device.type != "cpu":
        reasons.append(Refusal("it runs on the CPU, and the tensors are on {device}", device=spec.device))
    if spec.dtype not in DTYPES:
        reasons.append(Refusal("it computes in float32, and the tensors are {dtype}", dtype=spec.dtype))
    if spec.learns_bias and (spec.tracing or spec.dispatching or learnt_shape(mask, grid) is None):
        reasons.append(Refusal("it gives a gradient for one bias (1 or B, H, L, S) only, and none in a graph"))
    if spec.sequences is not None:
        if spec.tracing or spec.dispatching:
            reasons.append(Refusal("packed sequences are no operator that a graph could hold"))
        elif mask is not None and structure_of(mask, grid).only_band(grid) is None:
            reasons.append(Refusal("within packed sequences it has masks that are bands only"))
    if spec.tracing and (torch.compiler.is_exporting() or torch.jit.is_tracing()):
        reasons.append(Refusal("an exported graph holds PyTorch's own operators only"))
    if spec.transformed:
        reasons.append(Refusal("its own backward cannot be transformed by torch.func or derived forwards"))
    elif not spec.tracing and spec.subclass is not None:
        reasons.append(Refusal("it reads plain tensors only, and one is a {kind}", kind=spec.subclass))
    elif not spec.tracing and mask is not None and spec.sequences is None:
        reasons += refusals_of_heads(mask, grid)
    return tuple(reasons)


def learnt_shape(mask: Mask | None, grid: Grid) -> tuple[int, int, int, int] | None:
    """The shape (1 or B, H, L, S) of the only bias that needs a gradient, or ``None`` for several or other shapes."""
    batch, heads, length, keys = grid.batch_size, grid.num_heads, grid.query_length, grid.key_length
    parts = [] if mask is None else mask.parts()
    learnt = [part for part in parts if any(bias.requires_grad for bias in part.bias_tensors())]
    biases = structure_of(learnt[0], grid).biases if len(learnt) == 1 else ()
    if len(biases) != 1:
        return None
    items, *matrix = biases[0].shape
    if items not in (1, batch) or matrix != [heads, length, keys]:
        return None
    return items, heads, length, keys


def refusals_of_statistics(spec: AttentionSpec, mask: Mask | None, grid: Grid) -> tuple[Refusal, ...]:
    """Reasons against weights, and statistics of them, of a call that the kernel can run."""
    if spec.dispatching:
        return (Refusal("its weights and statistics are no operator that a TorchDispatchMode could see"),)
    if spec.sequences is not None:
        return (Refusal("it has no weights or statistics of packed sequences"),)
    cells = grid.batch_size * grid.query_length * grid.key_length
    if cells > _MOST_CELLS and not reads_in_place(mask, grid):
        return (Refusal("for weights and statistics it would write down a mask of {cells:,} cells", cells=cells),)
    return ()


def reads_in_place(mask: Mask | None, grid: Grid) -> bool:
    """Whether the kernel reads the whole mask without writing a part of it down."""
    return mask is None or all(structure_of(part, grid).exact for part in mask.parts())
