"""Attention as text."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console, RenderableType

from clearhead.errors import ArgumentError
from clearhead.plot.heads import summarize
from clearhead.plot.labels import printable
from clearhead.plot.terminal import overview, top_keys


def shown(what: RenderableType, width: int = 80, *, terminal: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=terminal, color_system="truecolor" if terminal else None).print(what)
    return file.getvalue()


def test_overview_has_a_cell_per_head() -> None:
    weights = [torch.eye(4).repeat(3, 1, 1), torch.full((3, 4, 4), 0.25)]
    lines = shown(overview(summarize(weights), layer=1, head=2)).splitlines()
    assert lines[0].split() == ["layer", "0", "1", "2"]
    assert lines[1].split() == ["0", "i", "0.0", "i", "0.0", "i", "0.0"]
    assert lines[2].split() == ["1", "b", "1.4", "b", "1.4>b", "1.4"]
    assert "i the token itself" in " ".join(lines)


def test_overview_continues_where_the_terminal_ends() -> None:
    text = shown(overview(summarize([torch.eye(2).repeat(32, 1, 1)]), width=60), width=60)
    assert max(len(line) for line in text.splitlines()) <= 60
    headers = [line.split()[1:] for line in text.splitlines() if line.startswith("layer")]
    assert [int(number) for header in headers for number in header] == list(range(32))
    assert text.count("i 0.0") == 32


def test_colour_only_in_a_terminal() -> None:
    table = overview(summarize([torch.eye(2)[None]]))
    assert "\x1b[" in shown(table, terminal=True)
    assert "\x1b[" not in shown(table)


def test_top_keys_in_order() -> None:
    weights = [torch.tensor([[[0.1, 0.6, 0.3], [0.0, 0.25, 0.75]]])]
    lines = shown(top_keys(weights, ["a", "b"], 0, 0, key_tokens=["x", "y", "z"])).splitlines()
    assert [line.split() for line in lines] == [
        ["a", "→", "y", "0.60", "z", "0.30", "x", "0.10"],
        ["b", "→", "z", "0.75", "y", "0.25", "x", "0.00"],
    ]


def test_top_keys_of_long_texts_stop() -> None:
    text = shown(top_keys([torch.eye(100)[None]], [f"t{i}" for i in range(100)], 0, 0))
    assert "and 40 more tokens" in text
    assert "t60" not in text


def test_tokens_are_neither_markup_nor_escape_codes() -> None:
    text = shown(top_keys([torch.eye(3)[None]], ["[bold]", "\x1b[2J", "街"], 0, 0), terminal=True)
    assert "[bold]" in text
    assert "\\x1b[2J" in text
    assert "\x1b[2J" not in text
    assert "街" in text


def test_a_head_that_does_not_exist() -> None:
    with pytest.raises(ArgumentError, match="layer: expected 0 "):
        top_keys([torch.eye(2)[None]], ["a", "b"], 1, 0)


def test_printable() -> None:
    assert printable(["a b", "\n", "\u200b", "", "é"]) == ["a b", "\\n", "\\u200b", "∅", "é"]
