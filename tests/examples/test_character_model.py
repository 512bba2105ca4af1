"""The character model's text, its baseline, and what it reads and writes with sliding caches."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import masks

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
    found = characters.bits_read(model, text, model.sliding_caches(3, window=13), chunk=7)
    whole = model.decoder(model.embed(text[:, :-1]), mask=masks.causal() & masks.sliding_window(12, 0))
    logs = model.head(whole).log_softmax(-1)
    expected = -logs.gather(2, text[:, 1:, None])[..., 0] / math.log(2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


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
