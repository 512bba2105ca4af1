"""The table of tested versions: how `.ci/versions.py` counts a run and writes its row."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
JUNIT = '<testsuites><testsuite tests="11" failures="2" errors="1" skipped="3"/></testsuites>'


@pytest.fixture(name="script")
def _script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci" / "versions.py"))


def test_counts_of_a_run(script: dict[str, Any]) -> None:
    assert script["counts"](JUNIT) == (5, 3, 3)


def test_a_second_run_replaces_its_row_and_leaves_the_others(script: dict[str, Any]) -> None:
    page = "text\n<!-- versions -->\n| a | b | c | d | e |\n|---|---|---|---|---|\n<!-- /versions -->\nend\n"
    for row in ("3.12 2.14 newest all 7", "3.11 2.13 pinned all 5", "3.12 2.14 newest all 8"):
        page = script["with_row"](page, row.split())
    assert page == (
        "text\n<!-- versions -->\n| a | b | c | d | e |\n|---|---|---|---|---|\n"
        "| 3.11 | 2.13 | pinned | all | 5 |\n| 3.12 | 2.14 | newest | all | 8 |\n<!-- /versions -->\nend\n"
    )
