"""`clearhead look --against` and `--against-model`: what they print, write and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from .conftest import save_tokenizer
from .looking import LETTERS, SENTENCE, contents, look, refusal

pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "default_model_once")

WIDE = SENTENCE.replace("tired", "wide")


def test_two_texts_side_by_side(tmp_path: Path) -> None:
    result = look(SENTENCE, "--against", WIDE, "--json", "both.json")
    assert f"first   {SENTENCE}" in result.stdout
    assert f"second  {WIDE}" in result.stdout
    assert "Tokens agree in 94 % of the places." in " ".join(result.stdout.split())
    data = json.loads(Path("both.json").read_text())
    assert (data["by"], len(data["heads"])) == ("divergence", 72)
    most = max(data["heads"], key=lambda head: head["difference"])
    assert data["chosen"] == {"layer": most["layer"], "head": most["head"]} == {"layer": 3, "head": 1}
    assert "layer 3, head 1: where each token's look changes most" in result.stdout
    assert any(line.split()[:4] == ["it", "→", "animal", "−0.40"] for line in result.stdout.splitlines())
    with Image.open("attention.png") as picture:
        assert picture.size[0] > 1500
    page = contents(tmp_path / "attention.html")
    assert len(page.data["items"]) == 3
    assert page.data["compared"]["views"] == [SENTENCE, WIDE, "difference"]
    assert (page.data["layer"], page.data["head"]) == (3, 1)
    assert (tmp_path / "attention.html").stat().st_size < 600_000


def test_texts_that_do_not_agree_are_compared_by_statistics() -> None:
    result = look(SENTENCE, "--against", "Nothing in common here", "--no-png")
    printed = " ".join(result.stdout.split())
    assert "The tokens agree in" in printed
    assert "Heads are compared by their normalized_entropy." in printed
    assert len(contents(Path("attention.html")).data["compared"]["views"]) == 2


def test_texts_in_windows_are_compared_window_by_window() -> None:
    text = " ".join(["The animal crossed the street and looked around."] * 60)
    result = look(text, "--against", text.replace("street", "road"), "--no-png", "--json", "-")
    assert json.loads(result.stdout)["by"] == "divergence"
    assert len(contents(Path("attention.html")).data["items"]) == 6


def test_two_models_on_one_text(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    torch.manual_seed(5)
    first = model_folder("mpnet")
    tuned = transformers.MPNetModel.from_pretrained(first)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    tuned.save_pretrained(tmp_path / "tuned")
    save_tokenizer(tmp_path / "tuned")
    result = look(LETTERS, "--model", str(first), "--against-model", "tuned", "--layer", "1", "--no-png")
    assert "second  tuned" in result.stdout
    assert "Every row is compared with the same row of the other." in result.stdout
    assert contents(Path("attention.html")).data["layer"] == 1


def test_models_of_other_shapes(model_folder: Callable[[str], Path]) -> None:
    line = refusal(1, LETTERS, "--against-model", str(model_folder("mpnet")))
    assert "--against-model" in line
    assert "expected 6 layers with 12 heads, got 2 layers with" in line
    assert not list(Path().iterdir())
