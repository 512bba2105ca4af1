"""`python -m benchmarks.cpu` without its hours of measuring: naming the work, and showing what was kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import cpu
from benchmarks.comparing import OURS, Result, read, write
from benchmarks.comparing.page import marks

KEPT = Result("decoding", "one row", "ms", {OURS: 2.0, "SDPA": 3.0}, kernel="sdpa")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.cpu", *arguments])
    cpu.main()


def test_the_work_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, "--list", "--only", "FORWARD, fp32, L=512")
    assert capsys.readouterr().out.splitlines() == ["attention forward, fp32, L=512", "causal forward, fp32, L=512"]


def test_a_pattern_that_matches_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="--only 'nothing' matches nothing; --list names the work"):
        run(monkeypatch, "--only", "nothing")


def test_kept_figures_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path / "kept.json", "a machine", [KEPT])
    run(monkeypatch, "--show", str(tmp_path / "kept.json"))
    printed = capsys.readouterr().out
    assert "1.50×" in printed
    assert "a machine" in printed


def test_a_different_result_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = Result("decoding", "one row", "ms", {OURS: 2.0, "SDPA": 3.0}, differences={"SDPA": 0.5}, tolerance=1e-5)
    write(tmp_path / "kept.json", "a machine", [wrong])
    with pytest.raises(SystemExit, match="some results differ"):
        run(monkeypatch, "--show", str(tmp_path / "kept.json"))


def test_the_figures_of_the_last_run_are_readable() -> None:
    machine, results = read([cpu.RESULTS])
    assert f"Measured on: {machine}." in cpu.PAGE.read_text(encoding="utf-8")
    assert all(OURS in result.figures for result in results)


@pytest.mark.parametrize("name", ["cpu", "varlen", "gpu"])
def test_the_page_has_a_place_for_the_figures(name: str) -> None:
    page = cpu.PAGE.read_text(encoding="utf-8")
    begin, end = marks(name)
    assert page.index(begin) < page.index(end)
