"""The picture: what it shows, that it can always be saved, and that it touches nothing else."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest
import torch
from PIL import Image
from torch import Tensor

from clearhead.errors import ArgumentError, ShapeError
from clearhead.plot.matplotlib import draw_heads, save_figure


def random_weights(layers: int, heads: int, length: int, keys: int) -> list[Tensor]:
    return [torch.randn(heads, length, keys).softmax(-1) for _ in range(layers)]


def test_the_large_map_is_the_chosen_head() -> None:
    weights = random_weights(3, 2, 5, 7)
    tokens, keys = [f"q{i}" for i in range(5)], [f"k{i}" for i in range(7)]
    figure = draw_heads(weights, tokens, 2, 1, key_tokens=keys, title="A title")
    large = figure.axes[0]
    shown = torch.tensor(large.images[0].get_array())
    torch.testing.assert_close(shown.square(), weights[2][1])
    assert [label.get_text() for label in large.get_yticklabels()] == tokens
    assert [label.get_text() for label in large.get_xticklabels()] == keys
    assert [text.get_text() for text in figure.texts] == ["A title   ·   layer 2, head 1"]


def test_every_head_has_its_thumbnail() -> None:
    weights = [torch.zeros(heads, 4, 4) for heads in (3, 2)]
    weights[1][1] = 1.0
    mosaic = torch.tensor(draw_heads(weights, list("abcd"), 0, 0).axes[1].images[0].get_array())
    height, width = mosaic.shape[0] / 2, mosaic.shape[1] / 3
    middles = [[mosaic[int((r + 0.5) * height), int((c + 0.5) * width)].item() for c in range(3)] for r in range(2)]
    assert middles == [[0, 0, 0], [0, 1, 0]]


def test_the_color_bar_is_labelled_with_weights() -> None:
    figure = draw_heads(random_weights(1, 1, 3, 3), list("abc"), 0, 0)
    bar = figure.axes[2]
    labels = [float(label.get_text()) for label in bar.get_xticklabels()]
    assert labels[0] == 0
    assert labels[-1] == 1
    assert bar.get_xticks().tolist() == pytest.approx([label**0.5 for label in labels])
    assert "do not explain" in bar.get_xlabel()


@pytest.mark.parametrize(
    ("layers", "heads", "length", "keys"),
    [(1, 1, 1, 1), (6, 12, 16, 16), (2, 3, 5, 19), (32, 32, 70, 70), (1, 2, 300, 300)],
)
def test_sizes(layers: int, heads: int, length: int, keys: int, tmp_path: Path) -> None:
    tokens, key_tokens = [f"t{i}" for i in range(length)], [f"t{i}" for i in range(keys)]
    figure = draw_heads(random_weights(layers, heads, length, keys), tokens, 0, 0, key_tokens=key_tokens)
    with Image.open(save_figure(figure, tmp_path / "heads.png")) as picture:
        width, height = picture.size
        assert 700 < width < 3500
        assert 300 < height < 3500
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 10


def test_hostile_and_foreign_tokens_are_drawn(tmp_path: Path) -> None:
    tokens = ["今天", "$x^2$", "\x1b[31m", "<script>", "a" * 99, "😀", "ไทย", "\u202eabc", "$\\frac{", ""]
    figure = draw_heads(random_weights(1, 1, 10, 10), tokens, 0, 0, title="$\\bad{ 今天 \U000e0001")
    assert save_figure(figure, tmp_path / "heads.png").stat().st_size > 1000
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[1:4] == ["$x^2$", "\\x1b[31m", "<script>"]
    assert labels[4] == "a" * 15 + "…"
    assert labels[7] == "\\u202eabc"


def test_no_global_state_is_touched(tmp_path: Path) -> None:
    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend(auto_select=False)
    save_figure(draw_heads(random_weights(1, 1, 2, 2), ["a", "b"], 0, 0), tmp_path / "heads.png")
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.get_backend(auto_select=False) == backend


def test_half_precision_on_a_gradient_tape() -> None:
    weights = [torch.ones(1, 2, 2, dtype=torch.bfloat16, requires_grad=True) / 2]
    assert draw_heads(weights, ["a", "b"], 0, 0).axes


def test_wrong_arguments() -> None:
    weights = random_weights(2, 3, 2, 2)
    with pytest.raises(ArgumentError, match="layer: expected 0 to 1"):
        draw_heads(weights, ["a", "b"], 2, 0)
    with pytest.raises(ShapeError, match=r"weights\[0\]"):
        draw_heads(weights, ["a"], 0, 0)
