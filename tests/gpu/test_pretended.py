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
ALL = ("",)
#: Where PyTorch's choice of a kernel matters: it takes cuDNN on 9.0 only. Others use kernels that both have.
WITHOUT_CUDNN = ("test_caches.py", "test_explain.py", "test_masks.py", "test_modules.py", "test_settings.py")


@pytest.mark.skipif(sys.platform != "linux", reason="the pretended device is built for Linux")
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA registers its own hooks")
@pytest.mark.skipif(compiler() is None, reason="the pretended device needs a C++ compiler")
@pytest.mark.parametrize(("capability", "files"), [("9", ALL), ("8", WITHOUT_CUDNN)], ids=["9", "8"])
def test_on_a_pretended_device(capability: str, files: tuple[str, ...]) -> None:
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-p", "tests.support.pretended_cuda.plugin"]
    paths = [f"tests/gpu/pretended/{name}" for name in files]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    environment = {**os.environ, "PRETENDED_CAPABILITY": capability}
    environment.pop("PYTEST_XDIST_WORKER", None)
    run = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
