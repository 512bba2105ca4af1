"""The comparison of what evicting caches lose: exact where it must be, and its figures are their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks import eviction
from clearhead import masks
from clearhead.caches import HeavyHitters, RandomEviction
from examples.character_model import LENGTH, CharacterModel, read_corpus

ROWS, BUDGET = 3, 37


@pytest.fixture(name="model")
def _model() -> CharacterModel:
    return CharacterModel(19, size=12, heads=6, kv_heads=2, layers=2).eval()


def test_passages_are_held_out_and_spread() -> None:
    corpus = read_corpus()
    found = eviction.held_out_passages(corpus, 5)
    assert found.shape == (5, LENGTH + 1)
    assert torch.equal(found[0], corpus.held_out[: LENGTH + 1])
    assert torch.equal(found[-1], corpus.held_out[-LENGTH - 1 :])


def test_a_full_cache_loses_nothing_and_a_small_one_does(model: CharacterModel) -> None:
    text = torch.randint(19, (ROWS, 2 * BUDGET))
    found = eviction.compare(model, text, BUDGET, seeds=2)
    assert list(found) == ["full cache", *eviction.POLICIES, "by lot, seed 0", "by lot, seed 1"]
    assert found["full cache"].error < 1e-5
    assert all(loss.error > 1e-3 for name, loss in found.items() if name != "full cache")
    assert found["by lot, seed 0"] != found["by lot, seed 1"]
    assert found == eviction.compare(model, text, BUDGET, seeds=2)


@torch.no_grad()
def test_losses_are_their_formulas(model: CharacterModel) -> None:
    text, full, found = torch.randint(19, (ROWS, 8)), torch.randn(ROWS, 7, 12), torch.randn(ROWS, 7, 12)
    loss = eviction.lost(model, text, full, found, start=4)
    terms: list[tuple[float, float, float, float]] = []
    for row in range(ROWS):
        for place in range(4, 7):
            difference = (found[row, place] - full[row, place]).square().sum().item()
            p, q = (probabilities(model, output[row, place]) for output in (full, found))
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
    whole = eviction.outputs(model, text, None)
    torch.testing.assert_close(whole, model.decoder(model.embed(text), mask=masks.causal()))
    policy = dict(eviction.policies(1, 2))["by lot, seed 0"]
    caches = eviction.evicting(model, ROWS, BUDGET, policy)
    assert all(isinstance(cache.policy, RandomEviction) for cache in caches)
    eviction.outputs(model, text, caches)
    first, second = (cache.positions.sort().values for cache in caches)
    assert first.shape == second.shape == (ROWS, 2, BUDGET)
    assert not torch.equal(first, second)
    room = eviction.evicting(model, ROWS, 60, HeavyHitters)
    torch.testing.assert_close(eviction.outputs(model, text, room), whole, rtol=0, atol=1e-5)


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
