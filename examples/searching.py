"""Greedy and beam search, with caches or without, over an encoder and a decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from clearhead.transformer import Decoder, DecoderCache

__all__ = ["CachedWriter", "Model", "UncachedWriter", "Writer", "beam", "greedy"]


class Model(Protocol):
    """What is written with."""

    decoder: Decoder

    def encode(self, source: Tensor) -> Tensor:
        """(B, S) → (B, S, E)."""
        ...

    def decode(
        self,
        target: Tensor,
        memory: Tensor | None,
        source: Tensor,
        cache: Sequence[DecoderCache] | None = None,
    ) -> Tensor:
        """Scores of the next token after each of the target's, (B, L, tokens)."""
        ...


class Writer(ABC):
    """Scores what could come next, for texts that are written side by side.

    Args:
        model: an encoder and a decoder.
        source: (B, S) what is read.
    """

    def __init__(self, model: Model, source: Tensor) -> None:
        self.model, self.source = model, source
        self.rows = source.shape[0]
        self.memory: Tensor | None = model.encode(source)  # (B, S, E)

    @abstractmethod
    def scores(self, written: Tensor) -> Tensor:
        """Log-probabilities of the next token after `written` (B, n), (B, tokens)."""

    @abstractmethod
    def reorder(self, indices: Tensor) -> None:
        """Let row b go on from row ``indices[b]``."""


@final
class CachedWriter(Writer):
    """Shows the model the last token only, and the source once: what came before is in its caches.

    Args:
        max_length: how many tokens can be written.
    """

    def __init__(self, model: Model, source: Tensor, max_length: int) -> None:
        super().__init__(model, source)
        self.caches = model.decoder.make_cache(self.rows, max_length)

    def scores(self, written: Tensor) -> Tensor:
        found = self.model.decode(written[:, -1:], self.memory, self.source, cache=self.caches)
        self.memory = None
        return found[:, -1].log_softmax(-1)

    def reorder(self, indices: Tensor) -> None:
        self.source = self.source[indices]
        for cache in self.caches:
            cache.reorder(indices)


@final
class UncachedWriter(Writer):
    """Shows the model everything in every step."""

    def scores(self, written: Tensor) -> Tensor:
        return self.model.decode(written, self.memory, self.source)[:, -1].log_softmax(-1)

    def reorder(self, indices: Tensor) -> None:
        self.source = self.source[indices]
        self.memory = None if self.memory is None else self.memory[indices]


@torch.no_grad()
def greedy(writer: Writer, start: int, end: int, max_length: int) -> Tensor:
    """Take the best token in every step: (B, L) without `start`; what follows `end` means nothing."""
    written = torch.full((writer.rows, 1), start)
    ended = torch.zeros(writer.rows, dtype=torch.bool)
    while written.shape[1] <= max_length and not ended.all():
        best = writer.scores(written).argmax(-1)
        ended |= best == end
        written = torch.cat((written, best[:, None]), 1)  # (B, n + 1)
    return written[:, 1:]


@torch.no_grad()
def beam(writer: Writer, start: int, end: int, max_length: int, width: int = 4) -> Tensor:
    """Keep the `width` likeliest beginnings in every step; the likeliest text of each row, as `greedy` gives it."""
    rows, beams = writer.rows, 1
    totals = torch.zeros(rows, 1)  # (B, beams)
    written = torch.full((rows, 1), start)  # (B·beams, n)
    while written.shape[1] <= max_length and not (written == end).any(1).all():
        scores = writer.scores(written)  # (B·beams, tokens)
        # A text that has ended goes on in one way, which costs nothing.
        ended = (written == end).any(1)
        scores[ended] = -torch.inf
        scores[ended, end] = 0
        tokens = scores.shape[1]
        candidates = (totals[:, :, None] + scores.view(rows, beams, tokens)).flatten(1)  # (B, beams·tokens)
        totals, chosen = candidates.topk(min(width, candidates.shape[1]))  # (B, new beams)
        parents = (chosen // tokens + torch.arange(rows)[:, None] * beams).flatten()  # (B·new beams,)
        writer.reorder(parents)
        written = torch.cat((written[parents], (chosen % tokens).reshape(-1, 1)), 1)
        beams = totals.shape[1]
    return written.view(rows, beams, -1)[:, 0, 1:]
