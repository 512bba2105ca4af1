"""`python -m benchmarks.encoders` on few short texts: the ways agree at real tokens, and each builds once."""

from __future__ import annotations

import pytest
import torch

from benchmarks import encoder_peers, encoders
from benchmarks.comparing import OURS, Case
from benchmarks.encoder_peers import PEERS, TRAINABLE, Batch
from tests.support.budgets import slow

SHORT = {name: [7, 7, 7] if "96" in name else [7, 2, 5] for name in encoders.BATCHES}
EAGER = {name: PEERS[name] for name in (OURS, encoder_peers.PADDED, encoder_peers.SDPA)}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers and exporters take minutes; they are left to the command itself."""
    monkeypatch.setattr(encoders, "BATCHES", SHORT)
    monkeypatch.setattr(encoders, "PEERS", EAGER)
    monkeypatch.setattr(encoders, "TRAINABLE", {name: TRAINABLE[name] for name in EAGER})
    encoders._built.cache_clear()


CASES = [case for case in encoders.all_cases() if "MiniLM" in case.name]
#: Each pass, dtype and dropout is timed on one of the two batches; these on the other one.
OTHERS = ("float32, 32 texts", "bfloat16, 32 ×", "dropout 0.0, 32 ×", "dropout 0.1, 32 texts")
others = [case for case in CASES if any(name in case.name for name in OTHERS)]


@pytest.mark.parametrize(
    "case",
    [*(case for case in CASES if case not in others), *slow(*others)],
    ids=lambda case: f"{case.section}, {case.name}",
)
def test_ways_agree(case: Case) -> None:
    result = case.measure(rounds=3)
    assert OURS in result.figures
    assert set(result.differences) <= set(EAGER) - {OURS}
    assert not result.wrong or "dropout 0.1" in case.name  # the distribution of three short texts is a wide one
    assert not result.skipped
    assert (result.rate_unit == "texts/s") == bool(result.rates)


def test_a_peer_that_cannot_be_built_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: torch.nn.Module) -> encoder_peers.Encode:
        raise RuntimeError("no such   operator")

    def missing(model: torch.nn.Module) -> encoder_peers.Encode:
        raise ModuleNotFoundError(name="elsewhere")

    monkeypatch.setattr(encoders, "PEERS", {**EAGER, "broken": broken, "missing": missing})
    monkeypatch.setattr(encoder_peers, "PEERS", {})
    contest = encoders._contest("MiniLM", "float32", encoders.MIXED)
    assert list(contest.ways) == list(EAGER)
    assert contest.skipped == {"broken": "RuntimeError: no such operator", "missing": "not installed: elsewhere"}


def test_the_mixed_batch_is_42_per_cent_real() -> None:
    lengths = encoders.mixed_lengths()
    batch = Batch.of(lengths)
    assert batch.ids.shape == (32, 256)
    assert batch.mask.sum(1).tolist() == lengths
    assert float(batch.mask.float().mean()) == pytest.approx(0.42, abs=0.02)
    assert min(lengths) >= 1


def test_every_line_has_a_name_of_its_own() -> None:
    cases = encoders.all_cases()
    assert len({(case.section, case.name) for case in cases}) == len(cases) == 18
