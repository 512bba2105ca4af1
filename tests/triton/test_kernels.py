"""The Triton kernels against float64: in Triton's interpreter, which runs in a process of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is installed with PyTorch for CUDA, and with [test] on Linux")

from benchmarks.kernel_checks import wrong_numbers
from tests.triton.interpreted import CASES, THOROUGH


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the interpreter computed."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.triton.interpreted"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "dtype", "dim"), CASES)
def test_statistics_are_those_of_float64(found: dict[str, Any], name: str, dtype: str, dim: int) -> None:
    errors = found["errors"][f"{name}, {dtype}, D={dim}"]
    assert len(errors) == (27 if (name, dtype, dim) == THOROUGH else 20)
    assert wrong_numbers(errors) == {}


def test_nan_stays_in_its_own_line_of_a_map(found: dict[str, Any]) -> None:
    mass, largest = found["maps with NaN"]["mass"], found["maps with NaN"]["max"]
    assert mass[0] == pytest.approx(40)
    assert largest[0] == pytest.approx(1 / 40)
    assert math.isnan(mass[1])
    assert math.isnan(largest[1])
