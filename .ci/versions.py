"""Writes the row of this environment into docs/versions.md, from the JUnit file of its tests.

    python .ci/versions.py JUNIT PACKAGES SUITE       e.g. junit.xml newest smoke

Exits with 1 if a test failed. `nox` runs it at the end of each session.
"""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).parents[1] / "docs" / "versions.md"
KEYS = 3  # cells of a row that name its environment; its next run replaces the row, whichever tests ran
START, END = "<!-- versions -->", "<!-- /versions -->"


def counts(junit: str) -> tuple[int, int, int]:
    """How many tests passed, failed and were skipped."""
    suites = [*ElementTree.fromstring(junit).iter("testsuite")]
    ran, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    return ran - failed - errors - skipped, failed + errors, skipped


def with_row(page: str, row: list[str]) -> str:
    """The page with this row between its markers, in order, in place of one with the same keys."""
    before, _, rest = page.partition(START)
    table, _, after = rest.partition(END)
    lines = table.strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    rows = sorted([*(other for other in rows if other[:KEYS] != row[:KEYS]), row])
    written = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([before + START, *lines[:2], *written, END]) + after


def _commit() -> str:
    """The commit that was tested, with ``-dirty`` if the checkout differs from it in more than the page."""
    changed, short = ("status", "--porcelain", "--untracked-files=no"), ("rev-parse", "--short", "HEAD")
    outputs = [
        subprocess.run(["git", *command], capture_output=True, text=True, check=True).stdout.strip()
        for command in ((*changed, "--", ".", f":(exclude){PAGE.relative_to(PAGE.parents[1])}"), short)
    ]
    return outputs[1] + ("-dirty" if outputs[0] else "")


def main(junit: str, packages: str, suite: str) -> int:
    """Write the row and say it."""
    passed, failed, skipped = counts(Path(junit).read_text(encoding="utf-8"))
    torch, transformers, numpy = (metadata.version(name) for name in ("torch", "transformers", "numpy"))
    commit = _commit()
    row = [platform.python_version(), torch.partition("+")[0], packages, suite, transformers, numpy]
    row += [str(passed), str(failed), str(skipped), commit, datetime.datetime.now(datetime.UTC).date().isoformat()]
    PAGE.write_text(with_row(PAGE.read_text(encoding="utf-8"), row), encoding="utf-8")
    print(" | ".join(row))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
