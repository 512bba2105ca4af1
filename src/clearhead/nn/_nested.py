"""Nested tensors with ``layout=torch.strided`` in `MultiheadAttention`: padded before attention, nested after it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError


def is_nested_sequence(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the arguments are one strided nested tensor, which attends to itself."""
    return (
        query is key
        and key is value
        and isinstance(query, Tensor)
        and query.is_nested
        and query.layout is torch.strided
    )


def pad_nested(query: Tensor, features: int, has_masks: bool, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The padded sequences (N, L, E), and which positions are padding (N, L).

    Raises:
        ShapeError: for another number of features, for masks, and for a module that is not batch first.
    """
    if has_masks:
        fix = "A nested tensor has no padding. To hide more, pad it with torch.nested.to_padded_tensor."
        raise ShapeError("attn_mask, key_padding_mask", expected="none with a nested query", got="a mask", fix=fix)
    if not batch_first:
        fix = "Build the module with batch_first=True."
        raise ShapeError("query", expected="a plain tensor (L, N, E)", got="a nested tensor (N, L, E)", fix=fix)
    sequences = query.detach().unbind()
    if any(each.dim() != 2 or each.shape[1] != features for each in sequences):
        shapes = ", ".join(str(tuple(each.shape)) for each in sequences[:3])
        raise ShapeError("query", expected=f"sequences of shape (L, {features})", got=shapes)
    lengths = torch.tensor([each.shape[0] for each in sequences], device=query.device)
    padded = torch.nested.to_padded_tensor(query, 0.0)
    return padded, torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]


def nest_again(output: Tensor, padding: Tensor) -> Tensor:
    """The rows (N, L, E) that are no padding, as a nested tensor."""
    lengths = padding.logical_not().sum(1).tolist()
    rows = [each[:length] for each, length in zip(output, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.strided)
