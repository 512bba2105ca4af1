"""`benchmarks.gpu` on the CPU, with the smallest work: equal results, every text, the bars, and checks that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.command import Effort
from benchmarks.figures import read
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.check_cases import Check
from benchmarks.gpu.probe import Seen
from benchmarks.gpu.statistics import ALL, ATTENTION, RECEIVED

ROOT = Path(__file__).parents[2]
OTHERS = """
import os, sys
from benchmarks.gpu import check as gpu_check
from benchmarks.figures import read
from benchmarks.gpu.check_cases import Check
known = {check.name: check for check in gpu_check.all_checks()}
def dies(device): os.abort()
def raises(device): raise ValueError("first\\nthe last line of an error")
cases = [known["none f32"], Check("dies", dies, None), Check("raises", raises, None), known["none bf16"]]
gpu_check.all_checks = lambda: cases
gpu_check.START = [sys.executable, __file__]
gpu_check.main()
"""


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


def test_all_checks_have_names_of_their_own() -> None:
    names = [check.name for check in gpu_check.all_checks()]
    assert len(set(names)) == len(names) > 100


def test_a_check_that_dies_is_one_line_and_the_others_run(tmp_path: Path) -> None:
    script = tmp_path / "others.py"
    script.write_text(OTHERS, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), *sys.path])
    run = subprocess.run(
        [sys.executable, str(script), "--device", "cpu", "--out", str(tmp_path / "out.json")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, run.stderr
    lines = run.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[1:5]] == ["ok none f32", "FAIL dies", "FAIL raises", "ok none bf16"]
    assert "the process died" in lines[2]
    assert "ValueError: the last line of an error" in lines[3]
    assert lines[5].startswith("4 checks, 2 failed")
    kept = read(tmp_path / "out.json").figures
    assert [name for name, each in kept.items() if each["faults"]] == ["dies", "raises"]
    assert gpu_check.texts(kept) == {"passed": "2 of 4", "failed": "`dies`, `raises`"}


def test_a_wrong_value_is_a_fault() -> None:
    check = Check("ones", lambda device: lambda: (torch.ones(3),), lambda: (torch.tensor([1.0, 1.0, 1.1]),))
    result = gpu_check.checked(check, "cpu")
    assert result["faults"][0].startswith("error 9.09e+03 of what is allowed")


def test_waits_and_unfused_calls_are_faults() -> None:
    check = Check("any", lambda device: lambda: (), None, memory=1.0)
    seen = Seen(["_a.py:3"], ["math"], [("math", ["flash"])], memory=2.0)
    faults = list(gpu_check._faults_of(check, seen))
    assert [fault.split()[0] for fault in faults] == ["waits", "no", "PyTorch", "2"]


@pytest.mark.parametrize("main", [gpu.BENCHMARK.main, gpu_check.main], ids=["gpu", "gpu_check"])
def test_without_a_gpu_a_command_stops(main: Callable[[list[str]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no GPU: torch.cuda.is_available\(\) is False"):
        main([])
