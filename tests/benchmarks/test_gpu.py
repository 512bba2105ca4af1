"""`benchmarks.gpu` on the CPU, with the smallest work: equal results, every text, and the bars."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.command import Effort
from benchmarks.gpu_statistics import ALL, ATTENTION, RECEIVED


@pytest.fixture(name="measured", scope="module")
def _measured() -> dict[str, Any]:
    """Lines and their figures, as a result file has them."""
    lines = list(gpu.lines_on("cpu", Effort(3, smallest=True), heads=2))
    assert len({line.name for line in lines}) == len(lines)
    return {line.name: json.loads(json.dumps(line.measure())) for line in lines}


def test_all_ways_have_equal_results(measured: dict[str, Any]) -> None:
    assert gpu.wrong(measured) == []
    compared = [each for each in measured.values() if isinstance(each, dict) and each.get("differences")]
    assert len(compared) > 25


def test_every_text_is_there(measured: dict[str, Any]) -> None:
    texts = gpu.texts(measured)
    assert all(texts.values())
    assert "| D=64, L=32, causal |" in texts["attention"]
    assert "flash-attn not measured" in texts["tables"]


def test_bars_compare_what_they_name() -> None:
    forward = {"unit": "ms", "figures": {"Clearhead": 2.0, "SDPA": 3.0, "SDPA, flash": 1.9}}
    measured: dict[str, Any] = {
        f"{gpu.FORWARD}: D=128, L=8,192, causal": forward,
        f"{gpu.STATISTICS}, D=128, L=8,192": {"ms": {ATTENTION: 2.0, RECEIVED: 1.7, ALL: 5.0}},
        gpu.LONG: {"MB": 2500.0, "seconds": 1.0},
    }
    assert [(bar, value, gpu._met(what, bar, value)) for what, _, bar, value in gpu.bars(measured)] == [
        (0.97, 0.95, False),
        (0.9, 0.85, True),
        (2.2, 2.5, False),
        (3.0, 2.5, True),
    ]


def test_without_a_gpu_the_command_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no GPU: torch.cuda.is_available\(\) is False"):
        gpu.BENCHMARK.main([])
