"""The Triton kernels compiled for devices that are not at hand, in a process without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is installed with PyTorch for CUDA, and with [test] on Linux")


def test_machine_code_spills_nothing_and_multiplies_as_it_should() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu_compile", "--capability", "80", "90", "--dim", "64"]
    command += ["--dtype", "bf16", "fp32", "--mask", "causal"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()[1:]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == 40
    assert all(line.endswith(" ok") for line in lines)
