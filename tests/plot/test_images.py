"""What vision models read: where patches lie, the weights over the picture, and pages with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from clearhead.plot._heads import clearest_head, summarize
from clearhead.plot._image_items import image_items
from clearhead.plot._image_plots import over_picture
from clearhead.plot._patches import PatchLayout, Tiles
from tests.support.models import VISION, two_sided, vision_model

from .pages import Contents
from .recorded import PICTURE, recorded

ROWS, COLUMNS, PATCH = 3, 4, 4
SIZE = (ROWS * PATCH, COLUMNS * PATCH)


@pytest.fixture(scope="module", name="vit")
def _vit() -> Any:
    torch.manual_seed(2)
    return recorded(vision_model("vit"), PICTURE[None])


def pixels_of(contents: Contents) -> Tensor:
    """The picture that a page carries."""
    return contents.array(0, contents.data["items"][0]["picture"]["pixels"], 3, SIZE[0], SIZE[0])


@pytest.mark.parametrize("kind", VISION)
def test_patches_are_placed_by_the_configuration(kind: str) -> None:
    rec = recorded(vision_model(kind), PICTURE[None])
    layout = rec.patches(0)
    assert (layout.prefix, layout.grid, layout.patch) == (VISION[kind][2], (ROWS, ROWS), (PATCH, PATCH))
    assert layout.length == rec[next(iter(rec))][0].query_length


def test_a_patch_is_where_the_model_cuts_it_out() -> None:
    """The token of a patch changes, in the embedding, with that patch's pixels and with no others."""
    model = vision_model("dinov2")
    pixels = torch.rand(1, 3, *SIZE)
    changed = pixels.clone()
    row, column = 1, 2
    changed[:, :, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] += 1
    with torch.no_grad():
        moved = (model.embeddings(changed) - model.embeddings(pixels))[0].abs().sum(-1).nonzero().flatten().tolist()
    layout = recorded(model, pixels).patches(0)
    assert layout.grid == (ROWS, COLUMNS), "of a picture of another size than the configuration's"
    assert [layout.names()[place] for place in moved] == [f"patch {row}, {column}"]


def test_siglips_pooling_looks_at_the_patches() -> None:
    rec = recorded(vision_model("siglip"), PICTURE[None])
    assert rec.patches("head.attention").queries == ("pooling",)
    contents = Contents(rec.page(image=PICTURE).text)
    assert [section["title"] for section in contents.data["sections"]] == ["self-attention", "pooling"]
    assert contents.text(0, 1, "queries")["names"] == ["pooling"]
    contents.require(0, contents.layer(0, 1, 0)["map"], rec.weights("head.attention")[0])
    axes = rec.plot_image(PICTURE)
    assert axes.get_title("left") == "every head: what pooling looks at"


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_the_vision_side_of_a_model_of_both_is_found(kind: str) -> None:
    rec = recorded(two_sided(kind), torch.ones(1, 5, dtype=torch.long), PICTURE[None])
    contents = Contents(rec.page(image=PICTURE).text)
    names = [layer["name"] for section in contents.data["sections"] for layer in section["layers"]]
    assert names
    assert all(name.startswith("vision_model.") for name in names)


def test_the_page_carries_every_weight_and_the_picture(vit: Any) -> None:
    picture = (PICTURE * 255).to(torch.uint8)
    contents = Contents(vit.page(image=picture).text)
    contents.require(0, contents.layer(0, 0, 1)["map"], vit.weights(1)[0])
    item = contents.data["items"][0]
    assert item["sections"][0]["patches"] == {"prefix": 1, "grid": [3, 3], "cell": [4, 4], "side": 1}
    assert torch.equal(pixels_of(contents).to(torch.uint8), picture)
    assert contents.text(0, 0, "keys")["names"][:3] == ["class", "patch 0, 0", "patch 0, 1"]


def test_more_patches_than_a_page_holds_are_taken_together() -> None:
    model = vision_model("registers")
    with torch.no_grad():  # the last head of the first layer prefers some keys
        attention = next(module for module in model.modules() if hasattr(module, "q_proj"))
        for part in (attention.q_proj, attention.k_proj):
            part.weight[8:] *= 60
    rec = recorded(model, torch.rand(1, 3, 20, 28))
    [item] = image_items(rec, most=1000)
    section = item.sections[0]
    assert clearest_head(summarize(section)) == (0, 1)
    tiles, layer = section.tiles, section.layers[0]
    assert tiles is not None
    assert tiles.side == 2
    exact = rec.weights(0)[0].double()
    places = tiles.places()
    summed = torch.zeros(2, len(places), tiles.length, dtype=torch.float64).index_add_(2, places, exact)
    mean = torch.zeros(2, tiles.length, tiles.length, dtype=torch.float64).index_add_(1, places, summed)
    mean /= places.bincount()[:, None]
    torch.testing.assert_close(layer.map.double(), mean, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(layer.map.sum(-1), torch.ones(2, tiles.length), rtol=1e-5, atol=1e-6)
    even = places.bincount() / len(places)  # (tiles,); the first three are the class token and the registers
    distances = (mean[:, 0] - even)[:, 3:].clamp(min=0).sum(-1)
    assert [head.contrast for head in summarize(section)[0]] == pytest.approx(distances.tolist(), abs=1e-6)
    assert section.keys.names[:4] == ("class", "register 1", "register 2", "patches 0–1, 0–1")
    assert section.keys.names[-1] == "patches 4–4, 6–6"


def test_weights_over_128_tokens_are_all_there_in_one_byte() -> None:
    rec = recorded(vision_model("vit", image_size=48), torch.rand(1, 3, 48, 48))
    contents = Contents(rec.page(image=torch.rand(3, 48, 48)).text)
    shown = contents.array(0, contents.layer(0, 0, 0)["map"], 2, 145, 145)
    torch.testing.assert_close(shown.float().sqrt(), rec.weights(0)[0].sqrt(), rtol=0, atol=0.5 / 255 + 1e-6)


@pytest.mark.parametrize(
    ("query", "row", "title"),
    [
        (None, 0, "what the class token looks at"),
        ("class", 0, "what the class token looks at"),
        ((2, 1), 8, "what patch 2, 1 looks at"),
        (4, 4, "what patch 1, 0 looks at"),
    ],
)
def test_a_picture_shows_a_querys_weights_where_its_patches_are(vit: Any, query: Any, row: int, title: str) -> None:
    white = torch.ones(3, SIZE[0], SIZE[0])
    axes = vit.plot_image(white, 1, 0, query)
    assert axes.get_title("left") == f"layer 1, head 0: {title}"
    drawn = torch.as_tensor(numpy.asarray(axes.images[0].get_array()))
    weights = vit.weights(1, 0, [row])[0, 0, 1:].view(ROWS, ROWS)
    lightness = drawn.mean(-1)[PATCH // 2 :: PATCH, PATCH // 2 :: PATCH].flatten()
    beyond_even = (weights - 1 / (1 + ROWS * ROWS)).clamp(min=0).flatten()
    assert beyond_even.max() > 0
    order = lightness.argsort(stable=True)
    count = int((beyond_even > 0).sum())
    assert order[:count].tolist() == beyond_even.argsort(descending=True)[:count].tolist()
    assert lightness[beyond_even == 0].min() == lightness.max() == 1


def test_every_head_is_a_thumbnail(vit: Any) -> None:
    axes = vit.plot_image(PICTURE)
    assert [len(axes.get_xticks()), len(axes.get_yticks())] == [2, 2]
    assert len(vit.plot_image(PICTURE, 1).get_yticks()) == 1


def test_a_processor_gives_the_part_of_the_picture_that_the_model_saw(tmp_path: Path) -> None:
    processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": SIZE[0]}, crop_size={"height": SIZE[0], "width": SIZE[0]}, resample=0
    )
    photo = numpy.zeros((24, 60, 3), dtype="uint8")
    photo[:, 18:42] = (10, 200, 30)  # the middle, which is what a centre crop leaves
    image = Image.fromarray(photo)
    image.save(tmp_path / "photo.png")
    rec = recorded(vision_model("clip"), processor(images=image, return_tensors="pt")["pixel_values"])
    contents = Contents(rec.page(image=tmp_path / "photo.png", processor=processor).text)
    green = torch.tensor([10, 200, 30])[:, None, None]
    assert torch.equal(pixels_of(contents), green.expand(3, SIZE[0], SIZE[0]))


def test_pictures_are_taken_however_they_are_given(vit: Any) -> None:
    grey = numpy.arange(SIZE[0] ** 2, dtype="uint8").reshape(SIZE[0], SIZE[0])
    for given_as in (grey, torch.as_tensor(grey), Image.fromarray(grey), grey[..., None], grey / 255):
        assert pixels_of(Contents(vit.page(image=given_as).text)).eq(torch.as_tensor(grey)).all()


def test_more_weight_is_darker_whatever_the_picture() -> None:
    layout = PatchLayout((), (1, 2), (1, 1), (1, 2))
    black = torch.zeros(3, 1, 2, dtype=torch.uint8)
    over = over_picture(torch.cat([black[..., :1], 255 - black[..., :1]], -1), torch.tensor([[0.0, 1.0]]), layout)
    assert over[0, 0].min() > over[0, 1].max() + 0.3


def test_tiles_cover_every_patch_once() -> None:
    layout = PatchLayout(("class",), (5, 7), (2, 2), (10, 14))
    for side in range(1, 8):
        tiles = Tiles(layout, side)
        counts = tiles.places().bincount(minlength=tiles.length)
        assert counts.sum() == layout.length
        assert counts.min() >= 1
        assert len(tiles.tokens()) == tiles.length
