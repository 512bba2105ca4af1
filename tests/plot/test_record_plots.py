"""Pictures of a record, as functions and methods: what they show, where they draw, and how they refuse."""

from __future__ import annotations

import subprocess
import sys
from io import BytesIO
from typing import Any

import numpy
import pytest
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clearhead import plot
from clearhead.plot import Tokens, given, plot_heads, plot_map, plot_received, plot_rollout

from .pages import Contents
from .recorded import record_pair, record_two


def values(axes: Any, end: float = 1.0) -> torch.Tensor:
    """The weights behind the colours of an image."""
    return torch.tensor(numpy.asarray(axes.images[-1].get_array())).square() * end


def printed_end(axes: Any) -> float:
    """The largest number on the colour bar beside axes."""
    [bar] = [other for other in axes.figure.axes if other is not axes]
    return float(bar.get_yticklabels()[-1].get_text().removeprefix("≥ "))


def require_map(axes: Any, weights: torch.Tensor) -> None:
    """The colours and the colour bar show these weights."""
    torch.testing.assert_close(values(axes, printed_end(axes)), weights, atol=1e-5, rtol=1e-4)


def names(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


@pytest.mark.parametrize("statistic", ["entropy", "normalized_entropy", "sink", "offset +1", "max_logit"])
def test_heads_are_numbers(statistic: str) -> None:
    rec = record_two(statistics=("entropy", "sink", "offset", "max_logit"), offsets=(1,))
    axes = plot_heads(rec, statistic)
    shown = torch.tensor(numpy.asarray(axes.images[0].get_array()))
    torch.testing.assert_close(shown, torch.stack(list(rec.summary()[statistic].values())))
    assert (names(axes.get_xticklabels()), names(axes.get_yticklabels())) == (["0", "1", "2"], ["0", "1"])
    assert axes.get_title("left") == statistic


def test_a_map_is_the_heads_weights() -> None:
    rec = record_two(7, batch=2)
    axes = plot_map(rec, 1, 2, tokens=[list("abcdefg"), list("tuvwxyz")], item=1)
    require_map(axes, rec.weights(1, 2)[1])
    assert names(axes.get_yticklabels()) == names(axes.get_xticklabels()) == list("tuvwxyz")
    assert axes.get_title("left") == "layer 1, head 2"


def test_a_long_map_is_exact_where_it_can_be_and_tiles_elsewhere() -> None:
    torch.manual_seed(1)
    rec = record_two(200)
    exact = plot_map(rec, 0, 1)
    assert exact.images[0].get_array().shape == (200, 200)
    end = printed_end(exact)
    torch.testing.assert_close(values(exact, end), rec.weights(0, 1)[0].clamp(max=end), atol=1e-5, rtol=1e-4)
    poor = record_two(200, statistics=("entropy", "received", "top_k", "map"))
    tiles = plot_map(poor, 0, 1)
    assert tiles.images[0].get_array().shape == (128, 128)
    assert tiles.images[0].get_extent() == [-0.5, 199.5, 199.5, -0.5]
    [bar] = [other for other in tiles.figure.axes if other is not tiles]
    assert "tile" in bar.get_ylabel()


def test_a_map_between_words() -> None:
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.25, 0.75], [0.0, 0.0, 1.0]])
    axes = plot_map(given([weights[None]]), 0, 0, tokens=Tokens(["play", "##ing", "chess"]), words=True)
    assert names(axes.get_yticklabels()) == ["playing", "chess"]
    require_map(axes, torch.tensor([[0.5, 0.5], [0.0, 1.0]]))


def test_a_map_between_two_texts() -> None:
    rec, cross = record_pair(), "decoder.layers.0.multihead_attn"
    texts: dict[str, Any] = {"tokens": list("abcde"), "key_tokens": list("stuvwxy")}
    axes = rec.plot_map(cross, 1, **texts, words=True)
    assert names(axes.get_yticklabels()) == list("abcde")
    assert names(axes.get_xticklabels()) == list("stuvwxy")
    require_map(axes, rec.weights(cross, 1)[0])
    assert names(rec.plot_received(cross, 1, **texts).get_xticklabels()) == list("stuvwxy")


def test_what_keys_receive() -> None:
    rec = record_two()
    heights = [bar.get_height() for bar in plot_received(rec, 1, 0, tokens=list("abcdefg")).patches]
    assert heights == pytest.approx(rec.weights(1, 0)[0].sum(0).tolist(), rel=1e-4)
    heights = [bar.get_height() for bar in plot_received(rec).patches]
    both = torch.stack([rec.weights(layer)[0].sum(1).mean(0) for layer in range(2)]).mean(0)
    assert heights == pytest.approx(both.tolist(), rel=1e-4)


def test_padding_is_left_out() -> None:
    rec = record_two(5, 2, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
    axes = plot_map(rec, 0, 0, tokens=[list("abcde"), list("xyz")], item=1)
    assert names(axes.get_xticklabels()) == ["x", "y", "z"]
    require_map(axes, rec.weights(0, 0)[1, :3, :3])


def test_rollout_over_tokens() -> None:
    rec = record_two()
    axes = plot_rollout(rec, [2, 5], tokens=list("abcdefg"))
    require_map(axes, rec.rollout([2, 5])[0])
    assert names(axes.get_yticklabels()) == ["c", "f"]
    assert names(axes.get_xticklabels()) == list("abcdefg")


@pytest.mark.parametrize(
    "image", [None, torch.rand(3, 30, 40), numpy.zeros((30, 40, 3), dtype="uint8"), torch.randn(9, 12)]
)
def test_rollout_over_an_image(image: Any) -> None:
    rec = record_two(1 + 2 + 3 * 4)
    axes = plot_rollout(rec, 0, grid=(3, 4), image=image)
    patches = rec.rollout([0])[0, 0, 3:].view(3, 4)
    shown = torch.tensor(numpy.asarray(axes.images[-1].get_array())).square()
    torch.testing.assert_close(shown / shown.max(), patches / patches.max(), atol=1e-4, rtol=1e-3)
    assert len(axes.images) == (1 if image is None else 2)
    if image is not None:
        alpha = torch.tensor(numpy.asarray(axes.images[1].get_alpha()))
        assert int(alpha.argmax()) == int(patches.argmax())
        assert axes.images[0].get_extent() == axes.images[1].get_extent()


LENGTH = 7
TOKENS = ["$\\frac{", "<b>", "街", "d", "e", "f", "g"]
METHODS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plot_heads": (("entropy",), {}),
    "plot_map": ((1, 2), {"tokens": TOKENS}),
    "plot_received": ((0, 1), {"tokens": TOKENS}),
    "plot_rollout": (([2, 5],), {"tokens": TOKENS}),
}


@pytest.fixture(scope="module", name="rec")
def _rec() -> Any:
    torch.manual_seed(3)
    return record_two(LENGTH)


def drawn(axes: Axes) -> list[Any]:
    """Everything that carries numbers in axes."""
    images = [image.get_array().tolist() for image in axes.images]  # type: ignore[union-attr]
    labels = names((*axes.get_xticklabels(), *axes.get_yticklabels()))
    return [images, [bar.get_height() for bar in axes.patches], labels, axes.get_title("left")]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font:UserWarning")  # a machine without a Chinese font
@pytest.mark.parametrize("method", METHODS)
def test_a_method_draws_what_the_function_draws_where_it_is_told(method: str, rec: Any) -> None:
    arguments, options = METHODS[method]
    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    assert getattr(rec, method)(*arguments, **options, ax=right) is right
    assert not left.has_data()
    assert pyplot.get_fignums() == []
    for kind in ("svg", "png"):
        figure.savefig(BytesIO(), format=kind)
    drawn_alone = getattr(plot, method)(rec, *arguments, **options)
    assert isinstance(drawn_alone, Axes)
    assert drawn(right) == drawn(drawn_alone)


def test_every_option_arrives() -> None:
    two = record_two(LENGTH, batch=2)
    options: dict[str, Any] = {"grid": (2, 3), "item": 1, "layers": [1], "residual": 0.25, "image": torch.rand(6, 9)}
    assert drawn(two.plot_rollout(0, **options)) == drawn(plot.plot_rollout(two, 0, **options))
    first, second = (two.plot_map(0, 0, item=item) for item in range(2))
    assert drawn(first) != drawn(second)


def test_the_page_is_the_functions(rec: Any) -> None:
    options: dict[str, Any] = {"layer": 1, "head": 2, "labels": ["one"], "title": "A model", "crops": [(0, 0)]}
    assert rec.page(TOKENS, **options).text == plot.page(rec, TOKENS, **options).text
    pair = record_pair().page(list("abcde"), key_tokens=list("stuvwxy"))
    assert Contents(pair.text).text(0, 0, "keys")["names"] == list("stuvwxy")


def test_pictures_are_imported_when_they_are_asked_for() -> None:
    lines = (
        "import sys, torch, clearhead",
        "with clearhead.record(torch.nn.TransformerEncoderLayer(8, 2), keep='queries_keys') as rec:",
        "    rec._running.model(torch.randn(3, 1, 8))",
        "assert not {'matplotlib', 'rich', 'clearhead.plot'} & set(sys.modules)",
        "rec.page()",
        "assert 'matplotlib' not in sys.modules",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
