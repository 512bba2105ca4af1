"""Run the native kernel's tests with its code under the address and undefined-behaviour sanitizers.

    python -m benchmarks.quality.native_sanitizers [PYTEST ARGUMENTS]

builds the extension once more, instrumented, beside a copy of the package in a temporary folder, and runs the tests
named below against that copy. Takes minutes; needs g++ with libasan and libubsan, on Linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=gnu++17", "-O1", "-g", "-fopenmp", "-fPIC", "-shared", "-fno-omit-frame-pointer"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TESTS = [
    "tests/native",
    "tests/masks/test_coverage.py",
    "tests/kernels/test_against_oracle.py",
    "tests/kernels/test_native_blocks.py",
    "tests/kernels/test_saved_tensors.py",
    "tests/kernels/test_saved_tensors_refused.py",
    "tests/statistics/test_native.py",
]
SKIPPED = "forked or threads"  # the sanitizers do not follow a fork, and cannot see OpenMP's own synchronisation


def build(package: Path) -> None:
    """Compile the instrumented extension into a copy of the package."""
    folder = package / "_native"
    for old in folder.glob("_attention*.so"):
        old.unlink()
    sources = sorted(str(path) for path in folder.glob("*.cpp"))
    include = sysconfig.get_paths()["include"]
    target = str(folder / "_attention.abi3.so")
    subprocess.run(["g++", *FLAGS, *SANITIZERS, f"-I{include}", *sources, "-o", target], check=True)


def library(name: str) -> str:
    """Path of one of gcc's run-time libraries, which has to be loaded before Python itself."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return str(Path(found.stdout.strip()).resolve())


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "clearhead"
        shutil.copytree(ROOT / "src" / "clearhead", package, ignore=shutil.ignore_patterns("__pycache__"))
        build(package)
        environment = {
            **os.environ,
            "PYTHONPATH": folder,
            "LD_PRELOAD": f"{library('libasan.so')} {library('libubsan.so')}",
            "ASAN_OPTIONS": "detect_leaks=0",  # Python frees much only when it exits
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "1",
        }
        tests = [*TESTS, "-q", "-n", "0", "-p", "no:cacheprovider", "-k", f"not ({SKIPPED})", *arguments]
        return subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
