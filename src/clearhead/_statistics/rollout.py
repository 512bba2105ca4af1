"""Attention rollout through all layers, without an L × L tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._call.call import AttentionCall
from .._checks import is_probability, items, number, shown
from .._weights import row_numbers
from ..errors import ArgumentError, DTypeError, ShapeError
from ..kernels._block_rows import BlockRows
from ..kernels._blocks import score_blocks


def rollout(calls: Sequence[AttentionCall], targets: Sequence[int] | Tensor, residual: float = 0.5) -> Tensor:
    """Follow attention from target tokens of the last layer down to the input.

    ::

        r ← residual · r + (1 − residual) · r A_l    for l = last … first,  A_l the mean of layer l's weights over heads

    It starts with one-hot rows at the targets (Abnar and Zuidema, "Quantifying attention flow in Transformers", 2020).
    Each product r A_l is computed block by block.

    Args:
        calls: the layers' self-attention calls, first to last.
        targets: token numbers, (t,).
        residual: share of the residual connection. Default 0.5.

    Returns:
        (B, t, L). Rows sum to 1 if every token sees a key.

    Raises:
        ShapeError: if the layers are not self-attention over the same number of tokens and the same batch size.
        ArgumentError: for a target that does not exist, or a residual outside [0, 1].
    """
    residual = number("residual", residual, "a share in [0, 1]", is_probability)
    calls = items("calls", calls, "a list of calls")
    for call in calls:
        if not isinstance(call, AttentionCall):
            raise DTypeError("calls", expected="calls of a record, kept_call(...)", got=shown(call))
    if not calls:
        raise ArgumentError("layers", expected="at least one layer", got="none")
    batch_size, length = calls[0].grid.batch_size, calls[0].grid.query_length
    for place, call in enumerate(calls):
        if (call.grid.query_length, call.grid.key_length) != (length, length):
            raise ShapeError(
                "layers",
                expected=f"self-attention over the same L = {length} tokens in every layer",
                got=f"{call.grid.query_length} queries and {call.grid.key_length} keys in layer {place}",
                fix="Record or choose the self-attention layers of one stack only.",
            )
        if call.grid.batch_size != batch_size:
            raise ShapeError(
                "layers",
                expected=f"the same batch size B = {batch_size} in every layer",
                got=f"B = {call.grid.batch_size} in layer {place}",
                fix="A rollout needs the whole batch in every layer, not windows of an image.",
            )
    index = row_numbers(targets, length, "targets", "token numbers below")
    if index is None:
        raise DTypeError("targets", expected="token numbers", got="None")
    rows = calls[0].query.new_zeros(batch_size, len(index), length, dtype=calls[0].spec.compute_dtype)
    rows[:, torch.arange(len(index)), index] = 1  # (B, t, L)
    with torch.no_grad():
        # From the last layer to the first, so that the products have t rows and not L.
        for call in reversed(calls):
            rows = residual * rows + (1 - residual) * _through(call, rows)
    return rows


def _through(call: AttentionCall, rows: Tensor) -> Tensor:
    """The product r A, (B, t, L), with A the mean of the weights over heads."""
    result = torch.zeros_like(rows)
    for block, place, query, key in score_blocks(call):
        block_rows = BlockRows(call, block, place, query, key)
        product = rows[block.batch, None, :, place] @ block_rows.weights  # (b, h, t, s)
        result[block.batch, :, block_rows.columns] += product.sum(1) / call.grid.num_heads  # (b, t, s)
    return result
