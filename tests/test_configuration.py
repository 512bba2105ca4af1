"""Every file, folder and module that a configuration, a script or a command of a guide names exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    *("noxfile.py", "pyproject.toml", "setup.py", "MANIFEST.in", "constraints.txt", ".pre-commit-config.yaml"),
    *(
        "CONTRIBUTING.md",
        "docs/extending.md",
        "README.md",
        "README.zh.md",
        "SECURITY.md",
        "benchmarks/quality/mutants.py",
    ),
    *sorted(str(path.relative_to(ROOT)) for folder in (".ci", ".github") for path in (ROOT / folder).rglob("*.*")),
    *(".ci/run", ".ci/coverage", ".ci/interface", ".ci/site", ".ci/sysroot", ".ci/wheels"),
]
FOLDERS = "tests|src|docs|benchmarks|examples|\\.ci|\\.github"
PATH = re.compile(rf"(?<![\w/.*-])(?:{FOLDERS})/[\w./*-]*[\w*/]")
MODULE = re.compile(r"-m ((?:benchmarks|docs|tests|clearhead)(?:\.\w+)*)")
#: What the steps of docs/extending.md tell a reader to make.
TO_BE_MADE = {"docs/images/masks/every.svg"}


def is_there(path: str) -> bool:
    """Whether it exists, or begins the names of files, or is a pattern that some match."""
    return (ROOT / path).exists() or any(ROOT.glob(path if "*" in path else f"{path}*"))


@pytest.mark.parametrize("name", sorted(set(FILES)))
def test_what_a_configuration_names_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert [path for path in sorted({*PATH.findall(text)} - TO_BE_MADE) if not is_there(path)] == []
    assert [module for module in sorted({*MODULE.findall(text)}) if importlib.util.find_spec(module) is None] == []
