"""`clearhead look --image`: vision models in folders, what is printed and written, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from PIL import Image

from tests.support.models import SIDE, processor_of

from .looking import contents, look, refusal

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


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
def test_every_head_over_the_picture(kind: str, facts: str, model_folder: Callable[[str], Path]) -> None:
    result = look("--image", "photo.jpg", "--model", str(model_folder(kind)), "--json", "numbers.json")
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


def test_options_are_taken_and_hostile_file_names_stay_text(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "<script>alert(1)<\u202e$x$\x1b[31m.jpg"
    (tmp_path / "photo.jpg").rename(tmp_path / name)
    options = ["--layer", "0", "--head", "1", "--stat", "confidence"]
    result = look("--image", name, "--model", str(model_folder("vit")), *options)
    assert "layer 0, head 1: what the class token looks at" in result.stdout
    assert "Number: confidence." in " ".join(result.stdout.split())
    assert "\x1b" not in result.stdout
    assert "\u202e" not in result.stdout
    page = Path("attention.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    data = contents(Path("attention.html")).data
    assert data["statistic"] == "confidence"
    assert data["items"][0]["label"].startswith("<script>alert(1)<\\u202e")


def test_models_that_take_no_pictures(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    line = refusal(1, "--image", "photo.jpg", "--model", str(model_folder("mpnet")))
    assert "an image processor" in line
    folder = tmp_path / "odd"
    processor_of("vit").save_pretrained(folder)
    for file in model_folder("mpnet").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert "expected a model that runs on pictures alone" in refusal(1, "--image", "photo.jpg", "--model", "odd")


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    line = refusal(1, "--image", "photo.jpg", "--model", "x")
    assert "this command needs PIL. Install it with: pip install 'clearhead[plot]'" in line


def test_nothing_of_what_libraries_write_at_their_start_is_seen(model_folder: Callable[[str], Path]) -> None:
    options = ["--image", "photo.jpg", "--model", str(model_folder("vit")), "--no-png", "--no-html"]
    command = [sys.executable, "-m", "clearhead_command", "look", *options]
    result = subprocess.run(command, capture_output=True, check=False, text=True)
    assert (result.returncode, result.stderr) == (0, "")
