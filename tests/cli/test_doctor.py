"""`clearhead doctor` on the command line: text, JSON and the exit code."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

import clearhead
from clearhead.cli import _doctor as doctor
from clearhead.cli import _output as output
from clearhead.cli import main
from tests.cli.test_doctor_checks import ChunkedKernel, break_kernel
from tests.support.native import extension

EVERY_CASE = doctor.CASES
#: How many of the calls below the native kernel computes: both in float32, none in float64, none if it was not built.
NATIVE = 0 if extension is None else 2


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [case for case in EVERY_CASE if case.name in ("causal", "soft-cap + sinks")]
    monkeypatch.setattr(doctor, "CASES", few)
    monkeypatch.setattr(doctor, "TOLERANCES", {torch.float64: 1e-10, torch.float32: 1e-5})


@pytest.fixture
def broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernel(monkeypatch, ChunkedKernel, lambda output: output + 1)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def test_a_healthy_machine_exits_with_0() -> None:
    result = run()
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"all checks passed: {10 + NATIVE} ok, {6 - NATIVE} refused, 0 failed"
    assert f"torch         {torch.__version__}" in result.stdout
    assert result.stderr == ""


@pytest.mark.usefixtures("broken_kernel")
def test_a_broken_kernel_exits_with_1_and_is_named() -> None:
    result = run()
    assert result.exit_code == 1
    assert "chunked, causal, float32: error of the output" in result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"checks failed: {6 + NATIVE} ok, {6 - NATIVE} refused, 4 failed.")


def test_json() -> None:
    result = run("--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["passed"] is True
    assert report["versions"]["clearhead"] == clearhead.__version__
    assert {check["status"] for check in report["checks"]} == {"ok", "refused"}


def test_json_of_a_broken_kernel_holds_everything_even_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernel(monkeypatch, ChunkedKernel, lambda output: output * torch.nan)
    result = run("--json")
    read = json.loads(result.stdout, parse_constant=pytest.fail)
    assert (result.exit_code, read["passed"]) == (1, False)
    assert len(read["checks"]) == len(doctor.examine()["checks"])
    broken = next(check for check in read["checks"] if check["kernel"] == "chunked" and check["dtype"] == "float32")
    assert broken["status"] == "failed"
    assert broken["output"] == {"error": "nan", "limit": 1e-5}


@pytest.mark.usefixtures("broken_kernel")
def test_a_terminal_gets_the_same_findings_untruncated_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CASES", EVERY_CASE)
    monkeypatch.setattr(
        output, "Console", lambda **options: Console(force_terminal=True, color_system=None, width=80, **options)
    )
    result = run()
    assert result.exit_code == 1
    assert "versions" in result.stdout
    assert "…" not in result.stdout
    said = " ".join(result.stdout.split())
    for text in ("reference soft-cap + sinks", "refused", "FAIL", "sdpa refuses soft-cap + sinks"):
        assert text in said
