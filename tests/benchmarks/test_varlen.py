"""`python -m benchmarks.varlen` at small lengths: equal results, and memory beyond operands and results."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.comparing import OURS, Case, TimedCase
from benchmarks.varlen import BATCH, Setting, all_cases, extra_memory, mixed_lengths

SMALL = all_cases(tokens=35, equal=7, shortest=1, longest=11)


@pytest.mark.parametrize(
    "case", [case for case in SMALL if isinstance(case, TimedCase)], ids=lambda case: f"{case.section}, {case.name}"
)
def test_documents_and_their_batch_give_equal_results(case: Case) -> None:
    result = case.measure(rounds=3)
    assert set(result.differences) == {BATCH}
    assert not result.wrong
    assert not result.skipped


def test_every_line_has_a_name_of_its_own() -> None:
    assert len({(case.section, case.name) for case in SMALL}) == len(SMALL) == 16


@pytest.mark.parametrize("name", [OURS, BATCH])
def test_memory_beyond_operands_and_results_is_positive(name: str) -> None:
    assert extra_memory(name, Setting((7, 5), causal=True, backward=True)) > 0


def test_mixed_lengths_add_up() -> None:
    lengths = mixed_lengths(1009, 3, 31)
    assert sum(lengths) == 1009
    assert all(3 <= length <= 31 for length in lengths[:-1])
    assert any(one != other for one, other in pairwise(lengths))
