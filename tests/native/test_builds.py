"""The package as `setup.py` builds it elsewhere: without OpenMP, without a compiler; and every header by itself."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.native import extension

ROOT = Path(__file__).parents[2]
PRINT_BUILD = """
import torch, clearhead, clearhead._native as n
x = torch.randn(2, 3, 5, 7)
print(n.__file__, n.instruction_set(), n.why_missing, clearhead.explain(x, x, x).kernel, sep="|")
assert clearhead.attention(x, x, x).isfinite().all()
"""
PRINT_KERNELS = """
import torch, clearhead
for threads in (1, 2):
    torch.set_num_threads(threads)
    for length in (128, 5):
        x = torch.randn(1, 4, length, 16)
        print(clearhead.explain(x, x, x).kernel)
        with clearhead.use_kernel("native"):
            assert clearhead.attention(x, x, x).isfinite().all()
"""
FOLDER = ROOT / "src/clearhead/_native"
HEADERS = sorted(path.name for path in FOLDER.glob("*.h"))
#: Those that name AVX-512's functions.
OF_PAIRS = ("pairs.h", "pair_layouts.h", "units.h", "forward_pairs.h", "backward_pairs.h")
FEATURES = ["avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512bf16", "avx2", "fma", "f16c"]
#: Everything that runs in several threads where there is OpenMP, and both passes of every kind of call.
TESTS = ("test_native_blocks.py",)

WITHOUT_OPENMP = """#!/bin/sh
for argument; do [ "$argument" = -fopenmp ] && { echo "no OpenMP" >&2; exit 1; }; done
exec c++ "$@"
"""


OF_THIS_SETUPTOOLS = pytest.mark.skipif(
    int(importlib.metadata.version("setuptools").split(".")[0]) < 77,
    reason="pyproject.toml takes setuptools 77, which pip installs for a build and an environment need not have",
)


def build(directory: Path, compiler: str) -> Path:
    """Build the extension inside a copy of the sources, which is returned, with a compiler of these contents."""
    skipped = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", directory / "src", ignore=skipped)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    script = directory / "compiler"
    script.write_text(compiler)
    script.chmod(0o755)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = os.environ | {"CC": str(script), "CXX": str(script)}
    built = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "no OpenMP here, the native kernel is built for one thread" in built.stderr
    return directory / "src"


def run(source: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler to build with")
def test_without_openmp_it_computes_the_same(tmp_path: Path) -> None:
    source = build(tmp_path, WITHOUT_OPENMP)
    (library,) = (source / "clearhead" / "_native").glob("_attention*.so")
    assert b"GOMP_parallel" not in library.read_bytes()
    file, instructions, why_missing, _ = run(source, "-c", PRINT_BUILD).split("|")
    assert Path(file).is_relative_to(source)
    assert instructions != "None"
    assert why_missing == ""
    assert run(source, "-c", PRINT_KERNELS).split() == ["native", "native", "sdpa", "native"]
    tests = [str(ROOT / "tests" / "kernels" / name) for name in TESTS]
    assert " passed" in run(source, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *tests)


@OF_THIS_SETUPTOOLS
def test_without_a_compiler_the_package_works(tmp_path: Path) -> None:
    source = build(tmp_path, "#!/bin/sh\nexit 1\n")
    file, instructions, why_missing, kernel = run(source, "-c", PRINT_BUILD).split("|")
    assert Path(file).is_relative_to(source)
    assert (instructions, kernel) == ("None", "sdpa")
    assert why_missing.startswith("it was not built when Clearhead was installed")


@pytest.mark.skipif(extension is None, reason="the native kernel is not built")
def test_loading_runs_no_code_of_an_instruction_set() -> None:
    """Initializers of tables run when the module is loaded, on processors that may not have the instruction set."""
    symbols = Path(str(cast(Any, extension).__file__)).read_bytes()
    if b"_GLOBAL__sub_I_instruction_sets" not in symbols:
        pytest.skip("the symbols were stripped")
    assert b"_GLOBAL__sub_I_isa" not in symbols


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
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
