"""Attention as text."""

from __future__ import annotations

import io

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console, RenderableType

from clearhead.plot._heads import summarize
from clearhead.plot._terminal import colored_tokens, overview, sparkline, top_keys

from .recorded import section


def shown(what: RenderableType, width: int = 80, *, terminal: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=terminal, color_system="truecolor" if terminal else None).print(what)
    return file.getvalue()


def test_overview_has_a_cell_per_head() -> None:
    weights = [torch.eye(4).repeat(3, 1, 1), torch.full((3, 4, 4), 0.25)]
    weights[0][1, 2:] = 0.25  # half of the rows are sure, half are even
    lines = shown(overview(summarize(section(weights)), chosen=(1, 2))).splitlines()
    assert lines[0].split() == ["layer", "0", "1", "2"]
    assert lines[1].split() == ["0", "i", "0.0", "i", "0.7", "i", "0.0"]
    assert lines[2].split() == ["1", "b", "1.4", "b", "1.4>b", "1.4"]
    text = " ".join(" ".join(lines).split())
    assert "i the token itself" in text
    assert "Number: mean entropy in nats." in text


@pytest.mark.parametrize(
    ("numbers", "cells"),
    [
        ([[0.056, 0.5, 0.0]], ["i .06", "i .50", "i .00"]),
        ([[12.34, 1.0, -3.26]], ["i12.3", "i 1.0", "i-3.3"]),
        ([[123.4, -120.0, 1e5]], ["i 123", "i-120", "i 1e5"]),
        ([[-99.96, -2.5e4, 99.96]], ["i-100", "i-2e4", "i 100"]),
        ([[0.123, -0.25, -0.999]], ["i .12", "i-.25", "i  -1"]),
    ],
)
def test_overview_of_any_statistic(numbers: list[list[float]], cells: list[str]) -> None:
    summaries = summarize(section([torch.eye(4).repeat(3, 1, 1)]))
    line = shown(overview(summaries, numbers=("sink", numbers))).splitlines()[1]
    assert [line[start : start + 6].strip() for start in (5, 11, 17)] == cells
    assert line.startswith("    0")
    assert "Number: sink." in " ".join(shown(overview(summaries, numbers=("sink", numbers))).split())


def test_overview_continues_where_the_terminal_ends() -> None:
    text = shown(overview(summarize(section([torch.eye(2).repeat(32, 1, 1)])), width=60), width=60)
    assert max(len(line) for line in text.splitlines()) <= 60
    headers = [line.split()[1:] for line in text.splitlines() if line.startswith("layer")]
    assert [int(number) for header in headers for number in header] == list(range(32))
    assert text.count("i .00") == 32


def test_colour_only_in_a_terminal() -> None:
    for what in (overview(summarize(section([torch.eye(2)[None]]))), colored_tokens(["a", "b"], [0.1, 1.0])):
        assert "\x1b[" in shown(what, terminal=True)
        assert "\x1b[" not in shown(what)


def test_top_keys_are_in_order_and_those_of_long_texts_stop() -> None:
    drawn = section([torch.tensor([[[0.1, 0.6, 0.3], [0.0, 0.25, 0.75]]])], ["a", "b"], ["x", "y", "z"])
    lines = shown(top_keys(drawn, 0, 0)).splitlines()
    assert [line.split() for line in lines] == [
        ["a", "→", "y", "0.60", "z", "0.30", "x", "0.10"],
        ["b", "→", "z", "0.75", "y", "0.25"],
    ]
    blind = section([torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])], ["a", "b"])
    assert shown(top_keys(blind, 0, 0)).splitlines()[1].split() == ["b", "→", "nothing"]
    text = shown(top_keys(section([torch.eye(100)[None]], [f"t{i}" for i in range(100)]), 0, 0))
    assert "and 40 more tokens" in text
    assert "t60" not in text


def test_tokens_are_neither_markup_nor_escape_codes() -> None:
    tokens = ["[bold]", "\x1b[2J", "街"]
    drawn = section([torch.eye(3)[None]], tokens)
    for what in (top_keys(drawn, 0, 0), colored_tokens(tokens, [1.0, 2.0, 3.0])):
        text = shown(what, terminal=True)
        assert "[bold]" in text
        assert "\\x1b[2J" in text
        assert "\x1b[2J" not in text
        assert "街" in text


def test_right_to_left_text_and_emoji_keep_their_order_and_the_columns() -> None:
    tokens = ["السلام", "שלום", "😀", "👩\u200d💻", "街道", "far"]
    lines = shown(top_keys(section([torch.eye(6)[None]], tokens), 0, 0)).splitlines()
    assert [line.split()[0] for line in lines] == tokens
    assert len({cell_len(line.partition("→")[0]) for line in lines}) == 1


def test_coloured_tokens_are_darker_where_the_value_is_larger() -> None:
    text = colored_tokens(["a", "b", "c"], [0.0, 0.5, 1.0])
    assert text.plain == "a b c"
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans if str(span.style) != "none"}
    assert set(styles) == {"b", "c"}
    assert styles["b"] != styles["c"]
    assert "and 5 more tokens" in colored_tokens(["x"] * 305, [1.0] * 305).plain


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""
    assert sparkline([0] * 50 + [9] + [0] * 49, width=10) == "▁▁▁▁▁█▁▁▁▁"
