"""Calls on a CUDA device, without one: `tests/gpu/pretended` runs in processes whose PyTorch has a pretended device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.pretended_cuda.build import compiler

_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="the pretended device is built for Linux")
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA registers its own hooks")
@pytest.mark.skipif(compiler() is None, reason="the pretended device needs a C++ compiler")
@pytest.mark.parametrize("capability", ["8", "9"])
def test_on_a_pretended_device(capability: str) -> None:
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-p", "tests.support.pretended_cuda.plugin"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu/pretended"]
    environment = {**os.environ, "PRETENDED_CAPABILITY": capability}
    environment.pop("PYTEST_XDIST_WORKER", None)
    run = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
