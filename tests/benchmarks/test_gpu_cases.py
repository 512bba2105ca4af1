"""The GPU's measurements, run on the CPU at small lengths: equal results, and the command without a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu
from benchmarks.command import Effort
from benchmarks.comparing import Case
from benchmarks.gpu_cases import all_cases

SMALL = all_cases("cpu", lengths=(13,), heads=2)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name.replace(" ", "_"))
def test_every_case_runs_and_compares_equal_results(case: Case) -> None:
    result = case.measure(Effort(3))
    assert not result.wrong
    assert result.ratios


def test_without_a_gpu_the_command_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no GPU: torch.cuda.is_available\(\) is False"):
        gpu.BENCHMARK.main([])
