"""Greedy and beam search: what they find is what trying everything finds, with caches and without."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.positions import Rotary
from clearhead.transformer import Decoder, DecoderCache, DecoderLayer

from .conftest import example

searching = example("searching")
E, TOKENS, S, LONGEST, ROWS = 12, 4, 7, 3, 3
START, END = 0, 1


class Small(nn.Module):
    """A decoder over random memories, in float64 so that no two texts tie."""

    def __init__(self) -> None:
        super().__init__()
        attentions = clearhead.MultiHeadAttention(E, 3, position=Rotary(4)), clearhead.MultiHeadAttention(E, 3)
        self.embed, self.head = nn.Embedding(TOKENS, E), nn.Linear(E, TOKENS)
        nn.init.normal_(self.head.weight)
        self.decoder = Decoder([DecoderLayer(E, *attentions, nn.Linear(E, E))])
        self.double().eval()

    def encode(self, source: Tensor) -> Tensor:
        return self.embed(source)

    def decode(
        self, target: Tensor, memory: Tensor | None, source: Tensor, cache: Sequence[DecoderCache] | None = None
    ) -> Tensor:
        visible = masks.keep(keys=source != START)
        return self.head(
            self.decoder(self.embed(target), memory, mask=masks.causal(), memory_mask=visible, cache=cache)
        )


@pytest.fixture(name="model")
def _model() -> Small:
    return Small()


@pytest.fixture(name="source")
def _source() -> Tensor:
    source = torch.randint(2, TOKENS, (ROWS, S))
    source[1, 4:] = START  # padding
    return source


def until_end(row: Tensor) -> list[int]:
    tokens = row.tolist()
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


@torch.no_grad()
def best_of_all(model: Small, source: Tensor) -> list[int]:
    """The likeliest text for one source (1, S) among all of at most LONGEST tokens, scored in one pass each."""
    texts = {tuple(until_end(torch.tensor(text))) for text in itertools.product(range(TOKENS), repeat=LONGEST)}

    def score(text: tuple[int, ...]) -> float:
        given = torch.tensor([[START, *text[:-1]]])
        logs = model.decode(given, model.encode(source), source).log_softmax(-1)[0]
        return logs[torch.arange(len(text)), torch.tensor(text)].sum().item()

    return list(max(texts, key=score))


cached = pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
seeds = pytest.mark.parametrize("seed", range(5))


@torch.no_grad()
def writer(model: Small, source: Tensor, cached: bool) -> object:
    return searching.CachedWriter(model, source, LONGEST) if cached else searching.UncachedWriter(model, source)


@cached
def test_a_beam_wide_enough_finds_the_likeliest_text(model: Small, source: Tensor, cached: bool) -> None:
    found = searching.beam(writer(model, source, cached), START, END, LONGEST, TOKENS**LONGEST)
    assert [until_end(row) for row in found] == [best_of_all(model, source[[row]]) for row in range(ROWS)]


@cached
@seeds
def test_a_beam_of_one_is_greedy(source: Tensor, cached: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = Small()
    beam = searching.beam(writer(model, source, cached), START, END, LONGEST, 1)
    greedy = searching.greedy(writer(model, source, cached), START, END, LONGEST)
    assert list(map(until_end, beam)) == list(map(until_end, greedy))


@pytest.mark.parametrize("width", [1, 2, 3])
@seeds
def test_caches_change_nothing(source: Tensor, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = Small()
    found = [searching.beam(writer(model, source, kind), START, END, LONGEST, width) for kind in (True, False)]
    assert torch.equal(*found)


@torch.no_grad()
def test_a_cached_writer_projects_its_source_once(model: Small, source: Tensor) -> None:
    calls: list[int] = []
    model.decoder.layers[0].cross_attention.k_proj.register_forward_hook(lambda *_: calls.append(1))
    searching.beam(writer(model, source, True), START, END, LONGEST, 2)
    assert len(calls) == 1
