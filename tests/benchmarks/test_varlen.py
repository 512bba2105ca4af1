"""`python -m benchmarks.varlen` at small lengths: equal results, and memory beyond operands and results."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.command import Effort
from benchmarks.comparing import OURS
from benchmarks.varlen import BATCH, EQUAL, MIXED, TOKENS, Setting, all_cases, extra_memory, mixed_lengths

SMALL = all_cases(Effort(3, smallest=True))


def test_every_line_has_a_name_of_its_own() -> None:
    assert len({(case.section, case.name) for case in SMALL}) == len(SMALL) == 16


@pytest.mark.parametrize("name", [OURS, BATCH])
def test_memory_beyond_operands_and_results_is_positive(name: str) -> None:
    assert extra_memory(name, Setting((7, 5), causal=True, backward=True)) > 0


def test_the_headings_say_what_the_documents_are() -> None:
    lengths = mixed_lengths(TOKENS, 16, 1024)
    assert f"{TOKENS // 256} documents of 256 tokens" == EQUAL
    assert f"{len(lengths)} documents of 16 to 1024 tokens" == MIXED


def test_mixed_lengths_add_up() -> None:
    lengths = mixed_lengths(1009, 3, 31)
    assert sum(lengths) == 1009
    assert all(3 <= length <= 31 for length in lengths[:-1])
    assert any(one != other for one, other in pairwise(lengths))
