"""The kernel without Python against a loop in float64: here, and for aarch64 under an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from benchmarks.quality.native_aarch64 import COMPILER, EMULATOR, build, run

ROOT = Path(__file__).parents[2]


def require(*names: str) -> None:
    for name in names:
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name}")


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_driver_finds_the_kernel_of_this_machine_right(tmp_path: Path) -> None:
    """Not optimized, which compiles in a third of the time: which code is made for this machine is not the question."""
    require("g++")
    assert "all errors are at most 1e-05" in output_of(run(str(build("g++", tmp_path, level="-O0"))))


@pytest.mark.slow
def test_under_an_emulator_neon_is_right(tmp_path: Path) -> None:
    require(COMPILER, EMULATOR)
    printed = output_of(run(EMULATOR, str(build(COMPILER, tmp_path, "-static"))))
    assert printed.count("== ") == 2
    assert "== neon" in printed
    assert "all errors are at most 1e-05" in printed


@pytest.mark.slow
def test_setup_builds_a_library_for_aarch64(tmp_path: Path) -> None:
    """The sources and flags of `setup.py`; Python's own headers are the same on both machines."""
    require(COMPILER, "readelf")
    c_compiler = COMPILER.replace("g++", "gcc")
    environment = os.environ | {"CC": c_compiler, "CXX": COMPILER, "LDSHARED": f"{COMPILER} -shared"}
    environment |= {"LDCXXSHARED": f"{COMPILER} -shared"}
    options = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "objects")]
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force", *options]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "no OpenMP" not in built.stderr
    (library,) = tmp_path.glob("lib/clearhead/_native/_attention*" + sysconfig.get_config_var("SHLIB_SUFFIX"))
    assert "AArch64" in output_of(run("readelf", "-h", str(library)))
