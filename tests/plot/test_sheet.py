"""The picture of a whole model: what it shows, that it can always be saved, and that it touches nothing else."""

from __future__ import annotations

from io import BytesIO

import matplotlib
import numpy
import pytest
import torch
from matplotlib import font_manager
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from clearhead.plot import _fonts
from clearhead.plot._collect import collect
from clearhead.plot._crops import with_crops
from clearhead.plot._fonts import characters_of, figure_bytes, fonts
from clearhead.plot._scale import scale_end
from clearhead.plot._sheet import draw_sheet

from .recorded import record_two, section


def random_weights(layers: int, heads: int, length: int, keys: int) -> list[Tensor]:
    return [torch.randn(heads, length, keys).softmax(-1) for _ in range(layers)]


def sheet(
    weights: list[Tensor], tokens: list[str], layer: int, head: int, keys: list[str] | None = None, **options: object
) -> Figure:
    return draw_sheet(section(weights, tokens, keys), layer, head, **options)  # type: ignore[arg-type]


def test_the_large_map_is_the_chosen_head() -> None:
    weights = random_weights(3, 2, 5, 7)
    tokens, keys = [f"q{i}" for i in range(5)], [f"k{i}" for i in range(7)]
    figure = sheet(weights, tokens, 2, 1, keys, title="A title")
    large, _, bar = figure.axes
    shown = torch.tensor(numpy.asarray(large.images[0].get_array())).square()
    end = scale_end([weights[2][1]])
    torch.testing.assert_close(shown * end, weights[2][1].clamp(max=end), atol=1e-5, rtol=1e-4)
    ticks = [float(label.get_text().removeprefix("≥ ")) for label in bar.get_xticklabels()]
    assert (ticks[0], ticks[-1]) == (0, end)
    assert bar.get_xticks().tolist() == pytest.approx([(tick / end) ** 0.5 for tick in ticks], abs=0.01)
    assert "do not explain" in bar.get_xlabel()
    assert [label.get_text() for label in large.get_yticklabels()] == tokens
    assert [label.get_text() for label in large.get_xticklabels()] == keys
    assert [text.get_text() for text in figure.texts] == ["A title   ·   layer 2, head 1"]


def test_a_long_text_is_drawn_from_its_crop() -> None:
    rec = record_two(150)
    items = with_crops(rec, collect(rec), [(1, 2)])
    large = draw_sheet(items[0].sections[0], 1, 2).axes[0]
    assert large.images[0].get_array().shape == (150, 150)
    assert draw_sheet(items[0].sections[0], 1, 1).axes[0].images[0].get_array().shape == (128, 128)


def test_every_head_has_its_thumbnail_or_its_number() -> None:
    weights = [torch.eye(4).repeat(heads, 1, 1) for heads in (3, 2)]
    weights[1][1] = torch.full((4, 4), 0.25)
    thumbnails = sheet(weights, list("abcd"), 0, 0).axes[1]
    mosaic = torch.tensor(numpy.asarray(thumbnails.images[0].get_array()))
    height, width = mosaic.shape[0] / 2, mosaic.shape[1] / 3
    # In the corner right of the diagonal there is only the even head's weight.
    corners = [[mosaic[int((r + 0.2) * height), int((c + 0.8) * width)].item() for c in range(3)] for r in range(2)]
    assert corners == [[0, 0, 0], [0, 0.5, 0]]
    table = sheet(weights, list("abcd"), 0, 0, numbers=("sink", [[0.25, 3.5, 12.0], [0.0, -9.999]])).axes[1]
    assert table.get_title("left") == "sink of all heads"
    assert [text.get_text() for text in table.texts] == ["0.25", "3.50", "12", "0.00", "-10.00"]


@pytest.mark.parametrize(
    ("layers", "heads", "length", "keys"),
    [(1, 1, 1, 1), (6, 12, 16, 16), (2, 3, 5, 19), (32, 32, 70, 70), (1, 2, 300, 300)],
)
def test_sizes(layers: int, heads: int, length: int, keys: int) -> None:
    tokens, key_tokens = [f"t{i}" for i in range(length)], [f"t{i}" for i in range(keys)]
    figure = sheet(random_weights(layers, heads, length, keys), tokens, 0, 0, key_tokens)
    with Image.open(BytesIO(figure_bytes(figure, "png"))) as picture:
        width, height = picture.size
        assert 700 < width < 3500
        assert 300 < height < 3500
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 10


def test_hostile_and_foreign_tokens_are_drawn() -> None:
    tokens = ["今天", "$x^2$", "\x1b[31m", "<script>", "a" * 99, "😀", "ไทย", "\u202eabc", "$\\frac{", ""]
    tokens += ["السلام", "👩\u200d💻"]
    figure = sheet(random_weights(1, 1, 12, 12), tokens, 0, 0, title="$\\bad{ 今天 \U000e0001")
    assert len(figure_bytes(figure, "svg")) > 1000
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[1:4] == ["$x^2$", "\\x1b[31m", "<script>"]
    assert labels[4] == "a" * 15 + "…"
    assert labels[7] == "\\u202eabc"
    assert labels[10:] == ["السلام", "👩\u200d💻"]


def test_a_font_is_found_for_what_matplotlibs_own_lacks() -> None:
    assert fonts("animal, שלום, مرحبا") == ["DejaVu Sans"]
    sign = chr(min(characters_of("STIXGeneral") - characters_of("DejaVu Sans")))
    first, *others = fonts(f"animal {sign}")
    assert first == "DejaVu Sans"
    assert ord(sign) in characters_of(others[-1])
    lacking: list[str] = []
    figure = Figure()
    figure.text(0, 0, f"animal {sign}", fontfamily=fonts(sign))
    figure_bytes(figure, "png", lacking.append)
    assert not lacking


def test_a_font_that_was_installed_after_matplotlib_listed_them_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "STIXGeneral"
    sign = chr(min(characters_of(name) - characters_of("DejaVu Sans")))
    known = font_manager.fontManager.ttflist
    [path] = [font.fname for font in known if (font.name, font.style, font.weight) == (name, "normal", 400)]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [font for font in known if font.name != name])
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [path])
    for function in (_fonts.add_new_fonts, characters_of):
        function.cache_clear()
    assert fonts(sign) == ["DejaVu Sans", name]


def test_no_global_state_is_touched() -> None:
    before = dict.copy(matplotlib.rcParams)  # without choosing a backend
    figure_bytes(sheet(random_weights(1, 1, 2, 2), ["a", "b"], 0, 0), "png")
    assert dict.copy(matplotlib.rcParams) == before
