"""Running commands in tests."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from clearhead.cli import main
from tests.plot.pages import Contents

SENTENCE = "The animal didn't cross the street because it was too tired."
LETTERS = "the animal was too tired , and it did not cross the street ."


def run(*arguments: str, charset: str = "utf-8") -> Result:
    return CliRunner(charset=charset).invoke(main, arguments)


def look(*arguments: str, charset: str = "utf-8") -> Result:
    """A run of `clearhead look` that succeeds."""
    result = run("look", *arguments, charset=charset)
    assert result.exit_code == 0, result.output
    return result


def refusal(code: int, *arguments: str) -> str:
    """The one line that a run of `clearhead look` prints which fails as expected."""
    result = run("look", *arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    *notes, line = result.stderr.strip().splitlines()
    assert all(note.startswith("clearhead: ") for note in notes)
    assert line.startswith("clearhead: ")
    return line


def contents(path: Path) -> Contents:
    return Contents(path.read_text(encoding="utf-8"))


def tokens_of(path: Path, item: int = 0) -> list[str]:
    return contents(path).text(item, 0, "queries")["names"]
