"""What vision models read: where patches lie, the weights over the picture, pages with pictures, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

import clearhead
from clearhead.errors import ArgumentError, RecordError, ShapeError
from clearhead.plot import given
from clearhead.plot._heads import clearest_head, summarize
from clearhead.plot._image_items import image_items
from clearhead.plot._image_plots import over_picture
from clearhead.plot._patches import PatchLayout, Tiles
from tests.support.models import VIT

from .pages import Contents
from .recorded import KEPT, record_two

ROWS, COLUMNS, PATCH = 3, 4, 4
SIZE = (ROWS * PATCH, COLUMNS * PATCH)
SMALL: dict[str, Any] = VIT | {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
TEXT: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 40, "max_position_embeddings": 8}
BOTH: dict[str, Any] = {"text_config": SMALL | TEXT | {"projection_size": 16, "eos_token_id": 2, "bos_token_id": 1}}

REGISTERS = SMALL | {"num_register_tokens": 2}
#: Beginning of the names of model and config, their options, and what stands before the patches.
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "vit": ("ViT", SMALL, ("class",)),
    "deit": ("DeiT", SMALL, ("class", "distillation")),
    "dinov2": ("Dinov2", SMALL, ("class",)),
    "registers": ("Dinov2WithRegisters", REGISTERS, ("class", "register 1", "register 2")),
    "clip": ("CLIPVision", SMALL, ("class",)),
    "siglip": ("SiglipVision", SMALL, ()),
}
PICTURE = torch.rand(3, SIZE[0], SIZE[0], generator=torch.Generator().manual_seed(0))


def build(kind: str, **options: Any) -> Any:
    name, fixed, _ = KINDS[kind]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**fixed | options)
    return getattr(transformers, f"{name}Model")(config).eval()


def recorded(model: nn.Module, pixels: Tensor, **options: Any) -> Any:
    with torch.no_grad(), clearhead.record(model, **(options or KEPT)) as rec:
        model(pixel_values=pixels)
    return rec


@pytest.fixture(scope="module", name="vit")
def _vit() -> Any:
    torch.manual_seed(2)
    return recorded(build("vit"), PICTURE[None])


def pixels_of(contents: Contents) -> Tensor:
    """The picture that a page carries."""
    return contents.array(0, contents.data["items"][0]["picture"]["pixels"], 3, SIZE[0], SIZE[0])


@pytest.mark.parametrize("kind", KINDS)
def test_patches_are_placed_by_the_configuration(kind: str) -> None:
    rec = recorded(build(kind), PICTURE[None])
    layout = rec.patches(0)
    assert (layout.prefix, layout.grid, layout.patch) == (KINDS[kind][2], (ROWS, ROWS), (PATCH, PATCH))
    assert layout.length == rec[next(iter(rec))][0].query_length


def test_a_patch_is_where_the_model_cuts_it_out() -> None:
    """The token of a patch changes, in the embedding, with that patch's pixels and with no others."""
    model = build("dinov2")
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
    rec = recorded(build("siglip"), PICTURE[None])
    assert rec.patches("head.attention").queries == ("pooling",)
    contents = Contents(rec.page(image=PICTURE).text)
    assert [section["title"] for section in contents.data["sections"]] == ["self-attention", "pooling"]
    assert contents.text(0, 1, "queries")["names"] == ["pooling"]
    shown = contents.array(0, contents.layer(0, 1, 0)["map"], 2, 1, ROWS * ROWS)
    torch.testing.assert_close(shown.float(), rec.weights("head.attention")[0], rtol=0, atol=6e-5)
    axes = rec.plot_image(PICTURE)
    assert axes.get_title("left") == "every head: what pooling looks at"


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_the_vision_side_of_a_model_of_both_is_found(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(vision_config=SMALL, **BOTH)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad(), clearhead.record(model, **KEPT) as rec:
        model(input_ids=torch.ones(1, 5, dtype=torch.long), pixel_values=PICTURE[None])
    contents = Contents(rec.page(image=PICTURE).text)
    names = [layer["name"] for section in contents.data["sections"] for layer in section["layers"]]
    assert names
    assert all(name.startswith("vision_model.") for name in names)


def test_the_page_carries_every_weight_and_the_picture(vit: Any) -> None:
    picture = (PICTURE * 255).to(torch.uint8)
    contents = Contents(vit.page(image=picture).text)
    found = contents.layer(0, 0, 1)
    shown = contents.array(0, found["map"], 2, 10, 10)
    torch.testing.assert_close(shown.float(), vit.weights(1)[0], rtol=0, atol=6e-5)
    item = contents.data["items"][0]
    assert item["sections"][0]["patches"] == {"prefix": 1, "grid": [3, 3], "cell": [4, 4], "side": 1}
    assert torch.equal(pixels_of(contents).to(torch.uint8), picture)
    assert contents.text(0, 0, "keys")["names"][:3] == ["class", "patch 0, 0", "patch 0, 1"]


def test_more_patches_than_a_page_holds_are_taken_together() -> None:
    model = build("registers")
    with torch.no_grad():  # the last head of the first layer prefers some keys
        attention = next(module for module in model.modules() if hasattr(module, "q_proj"))
        for part in (attention.q_proj, attention.k_proj):
            part.weight[8:] *= 60
    rec = recorded(model, torch.rand(1, 3, 20, 28))
    [item] = image_items(rec, most=1000)
    section = item.sections[0]
    assert clearest_head(summarize(section)) == (0, 1)
    tiles, found = section.tiles, section.layers[0]
    assert tiles is not None
    assert tiles.side == 2
    exact = rec.weights(0)[0].double()
    places = tiles.places()
    summed = torch.zeros(2, len(places), tiles.length, dtype=torch.float64).index_add_(2, places, exact)
    mean = torch.zeros(2, tiles.length, tiles.length, dtype=torch.float64).index_add_(1, places, summed)
    mean /= places.bincount()[:, None]
    torch.testing.assert_close(found.map.double(), mean, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.map.sum(-1), torch.ones(2, tiles.length), rtol=1e-5, atol=1e-6)
    even = places.bincount() / len(places)  # (tiles,); the first three are the class token and the registers
    distances = (mean[:, 0] - even)[:, 3:].clamp(min=0).sum(-1)
    assert [head.contrast for head in summarize(section)[0]] == pytest.approx(distances.tolist(), abs=1e-6)
    assert section.keys.names[:4] == ("class", "register 1", "register 2", "patches 0–1, 0–1")
    assert section.keys.names[-1] == "patches 4–4, 6–6"


def test_weights_over_128_tokens_are_all_there_in_one_byte() -> None:
    rec = recorded(build("vit", image_size=48), torch.rand(1, 3, 48, 48))
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
    rec = recorded(build("clip"), processor(images=image, return_tensors="pt")["pixel_values"])
    contents = Contents(rec.page(image=tmp_path / "photo.png", processor=processor).text)
    green = torch.tensor([10, 200, 30])[:, None, None]
    assert torch.equal(pixels_of(contents), green.expand(3, SIZE[0], SIZE[0]))
    with pytest.raises(ShapeError, match=r"image: expected a picture of 12 × 12 pixels.* got one of 60 × 24"):
        rec.page(image=image)
    with pytest.raises(ShapeError, match=r"processor: expected a picture of 12 × 12 pixels"):
        rec.page(image=image, processor=lambda picture: torch.zeros(3, 5, 5))
    with pytest.raises(ArgumentError, match="processor: expected a function that takes the image, got one that ra"):
        rec.page(image=image, processor=lambda picture: picture @ torch.zeros(7))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = clearhead.MultiHeadAttention(12, 2)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.attention(pixel_values.flatten(2).transpose(1, 2)[..., :1].expand(-1, -1, 12))


def of_another_patch_size() -> Any:
    model = build("vit")
    rec = recorded(model, PICTURE[None])
    model.config.patch_size = 2
    return rec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: record_two(), r"image: expected a model that was called with pictures \(B, C, H, W\)"),
        (lambda: given([torch.eye(10)[None]]), "image: expected a record of a vision model, got weights that were"),
        (lambda: recorded(Own(), PICTURE[None]), r"around 'attention', got a Own\. Where its patches lie is not known"),
        (of_another_patch_size, r"between 37 tokens in .* \(1 and 36 patches\), got 10 queries and 10 keys"),
    ],
)
def test_models_whose_patches_are_unknown_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make().plot_image(PICTURE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, "register 1"), r"query: expected one of class, patch 0, 0"),
        ((0, 0, (3, 0)), "query: expected"),
        ((0, 0, (1, 2, 3)), r"query: expected \(row, column\)"),
        ((0, 0, 10), "query: expected"),
        ((0, 7), "head: expected one of 0, 1"),
    ],
)
def test_wrong_heads_and_queries(arguments: tuple[Any, ...], message: str, vit: Any) -> None:
    with pytest.raises(ArgumentError, match=message):
        vit.plot_image(PICTURE, *arguments)


def test_wrong_arguments_of_pages(vit: Any) -> None:
    with pytest.raises(ShapeError, match="image: expected 1 pictures, one per batch item, got 2"):
        vit.page(image=[PICTURE, PICTURE])
    with pytest.raises(ArgumentError, match="tokens: expected None beside image"):
        vit.page(["a"] * 10, image=PICTURE)
    statistics = ("entropy", "received", "top_k", "map")
    poor = recorded(build("vit", image_size=48), torch.rand(1, 3, 48, 48), statistics=statistics)
    with pytest.raises(RecordError, match="every weight between the 145 tokens"):
        poor.page(image=torch.rand(3, 48, 48))


def test_files_that_are_no_pictures_or_too_large(vit: Any, tmp_path: Path) -> None:
    half, huge = tmp_path / "half.png", tmp_path / "huge.png"
    Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype="uint8")).save(half)
    half.write_bytes(half.read_bytes()[:6000])
    Image.new("1", (20_000, 20_000)).save(huge)
    for path, message in {
        tmp_path / "nowhere.png": "No such file",
        Path(__file__): "which is none",
        half: "image: expected a picture",
        huge: "20000 × 20000|which is larger",
    }.items():
        with pytest.raises(ArgumentError, match=message):
            vit.page(image=path)


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
