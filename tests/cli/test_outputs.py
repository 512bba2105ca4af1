"""Outputs that take nothing, are narrow or lack characters, and what is checked before a model is loaded."""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from rich.cells import cell_len

from .looking import LETTERS, SENTENCE, look, refusal, run

PROGRAM = [sys.executable, "-m", "clearhead"]
FULL = Path("/dev/full")
WALKTHROUGH = ["walkthrough", "--length", "3"]

in_an_empty_folder = pytest.mark.usefixtures("in_an_empty_folder", "default_model_once")


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*PROGRAM, *arguments], stderr=subprocess.PIPE, check=False, **options)


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [WALKTHROUGH, ["look", "--help"]])
def test_an_output_that_takes_nothing_is_one_line_and_exits_with_1(arguments: list[str]) -> None:
    with FULL.open("wb") as full:
        result = process(*arguments, stdout=full)
    line = f"clearhead: nothing more can be written to the output: {os.strerror(errno.ENOSPC)}.\n"
    assert (result.returncode, result.stderr.decode()) == (1, line)


@pytest.mark.parametrize("arguments", [WALKTHROUGH, ["look", "--help"]])
def test_a_reader_that_left_ends_it_quietly_with_0(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = process(*arguments, stdout=writer)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, b"")


@in_an_empty_folder
def test_a_full_disk_is_one_line_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.suffix == ".html":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    line = refusal(1, "a b")
    assert line.endswith("--html: expected a file that can be written, got attention.html: No space left on device.")
    assert not list(Path().iterdir())


@in_an_empty_folder
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_token_types_of_a_tokenizer_do_not_reach_a_model_that_takes_none(
    kind: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["input_ids", "token_type_ids", "attention_mask"]
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "model_input_names", names)
    folder = str(model_folder(kind))
    assert "token_type_ids" in transformers.AutoTokenizer.from_pretrained(folder)(LETTERS)
    look(LETTERS, "--model", folder, "--no-png", "--no-html")


@in_an_empty_folder
def test_no_message_advises_what_the_command_cannot_do(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = transformers.MPNetModel.forward

    @functools.wraps(forward)
    def halved(*args: Any, **options: Any) -> Any:
        result = forward(*args, **options)
        result.attentions = [weights / 2 for weights in result.attentions]
        return result

    monkeypatch.setattr(transformers.MPNetModel, "forward", halved)
    line = refusal(1, LETTERS, "--model", str(model_folder("mpnet")), "--no-png")
    assert line.endswith("got weights[0]: expected weights ≥ 0 whose rows sum to 1, got a row that sums to 0.500.")


@in_an_empty_folder
@pytest.mark.parametrize("text", [SENTENCE, "今天天气很好，我们去公园散步。"])
def test_forty_columns_are_kept(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = look(text, "--no-png", "--no-html").stdout.splitlines()
    assert max(map(cell_len, lines)) <= 40
    if text == SENTENCE:
        assert any(line.split()[:4] == ["was", "→", "tired", "0.65"] for line in lines), "no weight is left out"


@in_an_empty_folder
def test_ascii_stands_in_for_what_the_encoding_lacks() -> None:
    result = look("Le café 街.", "--no-png", "--no-html", charset="ascii")
    assert "all-MiniLM-L6-v2 - 6 layers x 12 heads - " in result.stdout
    sparks = next(line for line in result.stdout.splitlines() if line.startswith("received "))
    assert set(sparks.split()[1]) <= set("_.-~=+*#")
    assert "?" not in result.stdout.replace("??", ""), "only what has nothing like it, as wide as it is"
    walk = run(*WALKTHROUGH, charset="ascii")
    assert (walk.exit_code, walk.stdout.isascii(), "?" in walk.stdout) == (0, True, False)


@in_an_empty_folder
def test_characters_that_no_font_has_are_named_once() -> None:
    [line] = look("a \U0010ff00 b \U0010ff01 \U0010ff00", "--no-html").stderr.splitlines()
    assert Path("attention.png").exists()
    assert line.startswith(r"clearhead: no installed font has \U0010ff00, \U0010ff01, so the picture shows boxes.")


@pytest.mark.slow
@pytest.mark.parametrize("size", [44_000, 400_000])
def test_long_texts_take_one_gigabyte_at_most(size: int, tmp_path: Path) -> None:
    pages = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    (tmp_path / "text.txt").write_bytes((text.encode() * 2)[:size].decode(errors="ignore").encode())
    command = [*PROGRAM, "look", "--file", "text.txt"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_maxrss <= 1_000_000  # kilobytes
