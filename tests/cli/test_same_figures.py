"""One look, five times: page, picture, terminal and JSON hold the figures that Python computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import clearhead
from tests.plot.pages import Contents
from tests.support.models import SIDE, processor_of, vision_model

from .looking import SENTENCE, contents, look

pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "default_model_once")

LAYER, HEAD = 3, 1
ROWS = 3  # of patches
CHOSEN = ("--layer", str(LAYER), "--head", str(HEAD))
WIDE = SENTENCE.replace("tired", "wide")
PAGE = 1e-4  # a page's weights are rounded to 1/10,000 of their root
DRAWN = 1e-6  # a picture's are float32


class Outputs:
    """What one run printed, wrote and drew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
        figures: list[Figure] = []
        save = Figure.savefig

        def kept(figure: Figure, *args: Any, **options: Any) -> None:
            figures.append(figure)
            save(figure, *args, **options)

        monkeypatch.setattr(Figure, "savefig", kept)
        result = look(*arguments, "--json", "numbers.json")
        self.lines = result.stdout.splitlines()
        self.page: Contents = contents(Path("attention.html"))
        self.json: dict[str, Any] = json.loads(Path("numbers.json").read_text())
        [self.figure] = figures

    def table(self) -> list[list[float]]:
        """The overview of the terminal: layer → head → number."""
        rows = [line for line in self.lines if line[:5].strip().isdigit()]
        cells = [[row[first : first + 6] for first in range(5, len(row), 6)] for row in rows]
        return [[float(cell[2:]) for cell in row] for row in cells]

    def require_heads(self, name: str, expected: Tensor, digits: int = 2) -> None:
        """The JSON, the terminal and the picture have these numbers, (layers, H)."""
        numbers = torch.tensor([head[name] for head in self.json["heads"]]).double()
        torch.testing.assert_close(numbers, expected.flatten().double(), rtol=0, atol=1e-6)
        assert self.table() == [[float(f"{value:.2f}") for value in row] for row in expected.tolist()]
        texts = next(axes.texts for axes in self.figure.axes if axes.texts)
        assert [text.get_text() for text in texts] == [f"{value:.{digits}f}" for value in numbers.tolist()]

    def map(self, item: int, length: int) -> Tensor:
        """The weights of the large head on the page."""
        layer, head = self.page.data["layer"], self.page.data["head"]
        shown = self.page.layer(item, 0, layer)
        return self.page.array(item, shown["map"], len(shown["kinds"]), length, length)[head].float()


def drawn_weights(axes: Axes, bar: Axes) -> Tensor:
    """The weights of a picture, by its colours and its colour bar."""
    last = bar.get_xticklabels()[-1].get_text().removeprefix("≥ ").removeprefix("+")
    color = torch.as_tensor(numpy.asarray(axes.images[0].get_array()))
    return color.sign() * color**2 * float(last)


def colorbars(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]


def recorded(text: str, loaded: Any) -> clearhead.record:
    with torch.no_grad(), clearhead.record(loaded.model, ("confidence", "entropy"), keep="queries_keys") as rec:
        loaded.model(**loaded.reader(text, return_tensors="pt"))
    return rec


def test_of_a_text(monkeypatch: pytest.MonkeyPatch, default_model_once: Any) -> None:
    outputs = Outputs(monkeypatch, SENTENCE, "--stat", "confidence", *CHOSEN)
    rec = recorded(SENTENCE, default_model_once)
    weights = rec.weights(LAYER, HEAD)[0]  # (L, S)
    largest = weights.topk(8)

    torch.testing.assert_close(outputs.map(0, len(weights)), weights, rtol=0, atol=PAGE)
    drawn = drawn_weights(outputs.figure.axes[0], outputs.figure.axes[2])
    end = drawn.max()
    torch.testing.assert_close(drawn, weights.clamp(max=float(end)), rtol=0, atol=DRAWN)
    [window] = outputs.json["windows"]
    torch.testing.assert_close(torch.tensor(window["top_weights"]), largest.values, rtol=0, atol=DRAWN)
    assert window["top_keys"] == largest.indices.tolist()
    finding, *looks = [line.split() for line in outputs.lines if "→" in line]
    assert finding[-4:] == next(row[:4] for row in looks if row[0] == finding[-4])
    names = window["tokens"]
    assert [(row[0], row[2], row[3]) for row in looks] == [
        (names[query], names[keys[0]], f"{values[0]:.2f}")
        for query, (keys, values) in enumerate(zip(largest.indices.tolist(), largest.values.tolist(), strict=True))
    ]

    confidence = torch.stack(list(rec.summary()["confidence"].values())).double()  # (layers, H)
    outputs.require_heads("confidence", confidence)
    page = [outputs.page.layer(0, 0, layer)["numbers"]["confidence"] for layer in range(len(confidence))]
    torch.testing.assert_close(torch.tensor(page).double(), confidence, rtol=0, atol=5.1e-5)


def test_of_a_comparison(monkeypatch: pytest.MonkeyPatch, default_model_once: Any) -> None:
    outputs = Outputs(monkeypatch, SENTENCE, "--against", WIDE, *CHOSEN)
    recs, texts = [recorded(text, default_model_once) for text in (SENTENCE, WIDE)], (SENTENCE, WIDE)
    reader = default_model_once.reader
    tokens = [clearhead.plot.read_tokens(reader, reader(text)["input_ids"]) for text in texts]
    comparison = recs[0].compare(recs[1], tokens=tokens[0], other_tokens=tokens[1])
    scores = torch.stack(list(comparison.divergence.values()))  # (layers, H)

    outputs.require_heads("difference", scores, digits=3)
    name, head, score = comparison.ranked()[0]
    layer = list(comparison.modules).index(name)
    printed = " ".join(" ".join(outputs.lines).split()).partition("heads that differ most")[2]
    assert f": layer {layer} head {head} ({score:.3f})," in printed
    assert outputs.page.data["compared"]["ranked"][0] == [0, layer, head, pytest.approx(score, abs=5.1e-5)]

    weights = [rec.weights(LAYER, HEAD)[0] for rec in recs]
    bars = colorbars(outputs.figure)
    for item, each in enumerate(weights):
        torch.testing.assert_close(outputs.map(item, len(each)), each, rtol=0, atol=PAGE)
        drawn = drawn_weights(outputs.figure.axes[item], bars[item])
        torch.testing.assert_close(drawn, each.clamp(max=float(drawn.max())), rtol=0, atol=DRAWN)
    # All tokens but one agree.
    alike = [place for place, (one, two) in enumerate(zip(*(text.names for text in tokens), strict=True)) if one == two]
    change = (weights[1] - weights[0])[alike][:, alike]
    torch.testing.assert_close(outputs.map(2, len(alike)), change, rtol=0, atol=2e-4)
    drawn = drawn_weights(outputs.figure.axes[2], bars[2])
    torch.testing.assert_close(drawn, change.clamp(-drawn.abs().max(), drawn.abs().max()), rtol=0, atol=DRAWN)
    it = tokens[0].names.index("it")
    largest = int(change[alike.index(it)].abs().argmax())
    line = next(line.split() for line in outputs.lines if line.split()[:2] == ["it", "→"])
    value = change[alike.index(it), largest]
    assert line[2:4] == [tokens[0].names[alike[largest]], f"{value:+.2f}".replace("-", "−")]


def test_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = vision_model("vit"), processor_of("vit")
    with torch.no_grad():
        for part in [module for module in model.modules() if isinstance(module, torch.nn.Linear)]:
            part.weight *= 8  # heads that prefer some patches
    model.save_pretrained("vit")
    processor.save_pretrained("vit")
    pixels = numpy.random.default_rng(1).integers(0, 255, (SIDE, SIDE, 3), dtype="uint8")
    photo = Image.fromarray(pixels)
    photo.save("photo.png")
    outputs = Outputs(monkeypatch, "--image", "photo.png", "--model", "vit", "--stat", "confidence")
    with torch.no_grad(), clearhead.record(model, ("confidence",), keep="queries_keys") as rec:
        model(**processor(images=photo, return_tensors="pt"))

    rows = torch.stack([rec.weights(layer)[0, :, 0, 1:] for layer in range(2)])  # (layers, H, patches)
    length = 1 + ROWS * ROWS
    distances = (rows - 1 / length).clamp(min=0).sum(-1)
    layer, head = divmod(int(distances.argmax()), rows.shape[1])
    assert outputs.json["chosen"] == {"layer": layer, "head": head}
    weights = rec.weights(layer, head)[0]  # (L, S)
    shown = weights[0, 1:].view(ROWS, ROWS)

    torch.testing.assert_close(outputs.map(0, length), weights, rtol=0, atol=PAGE)
    torch.testing.assert_close(torch.tensor(outputs.json["looks_at"]), shown, rtol=0, atol=DRAWN)
    patches = next(axes for axes in outputs.figure.axes if "patches" in axes.get_title("left"))
    [bar] = colorbars(outputs.figure)
    levels = torch.as_tensor(numpy.asarray(patches.images[0].get_array()))
    end = float(bar.get_xticklabels()[-1].get_text().strip("≥ ×"))
    torch.testing.assert_close(end**levels / length, shown.clamp(1 / length, end / length), rtol=0, atol=DRAWN)
    place = int(shown.argmax())
    patch = f"patch {place // ROWS}, {place % ROWS} {shown.max():.3f}"
    assert any(line.startswith(patch) for line in outputs.lines)

    outputs.require_heads("confidence", torch.stack(list(rec.summary()["confidence"].values())))
