"""The README stays short, and the first command of the front pages makes the picture above it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image, ImageChops
from typer.testing import CliRunner

from clearhead.cli import main
from docs.count import introduction
from docs.markdown import blocks
from tests.support.pinned import needs_pinned

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "attention.png"
FRONT = [ROOT / "README.md", ROOT / "README.zh.md", *ROOT.glob("docs/*/index.md"), *ROOT.glob("docs/*/start.md")]


def first_look(page: Path) -> list[str]:
    """The arguments of the first `clearhead look` of a page."""
    commands = [line for language, text in blocks(page) if language == "sh" for line in text.splitlines()]
    command = next(line for line in commands if "clearhead look" in line)
    return shlex.split(command.rpartition("&& ")[2])[1:]


def test_the_readme_has_at_most_600_words_before_its_map_and_shows_what_its_code_prints() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert introduction() <= 600
    assert len(re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", readme, re.DOTALL)) == 1


@pytest.mark.parametrize("page", FRONT, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_first_command_is_about_the_head_of_the_picture(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    arguments = first_look(page)
    assert arguments[2:6] == ["--layer", "3", "--head", "1"]
    assert re.search(r"images/attention\.png", text)
    assert [each for each in arguments if each not in ("--lang", "zh")] == first_look(ROOT / "README.md")


@needs_pinned("matplotlib")
def test_the_first_command_makes_the_picture_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, first_look(ROOT / "README.md"))
    assert result.exit_code == 0, result.output
    assert "layer 3, head 1: it → animal 0.68\n" in result.stdout
    with Image.open("attention.png") as made, Image.open(PICTURE) as shown:
        assert made.size == shown.size
        assert ImageChops.difference(made.convert("RGB"), shown.convert("RGB")).getbbox() is None
    assert Path("attention.html").is_file()
