"""The encoders' batches, and peers that cannot be built; the command itself runs in test_commands.py."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks import encoders
from benchmarks.command import Effort
from benchmarks.encoder_peers import PEERS, Batch, Encode


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


def test_every_line_has_a_name_of_its_own() -> None:
    cases = encoders.all_cases(Effort(3))
    assert len({(case.section, case.name) for case in cases}) == len(cases) == 18
