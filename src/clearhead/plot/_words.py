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
    rows, columns = (_membership(tokens, weights) for tokens in (queries, keys))
    return (rows / rows.sum(-1, keepdim=True)) @ weights @ columns.T


def has_pieces(tokens: Tokens) -> bool:
    """Whether a word consists of more than one token."""
    return len(set(tokens.words)) < len(tokens)


def _membership(tokens: Tokens, like: Tensor) -> Tensor:
    words = torch.tensor(tokens.words, dtype=torch.long, device=like.device)
    return torch.nn.functional.one_hot(words).to(like.dtype).T  # (words, tokens)
