"""What pictures, pages, tokens and comparisons refuse, and how they say it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import clearhead
from clearhead.errors import ArgumentError, DTypeError, RecordError, ShapeError
from clearhead.plot import Comparison, Tokens, given, page, plot_heads, plot_map, plot_rollout
from tests.support.models import vision_model

from .recorded import PICTURE, Two, record_two, recorded

EYE = torch.eye(3).expand(2, 3, 3)
REC, TWO, LONG = given([EYE]), given([torch.eye(2)[None]]), given([torch.eye(150)[None]])
FOUR = ("entropy", "received", "top_k", "map")
kept = cache(record_two)
poor = cache(lambda: record_two(statistics=("entropy",)))
long = cache(lambda: record_two(150, statistics=FOUR))
vit = cache(lambda: recorded(vision_model("vit"), PICTURE[None]))


def rollout(targets: Any = 0, **options: Any) -> Any:
    return plot_rollout(kept(), targets, **options)


def over(*chosen: Any) -> Any:
    return vit().plot_image(PICTURE, *chosen)


def of_image(image: Any, processor: Any = None) -> Any:
    return vit().page(image=image, processor=processor)


def unequal() -> Any:
    """A record of a model whose modules ran unequally often."""
    model, x = Two(), torch.randn(1, 3, 12)
    with clearhead.record(model, keep="queries_keys") as rec:
        model(x)
        model.blocks[0](x)
        model.blocks[0](x)
    return rec


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = clearhead.MultiHeadAttention(12, 2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.attention(pixel_values.flatten(2).transpose(1, 2)[..., :1].expand(-1, -1, 12))


def of_another_patch_size() -> Any:
    model = vision_model("vit")
    rec = recorded(model, PICTURE[None])
    model.config.patch_size = 2
    return rec


def large() -> Any:
    return recorded(vision_model("vit", image_size=48), torch.rand(1, 3, 48, 48), statistics=FOUR)


def half_a_file() -> str:
    Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype="uint8")).save("half.png")
    Path("half.png").write_bytes(Path("half.png").read_bytes()[:6000])
    return "half.png"


def huge_file() -> str:
    Image.new("1", (20_000, 20_000)).save("huge.png")
    return "huge.png"


WIDE = Image.new("RGB", (60, 24))
NOT_12 = "expected a picture of 12 × 12 pixels"
WHOSE = r"around 'attention', got a Own\. Where its patches lie is not known"
OTHERS = r"between 37 tokens in .* \(1 and 36 patches\), got 10 queries and 10 keys"
NO_PICTURES = r"image: expected a model that was called with pictures \(B, C, H, W\)"
NO_FUNCTION = "processor: expected a function that takes the image, got one that ra"
UNEQUAL = r"many calls of every module, got 3 of blocks\.0 and 1 of blocks\.1"
NO_RECORD = r"expected a clearhead\.record, or .*given.* got "
REFUSED: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    ArgumentError: [
        ("weights: expected one tensor per layer, got none", lambda: given([])),
        (r"weights\[0\]: .* got a row that sums to 0\.500\..*clearhead\.record", lambda: given([EYE / 2])),
        ("got negative ones", lambda: given([torch.tensor([[[2.0, -1.0]]])])),
        ("layer: expected 0 … 0, got 1", lambda: REC.weights(1)),
        ("words: expected an int per token, got None", lambda: Tokens(["a"], None, [None])),
        (r"one of entropy, normalized_entropy, got 'sink'\. Rec", lambda: plot_heads(poor(), "sink")),
        (r"head: expected one of 0, 1, 2 in blocks\.1, got 3", lambda: plot_map(kept(), 1, 3)),
        ("layer: expected 0 … 1, got 2", lambda: plot_map(kept(), 2, 0)),
        ("item: expected 0 … 0, got 1", lambda: plot_map(kept(), 0, 0, item=1)),
        ("words: expected False where only tiles are known", lambda: plot_map(long(), 0, 1, words=True)),
        ("item: expected 0 … 0, got 4", lambda: rollout(item=4)),
        ("targets: expected one target with a grid", lambda: rollout([0, 1], grid=(2, 3))),
        ("image: expected grid=", lambda: rollout(image=torch.rand(4, 4))),
        ("head: expected one of the recorded heads, got 1", lambda: page(TWO, head=1)),
        ("layer: expected 0 … 0, got 2", lambda: page(TWO, layer=2)),
        ("slices without a step", lambda: page(LONG, crops=[(0, 0, slice(0, 2, 2), slice(2))])),
        (UNEQUAL, lambda: page(unequal())),
        ("tokens: expected those of the first", lambda: REC.compare(REC, other_tokens=list("abc"))),
        ("statistic: expected one that both", lambda: REC.compare(REC).plot_heads("received")),
        (NO_PICTURES, lambda: kept().plot_image(PICTURE)),
        ("image: expected a record of a vision model, got weights that were", lambda: REC.plot_image(PICTURE)),
        (WHOSE, lambda: recorded(Own(), PICTURE[None]).plot_image(PICTURE)),
        (OTHERS, lambda: of_another_patch_size().plot_image(PICTURE)),
        ("query: expected one of class, patch 0, 0", lambda: over(0, 0, "register 1")),
        ("query: expected", lambda: over(0, 0, (3, 0))),
        (r"query: expected \(row, column\)", lambda: over(0, 0, (1, 2, 3))),
        ("query: expected", lambda: over(0, 0, 10)),
        ("head: expected one of 0, 1", lambda: over(0, 7)),
        ("tokens: expected None beside image", lambda: vit().page(["a"] * 10, image=PICTURE)),
        ("No such file", lambda: of_image("nowhere.png")),
        ("which is none", lambda: of_image(Path(__file__))),
        ("image: expected a picture", lambda: of_image(half_a_file())),
        ("20000 × 20000|which is larger", lambda: of_image(huge_file())),
        (NO_FUNCTION, lambda: of_image(WIDE, lambda picture: picture @ torch.zeros(7))),
    ],
    ShapeError: [
        (r"weights\[1\]: expected \(B, H, L, S\) or \(H, L, S\), got \(3, 3\)", lambda: given([EYE, torch.eye(3)])),
        ("special: expected 2 values, one per token, got 1", lambda: Tokens(["a", "b"], [True])),
        ("words: expected 2 values", lambda: Tokens(["a", "b"], None, [0])),
        ("grid: expected at most 7 patches, got 3 × 3", lambda: rollout(grid=(3, 3))),
        ("image: expected", lambda: rollout(grid=(2, 3), image=torch.rand(4))),
        ("tokens: expected 7 tokens, got 2", lambda: rollout(tokens=["a", "b"])),
        ("tokens: expected 2 tokens for item 0, got 3", lambda: page(TWO, list("abc"))),
        ("tokens: expected 1 texts, one per batch item, got 2", lambda: page(TWO, [["a", "b"], ["c", "d"]])),
        ("labels: expected 1, one per item, got 2", lambda: page(TWO, labels=["a", "b"])),
        ("expected 1 layers with 2 heads, got 1 layers with 1", lambda: REC.compare(given([EYE[:1]]))),
        ("got 2 layers with 2 heads", lambda: REC.compare(given([EYE] * 2))),
        ("tokens: expected 3 tokens for item 0, got 2", lambda: REC.compare(REC, tokens=["a", "b"])),
        ("labels: expected two strings, got 3", lambda: REC.compare(REC).page(labels=list("abc"))),
        ("image: expected 1 pictures, one per batch item, got 2", lambda: of_image([PICTURE, PICTURE])),
        (f"image: {NOT_12}.* got one of 60 × 24", lambda: of_image(WIDE)),
        (f"processor: {NOT_12}", lambda: of_image(WIDE, lambda picture: torch.zeros(3, 5, 5))),
    ],
    DTypeError: [
        ("tokens: expected a list of strings, got one string", lambda: Tokens("a text")),
        ("got other things among them", lambda: Tokens([1, 2])),
        ("got one string", lambda: TWO.page("a text")),
        (r"other: expected a clearhead\.record", lambda: REC.compare("other")),
        (f"first: {NO_RECORD}1", lambda: Comparison(1, REC)),
        (f"second: {NO_RECORD}None", lambda: Comparison(REC, None)),
        ("tokens: expected ", lambda: Comparison(REC, REC, 5)),
        ("other_tokens: expected ", lambda: Comparison(REC, REC, None, 5)),
    ],
    RecordError: [
        ("a record without received, top_k, map", lambda: plot_map(poor(), 0, 0)),
        ("keep='queries_keys'", lambda: plot_rollout(poor(), 0)),
        ("keep='queries_keys'", lambda: page(long(), crops=[(0, 0)])),
        (r"without received, top_k, map\. Record with statistics=", lambda: page(poor())),
        ("every weight between the 145 tokens", lambda: large().page(image=torch.rand(3, 48, 48))),
    ],
}


@pytest.mark.parametrize(("error", "text", "call"), [(error, *row) for error, rows in REFUSED.items() for row in rows])
def test_refused(
    error: type[Exception], text: str, call: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        call()
