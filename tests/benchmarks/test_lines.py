"""The lines of the larger benchmarks: each has a name of its own, and computes equal results."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch

from benchmarks import cpu_cases, encoders, varlen
from benchmarks.command import Effort
from benchmarks.comparing import OURS, Case
from benchmarks.encoder_peers import PEERS, Batch, Encode


@pytest.mark.parametrize(
    ("cases", "count"),
    [
        (cpu_cases.all_cases(Effort(3)), None),
        (encoders.all_cases(Effort(3)), 18),
        (varlen.all_cases(Effort(3, smallest=True)), 16),
    ],
    ids=["cpu", "encoders", "varlen"],
)
def test_every_line_has_a_name_of_its_own(cases: list[Case], count: int | None) -> None:
    assert all(isinstance(case, Case) for case in cases)
    assert len({(case.section, case.name) for case in cases}) == len(cases)
    assert count in (None, len(cases))


def test_a_peer_that_cannot_be_built_is_skipped_with_its_reason() -> None:
    def broken(model: torch.nn.Module) -> Encode:
        raise RuntimeError("no such   operator")

    def missing(model: torch.nn.Module) -> Encode:
        raise ModuleNotFoundError(name="elsewhere")

    peers = {name: PEERS[name] for name in encoders.EAGER} | {"broken": broken, "missing": missing}
    built = encoders._Built(functools.partial(encoders._model, "BERT-base", "float32", smallest=True), peers)
    contest = encoders._contest(built, Batch.of([7, 2, 5]))
    assert list(contest.ways) == list(encoders.EAGER)
    assert contest.skipped == {"broken": "RuntimeError: no such operator", "missing": "not installed: elsewhere"}


def test_the_mixed_batch_is_42_per_cent_real() -> None:
    lengths = encoders.mixed_lengths()
    batch = Batch.of(lengths)
    assert batch.ids.shape == (32, 256)
    assert batch.mask.sum(1).tolist() == lengths
    assert float(batch.mask.float().mean()) == pytest.approx(0.42, abs=0.02)
    assert min(lengths) >= 1


@pytest.mark.parametrize("name", [OURS, varlen.BATCH])
def test_memory_beyond_operands_and_results_is_positive(name: str) -> None:
    assert varlen.extra_memory(name, varlen.Setting((7, 5), causal=True, backward=True)) > 0


def test_mixed_lengths_add_up_and_the_headings_name_them() -> None:
    lengths = varlen.mixed_lengths(1009, 3, 31)
    assert sum(lengths) == 1009
    assert all(3 <= length <= 31 for length in lengths[:-1])
    assert any(one != other for one, other in pairwise(lengths))
    assert f"{varlen.TOKENS // 256} documents of 256 tokens" == varlen.EQUAL
    count = len(varlen.mixed_lengths(varlen.TOKENS, 16, 1024))
    assert f"{count} documents of 16 to 1024 tokens" == varlen.MIXED
