"""Batches of token ids: random ones, and real texts cut to lengths that are chosen."""

from __future__ import annotations

import functools
import random
import sys
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from clearhead.cli._demo import default_model_path

__all__ = ["BATCHES", "EQUAL", "FEW", "MIXED", "TEXTS", "Batch", "mixed_lengths", "read_texts", "texts_of"]

TEXTS = 32


def mixed_lengths(longest: int = 256, share: float = 0.42) -> list[int]:
    """Lengths of texts that are `share` of their padded batch: many short ones, few long ones, one of `longest`."""
    places = torch.linspace(0, 1, TEXTS, dtype=torch.float64)
    # The mean of p^k over [0, 1] is 1 / (k + 1).
    lengths = (places.pow(1 / share - 1) * (longest - 4) + 4).round().int().tolist()
    return [lengths[(7 * index) % TEXTS] for index in range(TEXTS)]  # in no order


EQUAL, MIXED = "32 × 96 tokens", "32 texts of mixed length"
BATCHES = {EQUAL: [96] * TEXTS, MIXED: mixed_lengths()}
#: Batches of the smallest work.
FEW = {EQUAL: [7, 7, 7], MIXED: [7, 2, 5]}


@final
@dataclass(frozen=True)
class Batch:
    """Texts as token ids, padded on the right.

    Args:
        ids: int64 (B, L).
        mask: int64 (B, L), 1 for real tokens.
    """

    ids: Tensor
    mask: Tensor

    @staticmethod
    def of(lengths: list[int], vocabulary: int = 30_000) -> Batch:
        """Random tokens, the same ones every time."""
        generator = torch.Generator().manual_seed(0)
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(1000, vocabulary, tuple(mask.shape), generator=generator)
        return Batch(ids * mask, mask)

    @staticmethod
    def padded(texts: list[list[int]]) -> Batch:
        """Texts given as lists of tokens."""
        mask = Batch.of([len(text) for text in texts]).mask
        ids = torch.zeros_like(mask)
        ids[mask.bool()] = torch.tensor([token for text in texts for token in text])
        return Batch(ids, mask)

    @property
    def real(self) -> Tensor:
        """Bool (B, L)."""
        return self.mask.bool()

    @property
    def texts(self) -> list[list[int]]:
        """The tokens of each text."""
        lengths = self.mask.sum(1).tolist()
        return [ids[:length] for ids, length in zip(self.ids.tolist(), lengths, strict=True)]


def texts_of(count: int, words: tuple[int, int]) -> list[str]:
    """Passages of this many words from the documentation strings of Python's standard library."""
    draw = random.Random(0)
    modules = [sys.modules[name] for name in sorted(sys.stdlib_module_names & sys.modules.keys())]
    written = " ".join(module.__doc__ or "" for module in modules).split()
    lengths = [draw.randint(*words) for _ in range(count)]
    starts = [draw.randrange(len(written) - length) for length in lengths]
    return [" ".join(written[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def read_texts(lengths: list[int]) -> list[list[int]]:
    """Real texts of these lengths as tokens of MiniLM's tokenizer, the first and last of which are its own."""
    tokenizer = _tokenizer()
    longest = max(lengths)  # a word has at least one token
    passages = texts_of(len(lengths), (longest, longest))
    return [
        tokenizer(passage, truncation=True, max_length=length).input_ids
        for passage, length in zip(passages, lengths, strict=True)
    ]


@functools.cache
def _tokenizer() -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(default_model_path()))
