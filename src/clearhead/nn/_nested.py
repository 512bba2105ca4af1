"""Nested tensors with ``layout=torch.strided`` in `MultiheadAttention`: padded before attention, nested after it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError


def is_nested_sequence(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the arguments are one strided nested tensor, which attends to itself."""
    same = query is key and key is value and isinstance(query, Tensor)
    return same and query.is_nested and query.layout is torch.strided


def pad_nested(query: Tensor, features: int, has_masks: bool, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The padded sequences (N, L, E), and which of their tokens are padding (N, L).

    A `ShapeError` is raised if the number of features is wrong, a mask is passed, or the module is not batch first.
    """
    if has_masks:
        fix = "A nested tensor has no padding. To hide more, pad it with torch.nested.to_padded_tensor."
        raise ShapeError("attn_mask, key_padding_mask", expected="none with a nested query", got="a mask", fix=fix)
    if not batch_first:
        fix = "Build the module with batch_first=True."
        raise ShapeError("query", expected="a plain tensor (L, N, E)", got="a nested tensor (N, L, E)", fix=fix)
    shapes = [tuple(sequence.shape) for sequence in query.detach().unbind()]
    if any(len(shape) != 2 or shape[1] != features for shape in shapes):
        expected = f"sequences of shape (L, {features})"
        raise ShapeError("query", expected=expected, got=", ".join(map(str, shapes[:3])))
    lengths = torch.tensor([shape[0] for shape in shapes], device=query.device)
    padded = torch.nested.to_padded_tensor(query, 0.0)
    return padded, torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]


def nest_again(output: Tensor, padding: Tensor) -> Tensor:
    """The outputs (N, L, E) of unpadded tokens, as a nested tensor."""
    unpadded = [sequence[~padded] for sequence, padded in zip(output, padding, strict=True)]
    return torch.nested.as_nested_tensor(unpadded, layout=torch.strided)
