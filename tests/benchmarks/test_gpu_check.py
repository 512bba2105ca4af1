"""`benchmarks.gpu --check`: a check that fails, or whose process dies, is one line, and the others run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.figures import read
from benchmarks.gpu_check_cases import Check
from benchmarks.gpu_probe import Seen
from benchmarks.peers.work import Way

ROOT = Path(__file__).parents[2]
OTHERS = """
import os, sys
from benchmarks import gpu_check
from benchmarks.figures import read
from benchmarks.gpu_check_cases import Check
known = {check.name: check for check in gpu_check.all_checks()}
def dies(device): os.abort()
def raises(device): raise ValueError("first\\nthe last line of an error")
cases = [known["none f32"], Check("dies", dies, None), Check("raises", raises, None), known["none bf16"]]
gpu_check.all_checks = lambda: cases
gpu_check.START = [sys.executable, __file__]
gpu_check.main()
"""


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
    def ours(device: str) -> Way:
        return lambda: (torch.ones(3),)

    found = gpu_check.checked(Check("ones", ours, lambda: (torch.tensor([1.0, 1.0, 1.1]),)), "cpu")
    assert found["faults"][0].startswith("error 9.09e+03 of what is allowed")


def test_waits_and_unfused_calls_are_faults() -> None:
    check = Check("any", lambda device: lambda: (), None, memory=1.0)
    seen = Seen(["_a.py:3"], ["math"], [("math", ["flash"])], memory=2.0)
    faults = list(gpu_check._faults_of(check, seen))
    assert [fault.split()[0] for fault in faults] == ["waits", "no", "PyTorch", "2"]


def test_without_a_gpu_the_check_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no GPU: torch.cuda.is_available\(\) is False"):
        gpu_check.main([])
