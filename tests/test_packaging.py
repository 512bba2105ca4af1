"""What the files of a release hold. `.ci/wheels` builds and checks all of them, `nox` tests the installed wheel."""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import clearhead

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "clearhead"
BUILD = "import sys, setuptools.build_meta as backend; getattr(backend, sys.argv[1])(sys.argv[2])"

pytestmark = pytest.mark.skipif(
    int(importlib.metadata.version("setuptools").split(".")[0]) < 77,
    reason="pyproject.toml takes setuptools 77, which pip installs for a build and an environment need not have",
)


def test_the_changelog_and_the_citation_name_the_version() -> None:
    """The newest section of the changelog is that of this version and its date, *Unreleased* while it is developed."""
    changelog, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    heading = next(line.removeprefix("## ") for line in changelog.splitlines() if line.startswith("## "))
    if ".dev" in clearhead.__version__:
        assert heading == "Unreleased"
        return
    cited = yaml.safe_load(citation)
    assert cited["version"] == clearhead.__version__
    assert heading == f"{clearhead.__version__} ({cited['date-released']})"


def names_in(suffixes: tuple[str, ...]) -> set[str]:
    return {str(path.relative_to(ROOT / "src")) for path in SOURCES.rglob("*") if path.suffix in suffixes}


def build(hook: str, directory: Path, **environment: str) -> Path:
    """The file that a hook of the build backend writes, from a copy of the sources."""
    copy, out = directory / "copy", directory / "out"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    out.mkdir()
    command = [sys.executable, "-c", BUILD, hook, str(out)]
    done = subprocess.run(command, cwd=copy, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def test_the_source_distribution_has_the_kernel_and_every_file_of_the_package(tmp_path: Path) -> None:
    with tarfile.open(build("build_sdist", tmp_path)) as archive:
        names = {name.partition("/src/")[2] for name in archive.getnames()}
    assert names_in((".py", ".cpp", ".h", ".html", ".css", ".js", ".toml", ".typed")) <= names


def test_the_pure_wheel_serves_every_platform_and_has_no_kernel(tmp_path: Path) -> None:
    wheel = build("build_wheel", tmp_path, CLEARHEAD_PURE="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names_in((".py", ".html", ".css", ".js", ".toml")) | {"clearhead/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyd", ".dylib", ".cpp", ".h"))]


def test_tests_of_an_installed_wheel_refuse_the_sources_of_the_checkout() -> None:
    environment = os.environ | {"CLEARHEAD_TEST_INSTALLED": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--collect-only", __file__]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"CLEARHEAD_TEST_INSTALLED=1: clearhead was imported from {SOURCES}" in done.stderr


def test_the_package_for_the_hub_of_kernels(tmp_path: Path) -> None:
    """`.ci/hub_kernel` writes one variant, whose module has the functions of flash-attn."""
    subprocess.run([sys.executable, str(ROOT / ".ci" / "hub_kernel"), str(tmp_path)], check=True)
    variant = tmp_path / "build" / "torch-cpu"
    metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
    assert metadata["backend"] == {"type": "cpu"}
    assert "flash" in metadata["name"]
    names = runpy.run_path(str(variant / "__init__.py"))
    assert names["__all__"] == ["flash_attn_func", "flash_attn_varlen_func"]
    assert all(callable(names[name]) for name in names["__all__"])
