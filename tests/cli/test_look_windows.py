"""`clearhead look` on texts that are longer than the model takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer

from clearhead.cli import _demo as demo
from clearhead.cli._choice import Choice
from clearhead.cli._look_text import parts_of, see
from clearhead.cli._windows import cut_into_windows
from tests.integrations.architectures import GROUPED
from tests.support.models import build
from tests.support.vocabularies import byte_level

from .looking import contents, look

pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "default_model_once")


def test_long_texts_are_read_in_windows(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """64 tokens at once, one of them special: 63 of the text, of which 8 are seen twice."""
    some = ["the", "animal", "did", "not", "cross", "the", "street", ",", "it", "was", "too", "tired"]
    words = [some[n % 12] for n in range(150)]
    (tmp_path / "long.txt").write_text(" ".join(words), encoding="utf-8")
    result = look("--file", "long.txt", "--model", str(model_folder("llama")), "--json", "all.json")
    assert result.stderr == ""
    assert "150 tokens in 3 windows of up to 64" in result.stdout
    assert "This is the first window of 3, tokens 0–62. What heads do is the mean over all windows." in " ".join(
        result.stdout.split()
    )
    page = contents(tmp_path / "attention.html")
    assert [item["label"] for item in page.data["items"]] == ["tokens 0–62", "tokens 55–117", "tokens 110–149"]
    assert page.text(2, 0, "queries")["names"] == ["<s>", *words[110:]]
    windows = json.loads((tmp_path / "all.json").read_text())["windows"]
    seen = [word for window in windows for word in window["tokens"][1 + 8 * (window["first"] > 0) :]]
    assert seen == words, "every token of the text is in a window"


def test_numbers_are_means_over_all_windows(model_folder: Callable[[str], Path]) -> None:
    text = "the animal did not cross the street , it was too tired . " * 8
    folder = str(model_folder("llama"))
    both = json.loads(look(text, "--model", folder, "--json", "-").stdout)
    parts = [window["tokens"][1:] for window in both["windows"]]
    alone = [json.loads(look(" ".join(part), "--model", folder, "--json", "-").stdout) for part in parts]
    weights = [len(part) + 1 for part in parts]
    for place, head in enumerate(both["heads"]):
        for name in ("entropy", "sink", "previous"):
            values = [numbers["heads"][place][name] for numbers in alone]
            mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
            assert head[name] == pytest.approx(mean, abs=2e-5)
        assert head["max_logit"] == pytest.approx(
            max(numbers["heads"][place]["max_logit"] for numbers in alone), abs=1e-4
        )


def test_windows_without_a_fast_tokenizer(model_folder: Callable[[str], Path]) -> None:
    class Slow:
        """Splits at spaces, with a special token on either side."""

        is_fast = False
        all_special_ids = (1, 2)
        unk_token_id = 3

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [int(word) for word in text.split()]}

        def num_special_tokens_to_add(self) -> int:
            return 2

        def build_inputs_with_special_tokens(self, ids: list[int]) -> list[int]:
            return [1, *ids, 2]

        def get_special_tokens_mask(self, ids: list[int], already_has_special_tokens: bool) -> list[int]:
            return [int(number in (1, 2)) for number in ids]

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [str(number) for number in ids]

        def decode(self, ids: list[int], **options: object) -> str:
            return str(ids[0])

    loaded = demo.PretrainedModel("slow", None, Slow(), True, expected="", max_tokens=16)
    windows = cut_into_windows(loaded, " ".join(str(number) for number in range(10, 40)))
    assert [(window.first, window.last) for window in windows] == [(0, 13), (12, 25), (24, 29)]
    assert windows[1].tokens.names == ("1", *map(str, range(22, 36)), "2")
    assert windows[1].inputs["input_ids"].tolist() == [[1, *range(22, 36), 2]]
    assert windows[2].tokens.special == (True, *[False] * 6, True)


def test_windows_that_cut_characters_show_the_text() -> None:
    """64 tokens at once, each a byte: windows begin and end inside characters, and nothing shows the bytes."""
    build("Llama", "ForCausalLM", GROUPED | {"vocab_size": 256}).save_pretrained("bytes")
    byte_level().save_pretrained("bytes")
    text = " ".join(["naïve", "你好", "😀", "日本語"] * 7)
    result = look(text, "--model", "bytes", "--json", "all.json")
    windows = json.loads(Path("all.json").read_text(encoding="utf-8"))["windows"]
    seen = [name for window in windows for name in window["tokens"][8 * (window["first"] > 0) :]]
    assert len(seen) == len(text.encode())
    assert "".join(name for name in seen if name != "⇠").replace("␣", " ") == text
    assert any(window["tokens"][0] == "⇠" for window in windows), "no window begins inside a character"
    names = {name for window in windows for name in window["tokens"]}
    assert names == {*text.replace(" ", "␣"), "⇠"}
    page = contents(Path("attention.html"))
    shown = [page.text(item, 0, "queries") for item in range(len(windows))]
    assert [one["names"] for one in shown] == [window["tokens"] for window in windows]
    assert shown[0]["wordNames"][:5] == ["naïve", "你好", "😀", "日本語", "naïve"]
    assert not set(result.stdout) & set("ĠĊÃä½łðŁ")


class _Takes:
    """A model of ids."""

    def forward(self, input_ids: torch.Tensor) -> None: ...


@pytest.mark.parametrize("tokenizer", [byte_level, ByT5Tokenizer], ids=["fast", "slow"])
def test_a_window_has_the_characters_of_the_whole_text(tokenizer: Callable[[], Any]) -> None:
    loaded = demo.PretrainedModel("bytes", _Takes(), tokenizer(), True, expected="", max_tokens=16)
    windows = cut_into_windows(loaded, "日本語世界你好" * 2)
    cut = [window.tokens.names[0] for window in windows]
    assert "⇠" in cut
    assert all("�" not in window.tokens.names for window in windows)
    ordinary = [name for window in windows for name in window.tokens.names[2 * (window.first > 0) :] if name != "</s>"]
    assert "".join(name for name in ordinary if name != "⇠") == "日本語世界你好" * 2


def test_the_default_model_takes_512_tokens(default_model_once: demo.PretrainedModel) -> None:
    windows = cut_into_windows(default_model_once, "one two three " * 300)
    assert [len(window.tokens) for window in windows] == [512, 456]
    assert [(window.first, window.last) for window in windows] == [(0, 509), (446, 899)]
    assert (windows[0].tokens.names[0], windows[0].tokens.names[-1]) == ("[CLS]", "[SEP]")


def test_a_bar_counts_equal_parts_and_the_time_that_is_left() -> None:
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "clearhead_command", "look", "a b c " * 900, "--no-png"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 65536):
            shown += part
    except OSError:  # the terminal is gone once the process has ended
        pass
    os.close(leader)
    assert process.wait() == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r", "\n").splitlines()
    running = [line for line in lines if "running it on 6 windows" in line]
    portions = [int(match[1]) for line in running if (match := re.search(r"(\d+) %", line))]
    assert portions == sorted(portions)
    assert len(set(portions)) > 3, "not window by window: layer by layer"
    assert all(re.search(r"left [\d:-]+$", line.rstrip()) for line in running)
    assert lines[-1].strip() == "", "the bar goes away"


def test_parts_are_counted_before_and_advance_as_often(default_model_once: demo.PretrainedModel) -> None:
    loaded = default_model_once
    for count, batches in ((10, 1), (700, 2), (1500, 2)):
        windows = cut_into_windows(loaded, "one two three " * (count // 3))
        done: list[None] = []
        see(loaded, windows, Choice(), lambda done=done: done.append(None))
        assert len(done) == parts_of(loaded, windows) == 7 * batches


def test_the_number_of_threads_is_as_before(model_folder: Callable[[str], Path]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        look("the animal", "--model", str(model_folder("llama")), "--no-png")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
