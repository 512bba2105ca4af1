"""Censuses of models that never ran, and their pages as ``clearhead heads`` makes them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from clearhead import Census
from clearhead.cli._demo import PretrainedModel
from clearhead.cli._heads_page import Corpus, Shown, page_of
from clearhead.inspection._census._metrics import NAMES, Counted
from clearhead.inspection._census._moments import Moments
from clearhead.plot import Page, Tokens

HOSTILE = "</script><img src=x onerror=alert(1)>"
#: Kind → its heads and their means; every other mass is below all thresholds.
NAMED = {"induction": {(1, 0): 0.93, (1, 2): 0.61}, "previous": {(0, 3): 0.98}}


def counted(layers: int, heads: int, *, texts: int = 20, length: int = 30, strongest: int = 8) -> Census:
    """A census with random numbers, but for those of `NAMED`."""
    made = torch.Generator().manual_seed(0)
    size = (len(NAMES), heads)

    def numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=made, dtype=torch.float64)

    moments: dict[str, Moments] = {}
    for layer in range(layers):
        mean = 0.3 * numbers(*size)
        for kind, named in NAMED.items():
            for (place, head), value in named.items():
                if place == layer:
                    mean[NAMES.index(kind), head] = value
        ranked = numbers(*size, strongest).sort(dim=-1, descending=True).values.float()
        places = (torch.randint(most, (*size, strongest), generator=made) for most in (texts, length))
        count = torch.full(size, texts * length)
        moments[f"layers.{layer}"] = Moments(count, mean, numbers(*size), 0 * mean, mean + 0.1, ranked, *places)
    return Census(moments, Counted((), 5, strongest), texts, texts * length, 1)


WORDS = ["".join(random.Random(word).choices("abcdefghijklmnopqrstuvwxyz", k=2 + word % 8)) for word in range(5000)]


class _Names(Sequence[Tokens]):
    """Texts of random words, each made when it is read; the first tokens try to be markup."""

    def __init__(self, texts: int, length: int) -> None:
        self._texts, self._length = texts, length

    def __len__(self) -> int:
        return self._texts

    def __getitem__(self, text: Any) -> Any:
        words = random.Random(text).choices(WORDS, k=self._length - 2)
        return SimpleNamespace(names=[HOSTILE, "街", *words])


class _Weights:
    """The record of a text: weights of a head, drawn only as far as they are read."""

    def __init__(self, length: int) -> None:
        self._length = length

    def weights(self, layer: int, head: int, queries: Sequence[int] | None = None) -> Tensor:
        drawn = torch.Generator().manual_seed(100 * layer + head)
        rows = self._length if queries is None else len(queries)
        return (4 * torch.randn(1, rows, self._length, generator=drawn)).softmax(-1)


def page_of_counted(found: Census, length: int = 30, shown: Shown | None = None) -> Page:
    """The page of a census that `counted` made, whose texts have this length."""
    loaded = PretrainedModel("a model", None, None, True, "")
    inputs = cast(Sequence[dict[str, Tensor]], _Nothing())
    corpus = Corpus(inputs, _Names(found.texts, length))
    with patch("clearhead.cli._heads_page.run_recorded", lambda *_: _Weights(length)):
        return page_of(loaded, found, corpus, shown or Shown())


class _Nothing:
    def __getitem__(self, text: int) -> Mapping[str, Tensor]:
        return {}
