"""Every header of the native kernel compiles by itself."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import clearhead._native

FOLDER = Path(clearhead._native.__file__).parent
HEADERS = sorted(path.name for path in FOLDER.glob("*.h"))
#: Those that name AVX-512's functions.
OF_PAIRS = ("pairs.h", "pair_layouts.h", "forward_pairs.h", "backward_pairs.h")
FEATURES = ["avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512bf16", "avx2", "fma", "f16c"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")]


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_by_itself(header: str) -> None:
    flags: list[str] = []
    if header in OF_PAIRS:
        if platform.machine() != "x86_64":
            pytest.skip("it is for x86-64 only")
        flags = [f"-m{feature}" for feature in FEATURES]
    command = ["g++", "-std=gnu++17", "-fsyntax-only", "-w", "-x", "c++", f"-I{sysconfig.get_paths()['include']}"]
    done = subprocess.run([*command, *flags, str(FOLDER / header)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
