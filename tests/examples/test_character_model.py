"""The character model's text, its baseline, and what it reads and writes with sliding caches."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.quality import eviction
from clearhead import masks
from clearhead.caches import HeavyHitters, RandomEviction
from examples.character_model import LENGTH, CharacterModel, read_corpus

from .conftest import example

characters = example("character_model")
SIZES = {"size": 12, "heads": 6, "kv_heads": 2, "layers": 2}


@pytest.fixture(name="corpus")
def _corpus() -> Any:
    return characters.read_corpus(0)


def test_no_paragraph_is_both_held_out_and_trained_on(corpus: Any) -> None:
    training, held_out = (
        {part.strip() for part in corpus.text(numbers).split("\n\n")} - {""}
        for numbers in (corpus.training, corpus.held_out)
    )
    assert not training & held_out
    share = len(corpus.held_out) / (len(corpus.held_out) + len(corpus.training))
    assert 0.1 <= share < 0.2


def test_texts_become_numbers_and_come_back(corpus: Any) -> None:
    text = 'The "for" statement\n*******************'
    assert corpus.text(corpus.numbers(text)) == text


def test_the_bigram_baseline_is_its_formula() -> None:
    corpus = characters.Corpus("ab", torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0, 1, 1, 0]))
    # In training a is followed by b twice; b by a once and by b once. Half a count is added to each.
    expected = -(math.log2(2.5 / 3) + math.log2(1.5 / 3) + math.log2(1.5 / 3)) / 3
    assert characters.bigram_bits(corpus, 0.5) == pytest.approx(expected)


@torch.no_grad()
def test_sliding_caches_read_beyond_the_training_length_as_a_window_does() -> None:
    model, text = characters.CharacterModel(17, **SIZES).double().eval(), torch.randint(17, (3, 61))
    bits = characters.bits_read(model, text, model.sliding_caches(3, window=13), chunk=7)
    full = model.decoder(model.embed(text[:, :-1]), mask=masks.causal() & masks.sliding_window(12, 0))
    logs = model.head(full).log_softmax(-1)
    expected = -logs.gather(2, text[:, 1:, None])[..., 0] / math.log(2)
    torch.testing.assert_close(bits, expected, rtol=0, atol=1e-10)


def test_what_is_written_goes_on_from_the_prompt_and_is_seeded() -> None:
    model, prompt = characters.CharacterModel(17, **SIZES).eval(), torch.randint(17, (5,))
    first, again, other = (
        characters.write(model, prompt, 40, torch.Generator().manual_seed(seed)).tolist() for seed in (0, 0, 1)
    )
    assert len(first) == 40
    assert first == again != other
    cold = characters.write(model, prompt, 1, torch.Generator(), heat=1e-6)
    assert cold.item() == model(prompt[None])[0, -1].argmax().item()


def test_weights_are_saved_and_loaded(corpus: Any, tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "model.pt"
    model = characters.trained(corpus, 2, 0, path, **SIZES)
    again = characters.trained(corpus, 99, 1, path)  # not trained again
    assert not again.training
    assert again.sizes == model.sizes == {"characters": len(corpus.characters), **SIZES}
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_training_learns(corpus: Any) -> None:
    torch.manual_seed(0)
    model = characters.CharacterModel(len(corpus.characters), **SIZES)
    texts = corpus.held_out[:400][None]
    before = characters.bits_read(model, texts, model.sliding_caches(1)).mean()
    characters.train(model, corpus.training, 20, 0, batch=8)
    after = characters.bits_read(model, texts, model.sliding_caches(1)).mean()
    assert after < before - 0.5


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [characters.learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert all(before > after for before, after in pairwise(rates[10:]))
    assert 0.02 < rates[-1] < 0.03


# The comparison of what evicting caches lose: exact where it must be, and its figures are their formulas.


ROWS, BUDGET = 3, 37


@pytest.fixture(name="model")
def _model() -> CharacterModel:
    return CharacterModel(19, size=12, heads=6, kv_heads=2, layers=2).eval()


def test_passages_are_held_out_and_spread() -> None:
    corpus = read_corpus()
    passages = eviction.held_out_passages(corpus, 5)
    assert passages.shape == (5, LENGTH + 1)
    assert torch.equal(passages[0], corpus.held_out[: LENGTH + 1])
    assert torch.equal(passages[-1], corpus.held_out[-LENGTH - 1 :])


def test_a_full_cache_loses_nothing_and_a_small_one_does(model: CharacterModel) -> None:
    text = torch.randint(19, (ROWS, 2 * BUDGET))
    losses = eviction.compare(model, text, BUDGET, seeds=2)
    assert list(losses) == ["full cache", *eviction.POLICIES, "by lot, seed 0", "by lot, seed 1"]
    assert losses["full cache"].error < 1e-5
    assert all(loss.error > 1e-3 for name, loss in losses.items() if name != "full cache")
    assert losses["by lot, seed 0"] != losses["by lot, seed 1"]
    assert losses == eviction.compare(model, text, BUDGET, seeds=2)


@torch.no_grad()
def test_losses_are_their_formulas(model: CharacterModel) -> None:
    text, full, other = torch.randint(19, (ROWS, 8)), torch.randn(ROWS, 7, 12), torch.randn(ROWS, 7, 12)
    loss = eviction.lost(model, text, full, other, start=4)
    terms: list[tuple[float, float, float, float]] = []
    for row in range(ROWS):
        for place in range(4, 7):
            difference = (other[row, place] - full[row, place]).square().sum().item()
            p, q = (probabilities(model, output[row, place]) for output in (full, other))
            divergence = sum(a * math.log2(a / b) for a, b in zip(p, q, strict=True))
            bits = -math.log2(q[int(text[row, place + 1])])
            terms.append((difference, full[row, place].square().sum().item(), divergence, bits))
    difference, size, divergence, bits = map(sum, zip(*terms, strict=True))
    assert loss.error == pytest.approx(math.sqrt(difference / size), rel=1e-5)
    assert loss.divergence == pytest.approx(divergence / len(terms), rel=1e-4)
    assert loss.bits == pytest.approx(bits / len(terms), rel=1e-5)


def probabilities(model: CharacterModel, output: Tensor) -> list[float]:
    return model.head(output).double().softmax(-1).tolist()


@torch.no_grad()
def test_every_layer_keeps_the_budget_by_lots_of_its_own(model: CharacterModel) -> None:
    text = torch.randint(19, (ROWS, 60))
    full = eviction.outputs(model, text, None)
    torch.testing.assert_close(full, model.decoder(model.embed(text), mask=masks.causal()))
    policy = dict(eviction.policies(1, 2))["by lot, seed 0"]
    caches = eviction.evicting(model, ROWS, BUDGET, policy)
    assert all(isinstance(cache.policy, RandomEviction) for cache in caches)
    eviction.outputs(model, text, caches)
    first, second = (cache.positions.sort().values for cache in caches)
    assert first.shape == second.shape == (ROWS, 2, BUDGET)
    assert not torch.equal(first, second)
    room = eviction.evicting(model, ROWS, 60, HeavyHitters)
    torch.testing.assert_close(eviction.outputs(model, text, room), full, rtol=0, atol=1e-5)


def test_the_table_compares_policies_with_lots() -> None:
    none = {"error": 0.0, "divergence": 0.0, "bits": 2.0}
    losses = {name: none | {"error": 0.25} for name in eviction.POLICIES}
    lots = {"by lot, seed 0": none | {"error": 0.3}, "by lot, seed 1": none | {"error": 0.2}}
    rows = eviction.texts({"losses": {"full cache": none, **losses, **lots}})["table"].splitlines()
    figures = {cells[1].strip(): cells[2].strip() for cells in (row.split("|") for row in rows)}
    assert figures["everything kept"] == "0.000"
    assert all(figures[f"`{name}`"] == "0.250" for name in eviction.POLICIES)
    assert figures["`RandomEviction()`, mean of 2 seeds"] == "0.250"
    assert figures["`RandomEviction()`, the best seed"] == "0.200"
