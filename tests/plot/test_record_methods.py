"""The pictures as methods of a record: they draw what `clearhead.plot` draws, where they are told, and save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from clearhead import plot
from clearhead.plot._fonts import figure_bytes

from .pages import Contents
from .recorded import record_pair, record_two

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
    return record_two(LENGTH)[1]


def drawn(axes: Axes) -> list[Any]:
    """Everything that carries numbers in axes."""
    images = [image.get_array().tolist() for image in axes.images]  # type: ignore[union-attr]
    labels = [label.get_text() for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
    return [images, [bar.get_height() for bar in axes.patches], labels, axes.get_title("left")]  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_draws_what_the_function_draws(method: str, rec: Any) -> None:
    arguments, options = METHODS[method]
    axes = getattr(rec, method)(*arguments, **options)
    assert isinstance(axes, Axes)
    assert drawn(axes) == drawn(getattr(plot, method)(rec, *arguments, **options))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_method_draws_where_it_is_told_and_saves(method: str, kind: str, rec: Any, tmp_path: Path) -> None:
    arguments, options = METHODS[method]
    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    assert getattr(rec, method)(*arguments, **options, ax=right) is right
    assert not left.has_data()
    assert right.has_data()
    assert pyplot.get_fignums() == []
    path = tmp_path / f"picture.{kind}"
    path.write_bytes(figure_bytes(figure, kind))
    if kind == "svg":
        assert "</svg>" in path.read_text(encoding="utf-8")
    else:
        with Image.open(path) as picture:
            assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 10


def test_every_option_arrives() -> None:
    rec = record_pair()
    cross = "decoder.layers.0.multihead_attn"
    texts: dict[str, Any] = {"tokens": list("abcde"), "key_tokens": list("stuvwxy")}
    axes = rec.plot_map(cross, 1, **texts, words=True)
    assert [label.get_text() for label in axes.get_xticklabels()] == list("stuvwxy")
    axes = rec.plot_received(cross, 1, **texts)
    assert [label.get_text() for label in axes.get_xticklabels()] == list("stuvwxy")
    _, two = record_two(LENGTH, batch=2)
    options: dict[str, Any] = {"grid": (2, 3), "item": 1, "layers": [1], "residual": 0.25, "image": torch.rand(6, 9)}
    assert drawn(two.plot_rollout(0, **options)) == drawn(plot.plot_rollout(two, 0, **options))
    first, second = (two.plot_map(0, 0, item=item) for item in range(2))
    assert drawn(first) != drawn(second)


def test_the_page_is_the_functions(rec: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layer": 1, "head": 2, "labels": ["one"], "title": "A model", "crops": [(0, 0)]}
    made = rec.page(TOKENS, **options)
    assert made.text == plot.page(rec, TOKENS, **options).text
    assert made.save(tmp_path / "page.html").read_text(encoding="utf-8") == made.text
    assert made._repr_html_().startswith('<iframe class="clearhead-page" srcdoc="')
    pair = record_pair().page(list("abcde"), key_tokens=list("stuvwxy"))
    assert Contents(pair.text).text(0, 0, "keys")["names"] == list("stuvwxy")


def test_weights_that_were_given_draw_themselves() -> None:
    rec = plot.given([torch.eye(3).expand(2, 3, 3)])
    assert rec.plot_map(0, 1).get_title("left") == "layer 0, head 1"
    assert Contents(rec.page(["a", "b", "c"]).text).data["sections"][0]["title"] == "self-attention"


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
