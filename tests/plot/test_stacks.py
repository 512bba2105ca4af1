"""Pictures of models with several stacks, of modules that run as several layers, and of decoding steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import ArgumentError
from clearhead.plot._collect import collect
from clearhead.plot._sections import find_sections
from tests.inspection.test_stacks import PATCHES, clip
from tests.support.randomised import randomised

from .pages import Contents
from .recorded import KEPT, recorded

TITLES = ["self-attention, vision_model.encoder.layers", "self-attention, text_model.encoder.layers"]


def record_clip(texts: int = 2) -> tuple[Any, dict[str, Tensor]]:
    model, inputs = clip(texts)
    with torch.no_grad(), clearhead.record(model, **KEPT) as rec:
        model(**inputs)
    return rec, inputs


def test_towers_of_equal_lengths_are_two_sections() -> None:
    rec, inputs = record_clip()
    contents = Contents(rec.page().text)
    assert [section["title"] for section in contents.data["sections"]] == TITLES
    assert [len(section.layers) for section in find_sections(rec, two_texts=False)] == [2, 2]
    picture = Contents(rec.page(image=list(inputs["pixel_values"])).text)
    [section] = picture.data["sections"]
    assert all(layer["name"].startswith("vision_model") for layer in section["layers"])
    words = [f"word {place}" for place in range(PATCHES)]
    with pytest.raises(
        ArgumentError, match=r"tokens: expected layers over one text, got self-attention in vision_model\.enc"
    ):
        rec.page(words)
    labels = rec.plot_map("text_model.encoder.layers.1.self_attn", 0, tokens=words).get_xticklabels()
    assert labels[-1].get_text() == words[-1]


def test_more_texts_than_pictures() -> None:
    rec, inputs = record_clip(texts=3)
    assert len(Contents(rec.page(image=list(inputs["pixel_values"])).text).data["items"]) == 2
    assert rec.plot_map(2, 0, item=2).get_title("left") == "layer 0, head 0"
    text = (
        r"equally many batch items in every layer, got 3 in text_model.*0\.self_attn and 2 in vision_model.*layers=\."
    )
    with pytest.raises(ArgumentError, match=text):
        rec.page()


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = randomised(clearhead.MultiHeadAttention(12, 3), 0.4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.attend(x)
        return x


def test_runs_of_a_module_are_rows_and_not_texts() -> None:
    rec, other = (recorded(Repeated(), torch.randn(2, 5, 12)) for _ in range(2))
    [section] = find_sections(rec, two_texts=False)
    assert section.layers == ("attend/0", "attend/1", "attend/2")
    contents = Contents(rec.page([list("abcde")] * 2).text)
    assert [layer["label"] for layer in contents.data["sections"][0]["layers"]] == ["0", "1", "2"]
    assert len(contents.data["items"]) == 2
    assert [label.get_text() for label in rec.plot_heads("entropy").get_yticklabels()] == ["0", "1", "2"]
    assert list(rec.compare(other).divergence) == ["attend/0", "attend/1", "attend/2"]


class Cached(nn.Module):
    """Attention that keeps the keys of earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = randomised(clearhead.MultiHeadAttention(12, 3), 0.4)
        self.cache = self.attend.make_cache(1, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, cache=self.cache)


def test_a_decoding_step_shows_all_keys() -> None:
    model = Cached()
    with torch.no_grad(), clearhead.record(model, **KEPT) as rec:
        for length in (5, 1, 1):
            model(torch.randn(1, length, 12))
    items = [item.sections[0].layers[0] for item in collect(rec)]
    assert [layer.exact_map.shape[1:] for layer in items] == [(5, 5), (1, 6), (1, 7)]
    for call, layer in enumerate(items):
        torch.testing.assert_close(layer.exact_map, rec.weights(0, call=call)[0], rtol=0, atol=1e-6)
    assert len(Contents(rec.page().text).data["items"]) == 3
