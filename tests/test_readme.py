"""The README stays short, and what it shows is what its code and its commands print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clearhead.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SHOWN = re.compile(r"```python\n(.*?)```\n```text\n(.*?)```", re.DOTALL)
FIGURES = re.compile(r"-?\d+\.\d+")


def test_it_has_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120


def test_its_code_prints_what_it_shows() -> None:
    shown = SHOWN.findall(README)
    assert len(shown) == 3
    namespace: dict[str, object] = {"__name__": "readme"}
    for code, expected in shown:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "README.md", "exec"), namespace)
        assert FIGURES.sub("#", printed.getvalue()) == FIGURES.sub("#", expected)
        figures = [[float(found) for found in FIGURES.findall(text)] for text in (printed.getvalue(), expected)]
        assert figures[0] == pytest.approx(figures[1], abs=0.002)


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
