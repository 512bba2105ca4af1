"""Weights between words instead of word pieces."""

from __future__ import annotations

import torch
from torch import Tensor

from ._tokens import Tokens


def merge_words(weights: Tensor, queries: Tokens, keys: Tokens) -> Tensor:
    """Add up the weights of a word's pieces as keys, and average over a word's pieces as queries.

    Rows keep their sum. (…, L, S) becomes (…, words of the queries, words of the keys).

    Example:
        >>> tokens = Tokens(["play", "##ing", "chess"])
        >>> merge_words(torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.25, 0.75], [0.0, 0.0, 1.0]]), tokens, tokens)
        tensor([[0.5000, 0.5000],
                [0.0000, 1.0000]])
    """
    rows, columns = (torch.tensor(tokens.words, dtype=torch.long, device=weights.device) for tokens in (queries, keys))
    pieces = rows.bincount()[:, None]  # (words of the queries, 1)
    *others, length, _ = weights.shape
    summed = weights.new_zeros(*others, length, len(columns.bincount())).index_add_(-1, columns, weights)
    return weights.new_zeros(*others, len(pieces), summed.shape[-1]).index_add_(-2, rows, summed) / pieces


def has_pieces(tokens: Tokens) -> bool:
    """Whether a word consists of more than one token."""
    return len(set(tokens.words)) < len(tokens)
