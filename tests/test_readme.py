"""The README stays short, and its hero is what the command prints. Its code runs in test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clearhead.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_it_has_at_most_120_lines_and_shows_what_its_code_prints() -> None:
    assert len(README.splitlines()) <= 120
    assert len(re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", README, re.DOTALL)) == 2


def test_the_hero_head_reads_animal_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = re.search(r'clearhead look "(.*?)"', README)
    head = re.search(r"it \*puts (\d\.\d\d) of its weight on\* animal\..*`(--layer \d+ --head \d+)`", README)
    assert said is not None
    assert head is not None
    result = CliRunner().invoke(main, ["look", said[1], *head[2].split(), "--no-png", "--no-html"])
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stdout.splitlines() if line.split()[:2] == ["it", "→"])
    assert line.split()[2:4] == ["animal", head[1]]
