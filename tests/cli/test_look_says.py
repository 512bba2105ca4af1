"""What `clearhead look` says beside its pictures and in Chinese, what it keeps to itself, and how a process ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from tests.support.models import minilm

from .looking import LETTERS, contents, look

PROGRAM = [sys.executable, "-m", "clearhead_command", "look"]
ENVIRONMENT = dict(os.environ)
TEXT = "Time flies."
ENGLISH = re.compile(
    r"\b(?:layers?|heads?|tokens?|query|queries|keys?|weights?|entropy|wrote|took|nats)\b", re.IGNORECASE
)


@pytest.mark.usefixtures("in_an_empty_folder", "default_model_once")
class TestNotes:
    @pytest.mark.parametrize(
        ("language", "said"),
        [
            ("en", r"all-MiniLM-L6-v2 does not know (\d+) % of the tokens of this text .* such as --model \S+\."),
            ("zh", r"all-MiniLM-L6-v2 不认识这段文本中 (\d+) % 的词元.*例如 --model \S+。"),
        ],
    )
    def test_a_text_of_another_language_keeps_its_characters_and_is_warned_of_at_the_end(
        self, language: str, said: str
    ) -> None:
        text = "今天天气很好，我们去公园散步，看到了很多漂亮的花。"
        result = look(text, "--no-png", "--lang", language, "--json", "numbers.json")
        [line] = result.stderr.splitlines()
        assert result.output.splitlines()[-1] == line
        match = re.fullmatch(f"clearhead: {said}", line)
        assert match, line
        page, numbers = contents(Path("attention.html")), json.loads(Path("numbers.json").read_text())
        assert "".join(page.text(0, 0, "queries")["names"][1:-1]) == text
        assert "".join(numbers["windows"][0]["tokens"][1:-1]) == text
        assert page.data["notes"] == [line.removeprefix("clearhead: ")]
        tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert int(match[1]) == round(100 * ids.count(tokenizer.unk_token_id) / len(ids)) > 10

    def test_a_few_unknown_tokens_are_not_worth_a_line(self, model_folder: Callable[[str], Path]) -> None:
        text = "the animal was too tired " * 2  # ten tokens, and one that is unknown
        folder = str(model_folder("llama"))
        assert look(f"{text} zebra", "--model", folder, "--no-png").stderr == ""
        assert "does not know 17 %" in look(f"{text} zebra zebra", "--model", folder, "--no-png").stderr

    def test_how_long_it_took(self) -> None:
        lines = look("Time flies.", "--no-png").stdout.splitlines()
        match = re.fullmatch(r"took (\d+\.\d) s, (\d+\.\d) s of them to load the model", lines[-1])
        assert match
        assert 0 <= float(match[2]) <= float(match[1]) < 60

    def test_chinese_terminal_page_and_numbers(self) -> None:
        result = look(TEXT, "--lang", "zh", "--no-png", "--json", "zh.json")
        assert not ENGLISH.search(re.sub(r"--(layer|head)\b", "", result.stdout)), result.stdout
        assert "6 层 × 12 个头 · 5 个词元" in result.stdout
        page = contents(Path("attention.html"))
        assert page.data["sections"][0]["title"] == "自注意力"
        assert page.data["words"]["{0} heads"] == "{0} 个头"
        english = look(TEXT, "--no-png", "--no-html", "--json", "en.json")
        assert "6 layers × 12 heads · 5 tokens" in english.stdout
        assert json.loads(Path("zh.json").read_text()) == json.loads(Path("en.json").read_text())


def test_nothing_of_what_libraries_write_at_their_start_is_seen(tmp_path: Path) -> None:
    """A library that warns, in every usual way, as soon as transformers is there."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.abc, logging, sys, warnings\n"
        "class Noise(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'transformers.modeling_utils':\n"
        "            logging.getLogger('noisy').warning('noise of a logger')\n"
        "            warnings.warn('noise of a warning')\n"
        "            print('came by', file=open(__file__ + '.seen', 'w'))\n"
        "sys.meta_path.insert(0, Noise())\n"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [*PROGRAM, LETTERS, "--no-png", "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, env=environment, check=False, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert (tmp_path / "sitecustomize.py.seen").exists()


#: Where a run is when it is stopped → what makes it say "now" there. Importing goes on; writing and running hang, in a
#: loop that catches everything, as libraries do.
MOMENTS = {
    "importing PyTorch": "at_import('torch._C')",
    "importing transformers": "at_import('transformers.modeling_utils')",
    "running": "from clearhead.cli import _look_text; _look_text.run_recorded = hang",
    "writing": (
        "from pathlib import Path; write = Path.write_bytes; "
        "Path.write_bytes = lambda self, data: (write(self, data[:1000]), hang())"
    ),
}
STOPPED = """
import importlib.abc, sys, time
def hang(*args):
    print("now", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == self.name:
            print("now", flush=True)
def at_import(name):
    finder = Finder()
    finder.name = name
    sys.meta_path.insert(0, finder)
import clearhead_command
clearhead_command.stop_at_once()
{moment}
clearhead_command.main()
"""


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_it_at_once_with_one_line_and_no_half_file(moment: str, tmp_path: Path) -> None:
    """What was there stays, and nothing else is left."""
    (tmp_path / "attention.html").write_text("before")
    program = STOPPED.replace("{moment}", MOMENTS[moment])
    command = [sys.executable, "-c", program, "look", "Time flies.", "--no-png", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, cwd=tmp_path, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    assert len(list(tmp_path.iterdir())) == (2 if moment == "writing" else 1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - started < 3
    assert process.returncode == 130
    assert errors == "clearhead: stopped\n"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("attention.html", "before")]


#: In place of the commands, whose import takes seconds.
ENDED = """
import atexit, sys, types
import clearhead_command
def main():
    atexit.register(print, "a library's own end")
    {ending}
sys.modules["clearhead"] = types.ModuleType("clearhead")
sys.modules["clearhead.cli"] = types.ModuleType("clearhead.cli")
sys.modules["clearhead.cli"].main = main
clearhead_command.main()
"""


def _run(ending: str) -> subprocess.CompletedProcess[str]:
    program = ENDED.replace("{ending}", ending)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_process_ends_with_the_code_and_the_output_of_the_command() -> None:
    for ending, code, error in (
        ("return", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('a reason')", 1, "a reason\n"),
    ):
        result = _run(ending)
        assert (result.returncode, result.stderr, result.stdout) == (code, error, "a library's own end\n")


def test_an_exception_that_nothing_handles_keeps_its_traceback() -> None:
    result = _run("raise LookupError('a bug')")
    assert (result.returncode, result.stdout) == (1, "a library's own end\n")
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("LookupError: a bug\n")
