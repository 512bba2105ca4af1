"""`clearhead walkthrough` on the command line: the example, its options, and one readable line for bad ones."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from .looking import run

walk = partial(run, "walkthrough")


def test_the_example_has_different_sizes_is_the_same_every_time_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    result = walk()
    assert (result.exit_code, result.stdout) == (0, walk().stdout)
    assert torch.equal(torch.get_rng_state(), state)
    assert "(B, H, L, D) = (2, 3, 5, 4)" in result.stdout
    assert "(B, L, E) = (2, 5, 12)" in result.stdout
    assert "No mask was given" in result.stdout
    assert result.stderr == ""


def test_causal_hides_later_tokens_and_the_steps_and_the_module_agree() -> None:
    result = walk("--causal").stdout
    assert "hides 60 of 150 scores" in " ".join(result.split())
    last = result.rstrip().splitlines()[-1]
    assert last.startswith("Largest difference between these steps and module(query, …) itself: ")
    assert float(last.split(": ")[1].rstrip(".")) < 1e-5


def test_chinese() -> None:
    result = walk("--lang", "zh", "--causal")
    assert result.exit_code == 0
    for term in ("多头注意力", "查询", "缩放点积", "掩码", "加权求和", "输出投影"):
        assert term in result.stdout


def test_the_sizes_are_options() -> None:
    options = ("--embed-dim", "20", "--num-heads", "4", "--num-kv-heads", "2", "--length", "7", "--batch-size", "3")
    result = walk(*options)
    assert "(B, H, L, D) = (3, 4, 7, 5)" in result.stdout
    assert "(B, Hkv, S, D) = (3, 2, 7, 5)" in result.stdout


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("--embed-dim", "13", "--embed-dim: expected a multiple of --num-heads 3, got 13.\n"),
        ("--num-kv-heads", "2", "--num-kv-heads: expected a divisor of --num-heads 3, got 2.\n"),
        ("--num-heads", "0", "--num-heads: expected 1 or more, got 0.\n"),
        ("--length", "-4", "--length: expected 1 or more, got -4.\n"),
        ("--length", "few", "Invalid value for '--length': "),
        ("--batch-size", "0", "--batch-size: expected 1 or more, got 0.\n"),
        ("--lang", "fr", "--lang: expected en or zh, got 'fr'.\n"),
        (
            *("--length", "100000"),
            "--embed-dim, --num-heads, --length, --batch-size: expected an example whose tensors hold at most "
            "50,000,000 numbers, got one of 60,000,000,000. Choose smaller sizes.\n",
        ),
    ],
)
def test_bad_options_give_one_line_and_exit_code_2(option: str, value: str, line: str) -> None:
    result = walk(option, value)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert result.stderr.startswith(f"clearhead: {line}")


def test_an_output_that_cannot_hold_chinese_gives_one_line() -> None:
    result = walk("--lang", "zh", charset="latin-1")
    assert result.exit_code == 2
    assert result.stderr.startswith("clearhead: the output's encoding (latin-1) has no sign for '\\u9010'.")
    assert "PYTHONIOENCODING" in result.stderr
