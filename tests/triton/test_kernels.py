"""The Triton kernels against float64: in Triton's interpreter, which runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernel_checks import wrong_numbers
from tests.triton.interpreted import CASES

pytest.importorskip("triton", reason="Triton is installed with PyTorch for CUDA, and with [test] on Linux")


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    """The errors of every case."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.triton.interpreted"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "dtype", "dim"), CASES)
def test_statistics_are_those_of_float64(errors: dict[str, dict[str, float]], name: str, dtype: str, dim: int) -> None:
    found = errors[f"{name}, {dtype}, D={dim}"]
    assert len(found) == 17
    assert wrong_numbers(found) == {}
