"""`python -m benchmarks.architectures` without its loop: naming, showing, and processes that fail."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks import architectures
from benchmarks.architectures_cases.report import filled, markdown
from benchmarks.architectures_cases.results import Finding, Outcome, Run, read, write
from benchmarks.architectures_cases.running import run_all
from benchmarks.architectures_cases.summary import figures, read_summary, summarize, write_summary
from benchmarks.architectures_cases.types import Architecture

LLAMA = Architecture("llama", "llama", "LlamaModel")
AGREES = Outcome("llama", "LlamaModel", calls={"from_config": 3}, compared=5, largest=1e-6)
NOT_BUILT = Outcome("dinat", "DinatModel", not_built="ImportError: DinatModel requires the natten library")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.architectures", *arguments])
    architectures.main()


def leave(connection: Connection) -> None:
    connection.recv()
    os._exit(3)


def wait_for_ever(connection: Connection) -> None:
    connection.recv()
    connection.recv()


def test_architectures_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "--list", "--only", "llama", "bert (decoder)")
    assert capsys.readouterr().out.splitlines() == ["bert (decoder): BertLMHeadModel", "llama: LlamaModel"]


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="--only lama: no such model type; --list names them"):
        run(monkeypatch, "--only", "lama")


def test_kept_outcomes_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write(tmp_path / "kept.json", Run("some versions", [NOT_BUILT, AGREES]))
    run(monkeypatch, "--show", str(tmp_path / "kept.json"))
    assert capsys.readouterr().out.splitlines()[-2:] == ["   1 agrees", "   1 not built"]


def test_the_whole_loop_is_kept_and_a_part_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    monkeypatch.setattr(architectures, "run_all", lambda *_: iter([AGREES]))
    monkeypatch.setattr(architectures, "chosen_architectures", lambda _: [LLAMA])
    monkeypatch.setattr(architectures, "OUTCOMES", whole)
    run(monkeypatch, "--only", "llama")
    assert not whole.exists()
    run(monkeypatch, "--only", "llama", "--json", str(part))
    assert read(part).outcomes == [AGREES]
    run(monkeypatch)
    assert read(whole).outcomes == [AGREES]


@pytest.mark.parametrize("kind", ["differences", "missing", "violations", "errors"])
def test_what_must_not_be_makes_the_command_fail(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = Finding("from_config", "outputs", value=0.5, text="last_hidden_state", sdpa=1e-6)
    write(tmp_path / "kept.json", Run("some versions", [Outcome("llama", "LlamaModel", **{kind: [found]})]))
    with pytest.raises(SystemExit, match="some architectures differ from eager attention"):
        run(monkeypatch, "--show", str(tmp_path / "kept.json"))


@pytest.mark.parametrize(
    ("sdpa", "double", "explained"),
    [(0.5, None, True), (1e-3, 0.5, False), (None, 0.5, True), (None, float("inf"), False), (None, None, False)],
)
def test_sdpa_explains_a_difference_and_float64_where_there_is_none(
    sdpa: float | None, double: float | None, explained: bool
) -> None:
    assert Finding("from_config", "outputs", value=0.5, sdpa=sdpa, double=double).explained == explained


def test_outcomes_survive_the_file(tmp_path: Path) -> None:
    outcome = Outcome(
        "llama", "LlamaModel", refused={"from_config": "KeyError: 'clearhead'"}, known=[Finding("a", "b")]
    )
    run = Run("some versions", [outcome], "2026-01-02", "a machine")
    write(tmp_path / "kept.json", run)
    assert read(tmp_path / "kept.json") == run


def test_the_page_names_totals_and_reasons() -> None:
    refused = Outcome("sam", "SamModel", refused={"from_config": "KeyError: 'clearhead'"}, compared=5)
    page = markdown(summarize(Run("some versions", [AGREES, NOT_BUILT, refused])))
    assert "| agrees | 1 | 0 |" in page
    assert "* `sam`: `from_config`: KeyError: 'clearhead'" in page
    assert "* ImportError: DinatModel requires the natten library: `dinat`" in page


def test_the_pages_agree_with_the_summary() -> None:
    summary = read_summary(architectures.SUMMARY)
    page = architectures.PAGE.read_text(encoding="utf-8")
    assert "<!-- architectures.agrees -->" in page
    assert filled(page, summary) == page
    assert architectures.TABLE.read_text(encoding="utf-8") == markdown(summary)


def test_the_summary_lists_as_many_model_types_as_it_counts() -> None:
    summary = read_summary(architectures.SUMMARY)
    lists = {status: summary[status] for status in ("agrees", "keeps eager", "refused")}
    lists["not built"] = [name for names in summary["not built"].values() for name in names]
    assert {status: len(names) for status, names in lists.items()} == {
        status: sum(counts) for status, counts in summary["counts"].items()
    }
    found = {name.removeprefix("architectures."): text for name, text in figures(summary).items()}
    assert int(found["compared"]) == sum(int(found[status]) for status in ("agrees", "keeps-eager", "refused"))
    assert int(found["all"]) == int(found["compared"]) + int(found["not-built"])


def test_a_figure_that_the_summary_does_not_have_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the page has a figure architectures\.agree; known are architectures\.agrees"
    ):
        filled("<!-- architectures.agree -->3<!-- /architectures.agree -->", read_summary(architectures.SUMMARY))


def test_docs_writes_the_summary_the_table_and_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "kept.json", Run("some versions", [AGREES, NOT_BUILT]))
    page = tmp_path / "page.md"
    page.write_text("<!-- architectures.all -->7<!-- /architectures.all --> types")
    for name, path in (("SUMMARY", "summary.json"), ("TABLE", "table.md"), ("PAGE", "page.md")):
        monkeypatch.setattr(architectures, name, tmp_path / path)
    run(monkeypatch, "--show", str(tmp_path / "kept.json"), "--docs")
    assert page.read_text() == "<!-- architectures.all -->2<!-- /architectures.all --> types"
    summary = read_summary(tmp_path / "summary.json")
    assert summary == summarize(read(tmp_path / "kept.json"))
    assert (tmp_path / "table.md").read_text() == markdown(summary)


def test_gradients_further_from_float64_than_sdpas_are_listed(tmp_path: Path) -> None:
    errors = {"near": (1e-6, 1e-7), "as sdpa": (4e-5, 3e-5), "far": (1.3e-4, 2.9e-5)}
    outcomes = [
        Outcome(name, "Model", calls={"from_config": 1}, gradient_errors={"clearhead": own, "sdpa": sdpa})
        for name, (own, sdpa) in errors.items()
    ]
    summary = summarize(Run("some versions", outcomes))
    assert summary["gradients"] == {"compared": 3, "median ratio": 1.3e-4 / 2.9e-5, "worse": {"far": [1.3e-4, 2.9e-5]}}
    assert "* `far`: 1.3e-04, SDPA 2.9e-05" in markdown(summary)
    write_summary(tmp_path / "summary.json", summary)
    assert read_summary(tmp_path / "summary.json") == summary


def test_a_process_that_ends_is_an_outcome() -> None:
    (outcome,) = run_all([LLAMA], jobs=1, seconds=60, work=leave)
    assert [found.text for found in outcome.errors] == ["the process ended with exit code 3"]


def test_a_process_without_a_result_is_stopped_and_the_next_architecture_goes_on() -> None:
    outcomes = list(run_all([LLAMA, LLAMA], jobs=1, seconds=0.5, work=wait_for_ever))
    assert [outcome.errors[0].text for outcome in outcomes] == ["no result after 0 s"] * 2
    assert all(outcome.status == "differs" for outcome in outcomes)
