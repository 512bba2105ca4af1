"""Workflows pin actions, ask for few permissions and call scripts that exist. `pre-commit` lints as `.ci/run` does."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
assert WORKFLOWS
#: Jobs with more than the right to read: they publish by the identity of the workflow, without a stored secret.
WRITERS = {
    "wheels": {"publish": {"id-token": "write"}},
    "docs": {"deploy": {"pages": "write", "id-token": "write"}},
}


def jobs(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_permissions_are_few_and_scripts_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for line in text.splitlines():
        if "uses:" in line:
            assert re.fullmatch(r"\s+- uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    writers = {name: job["permissions"] for name, job in jobs(path).items() if "permissions" in job}
    assert writers == WRITERS.get(path.stem, {})
    named = set(re.findall(r"(?<![\w/])\.ci/\w+(?:\.\w+)?", text))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_matrix_is_that_of_nox() -> None:
    module = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.targets[0]): node.value for node in module.body if isinstance(node, ast.Assign)}
    matrix = jobs(ROOT / ".github" / "workflows" / "tests.yml")["versions"]["strategy"]["matrix"]
    assert matrix["python"] == [*ast.literal_eval(assigned["PYTHONS"])]
    assert matrix["torch"] == [*ast.literal_eval(assigned["TORCHES"])]


def test_pre_commit_runs_what_ci_lints() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    before, _, _ = (ROOT / ".ci" / "run").read_text(encoding="utf-8").partition('step "pytest"')
    _, _, linting = before.partition('step "ruff format"')
    commands = [line.replace('"$checkout/.ci/interface"', ".ci/interface") for line in linting.splitlines()[1:]]
    linters = [line.partition(" >")[0] for line in commands if line and not line.startswith(("step ", "wait "))]
    entries = [hook["entry"].removesuffix(" --fix") for hook in hooks]
    assert entries == [line.removesuffix(" .").removesuffix(" --check") for line in linters]


# The table of tested versions: how `.ci/versions.py` counts a run and writes its row.


JUNIT = '<testsuites><testsuite tests="11" failures="2" errors="1" skipped="3"/></testsuites>'


@pytest.fixture(name="script")
def _script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci" / "versions.py"))


def test_counts_of_a_run(script: dict[str, Any]) -> None:
    assert script["counts"](JUNIT) == (5, 3, 3)


def test_a_second_run_replaces_its_row_and_leaves_the_others(script: dict[str, Any]) -> None:
    page = "text\n<!-- versions -->\n| a | b | c | d | e |\n|---|---|---|---|---|\n<!-- /versions -->\nend\n"
    for row in (
        "3.12 2.14 newest smoke 6",
        "3.12 2.14 newest all 7",
        "3.11 2.13 pinned all 5",
        "3.12 2.14 newest all 8",
    ):
        page = script["with_row"](page, row.split())
    assert page == (
        "text\n<!-- versions -->\n| a | b | c | d | e |\n|---|---|---|---|---|\n"
        "| 3.11 | 2.13 | pinned | all | 5 |\n| 3.12 | 2.14 | newest | all | 8 |\n<!-- /versions -->\nend\n"
    )
