"""`clearhead look --image`: vision models in folders, what is printed and written, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from PIL import Image

from tests.plot.test_images import BOTH, SMALL

from .looking import contents, fails, look

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

SIDE = SMALL["image_size"]
RESIZED: dict[str, Any] = {"size": {"height": SIDE, "width": SIDE}}
CROPPED: dict[str, Any] = {"size": {"shortest_edge": SIDE + 4}, "crop_size": {"height": SIDE, "width": SIDE}}

KINDS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", SMALL, "ViTImageProcessorPil", RESIZED),
    "deit": ("DeiTModel", "DeiTConfig", SMALL, "DeiTImageProcessorPil", RESIZED | {"do_center_crop": False}),
    "registers": (
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        SMALL | {"num_register_tokens": 2},
        "BitImageProcessorPil",
        CROPPED,
    ),
    "clip": ("CLIPModel", "CLIPConfig", {"vision_config": SMALL, **BOTH}, "CLIPImageProcessorPil", CROPPED),
    "siglip": ("SiglipModel", "SiglipConfig", {"vision_config": SMALL, **BOTH}, "SiglipImageProcessorPil", RESIZED),
}


@pytest.fixture(scope="module", name="vision_folder")
def _vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, Path] = {}

    def folder_for(kind: str) -> str:
        if kind not in made:
            model, config, options, processor, sizes = KINDS[kind]
            torch.manual_seed(4)
            made[kind] = tmp_path_factory.mktemp(kind)
            getattr(transformers, model)(getattr(transformers, config)(**options)).save_pretrained(made[kind])
            getattr(transformers, processor)(**sizes).save_pretrained(made[kind])
        return str(made[kind])

    return folder_for


@pytest.fixture(autouse=True)
def photo(tmp_path: Path) -> None:
    pixels = numpy.random.default_rng(1).integers(0, 255, (30, 40, 3), dtype="uint8")
    Image.fromarray(pixels).save(tmp_path / "photo.jpg")


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("vit", "3 × 3 patches and class"),
        ("deit", "3 × 3 patches and class, distillation"),
        ("registers", "3 × 3 patches and class, register 1, register 2"),
        ("clip", "3 × 3 patches and class"),
        ("siglip", "3 × 3 patches"),
    ],
)
def test_every_head_over_the_picture(kind: str, facts: str, vision_folder: Callable[[str], str]) -> None:
    result = look("--image", "photo.jpg", "--model", vision_folder(kind), "--json", "numbers.json")
    assert result.exit_code == 0, result.output
    assert f"photo.jpg · 2 layers × 2 heads · {facts}" in " ".join(result.stdout.split())
    assert "wrote attention.png" in result.stdout
    assert "token before" not in result.stdout, "a vision model has patches"
    data = json.loads(Path("numbers.json").read_text())
    assert [len(row) for row in data["looks_at"]] == [3, 3, 3]
    assert 0 < sum(map(sum, data["looks_at"])) <= 1 + 1e-5
    page = contents(Path("attention.html"))
    assert page.data["items"][0]["picture"]["size"] == [SIDE, SIDE]
    with Image.open("attention.png") as picture:
        assert picture.size[0] > 800


def test_layer_head_and_statistic_are_taken(vision_folder: Callable[[str], str]) -> None:
    options = ["--layer", "0", "--head", "1", "--stat", "confidence", "--no-png"]
    result = look("--image", "photo.jpg", "--model", vision_folder("vit"), *options)
    assert "layer 0, head 1: what the class token looks at" in result.stdout
    assert "Number: confidence." in " ".join(result.stdout.split())
    assert contents(Path("attention.html")).data["statistic"] == "confidence"


def test_hostile_file_names_stay_text(vision_folder: Callable[[str], str], tmp_path: Path) -> None:
    name = "<script>alert(1)<\u202e$x$\x1b[31m.jpg"
    (tmp_path / "photo.jpg").rename(tmp_path / name)
    result = look("--image", name, "--model", vision_folder("vit"))
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert "\u202e" not in result.stdout
    page = Path("attention.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert contents(Path("attention.html")).data["items"][0]["label"].startswith("<script>alert(1)<\\u202e")


@pytest.mark.parametrize(
    ("arguments", "expected", "code"),
    [
        (["--image", "photo.jpg"], "--model: expected a vision model beside --image, got none.", 2),
        (["a", "--image", "photo.jpg", "--model", "x"], "TEXT: expected no TEXT beside --image, got both.", 2),
        (
            ["--image", "photo.jpg", "--against", "b", "--model", "x"],
            "--against: expected no --against beside --image",
            2,
        ),
        (["--image", "nowhere.jpg", "--model", "x"], "'nowhere.jpg': No such file or directory.", 1),
        (["--image", "text.jpg", "--model", "x"], "image: expected a picture of at most 50 million pixels", 1),
        (["--image", "huge.png", "--model", "x"], "image: expected a picture of at most 50 million pixels", 1),
        (["--image", ".", "--model", "x"], "Is a directory", 1),
        (["--image", "photo.jpg", "--model", "./nowhere"], "model ./nowhere: expected a folder with config.json", 1),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: list[str], expected: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "text.jpg").write_text("no picture")
    Image.new("1", (9_000, 9_000)).save(tmp_path / "huge.png")
    before = sorted(tmp_path.iterdir())
    assert expected in fails(look(*arguments), code)
    assert sorted(tmp_path.iterdir()) == before


def test_models_that_take_no_pictures(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    line = fails(look("--image", "photo.jpg", "--model", str(model_folder("mpnet"))), 1)
    assert "an image processor" in line
    folder = tmp_path / "odd"
    transformers.ViTImageProcessorPil(**RESIZED).save_pretrained(folder)
    for file in model_folder("mpnet").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert "expected a model that runs on pictures alone" in fails(look("--image", "photo.jpg", "--model", "odd"), 1)


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    line = fails(look("--image", "photo.jpg", "--model", "x"), 1)
    assert "this command needs PIL. Install it with: pip install 'clearhead[plot]'" in line


def test_nothing_of_what_libraries_write_at_their_start_is_seen(vision_folder: Callable[[str], str]) -> None:
    command = [sys.executable, "-m", "clearhead_command", "look", "--image", "photo.jpg", "--no-png", "--no-html"]
    result = subprocess.run([*command, "--model", vision_folder("vit")], capture_output=True, check=False, text=True)
    assert (result.returncode, result.stderr) == (0, "")
