"""Logits that grow without bound at a high learning rate, and stay at the threshold with QK-Clip."""

from __future__ import annotations

import pytest

from .conftest import example

clip_logits = example("clip_logits")


def test_logits_grow_without_and_stay_with_it() -> None:
    free, clipped = clip_logits.train(160), clip_logits.train(160, threshold=50.0)
    largest = [max(step.logit for step in free[start : start + 40]) for start in range(0, 160, 40)]
    assert largest == sorted(largest)
    assert largest[-1] > 500  # and still more with more steps
    assert max(step.logit for step in clipped) <= 50 * (1 + 1e-5)
    assert min(step.loss for step in clipped[-40:]) < 0.2  # of ln 16 = 2.8


def test_the_program_prints_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["clip_logits.py", "--steps", "2"])
    clip_logits.main()
    assert "without, " in capsys.readouterr().out
