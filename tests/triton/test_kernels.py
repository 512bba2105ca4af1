"""The Triton kernels in processes of their own: in the interpreter, and compiled for devices that are not at hand."""

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

from benchmarks.gpu.kernel_checks import wrong_numbers
from tests.triton.interpreted import CASES, THOROUGH


def output_of(*arguments: str, **environment: str) -> str:
    """What a Python module prints, in a process with another environment."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command, root = [sys.executable, "-m", *arguments], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What the interpreter computed."""
    return json.loads(output_of("tests.triton.interpreted", TRITON_INTERPRET="1"))


@pytest.mark.parametrize(("name", "dtype", "dim"), CASES)
def test_statistics_are_those_of_float64(interpreted: dict[str, Any], name: str, dtype: str, dim: int) -> None:
    errors = interpreted["errors"][f"{name}, {dtype}, D={dim}"]
    assert len(errors) == (27 if (name, dtype, dim) == THOROUGH else 19)
    assert wrong_numbers(errors) == {}


def test_nan_stays_in_its_own_line_of_a_map(interpreted: dict[str, Any]) -> None:
    mass, largest = interpreted["maps with NaN"]["mass"], interpreted["maps with NaN"]["max"]
    assert mass[0] == pytest.approx(40)
    assert largest[0] == pytest.approx(1 / 40)
    assert math.isnan(mass[1])
    assert math.isnan(largest[1])


def test_machine_code_spills_nothing_and_multiplies_as_it_should() -> None:
    options = ["--capability", "80", "90", "--dim", "64", "--dtype", "bf16", "fp32", "--mask", "causal"]
    lines = output_of("benchmarks.gpu.compile", *options).splitlines()[1:]
    assert len(lines) == 40
    assert all(line.endswith(" ok") for line in lines)
