"""`python -m benchmarks.quality.architectures` without its loop: naming, showing, and processes that fail."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import clearhead.integrations.transformers  # noqa: F401  (registers the implementation)
from benchmarks import figures
from benchmarks.figures import read as read_kept
from benchmarks.quality import architectures
from benchmarks.quality.architectures_cases.building import build
from benchmarks.quality.architectures_cases.inputs import find_inputs
from benchmarks.quality.architectures_cases.mechanisms import effects
from benchmarks.quality.architectures_cases.redrawing import redrawn
from benchmarks.quality.architectures_cases.reference import Reference
from benchmarks.quality.architectures_cases.results import AS_EXACT, ON, Finding, Outcome, Run, read, write
from benchmarks.quality.architectures_cases.running import run_all
from benchmarks.quality.architectures_cases.source import calls_attention_function
from benchmarks.quality.architectures_cases.summary import summarize
from benchmarks.quality.architectures_cases.types import Architecture
from docs.site.models import types

LLAMA = Architecture("llama", "llama", "LlamaModel")
AGREES = Outcome("llama", "LlamaModel", calls={"from_config": 3}, compared=5, largest=1e-6)
KEEP_EAGER = [
    Outcome("falcon", "FalconModel", left={"": "FalconModel computes attention with code of its own"}, compared=5),
    Outcome("cvt", "CvtModel", not_built="IndexError: list index out of range", without_interface=True),
]
NOT_BUILT = Outcome("dinat", "DinatModel", not_built="ImportError: DinatModel requires the natten library")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.quality.architectures", *arguments])
    architectures.main()


def reference_of(architecture: Architecture) -> Reference:
    model = build(architecture)
    return Reference(architecture, model, find_inputs(model), "clearhead")


def leave(connection: Connection) -> None:
    connection.recv()
    os._exit(3)


def wait_for_ever(connection: Connection) -> None:
    connection.recv()
    connection.recv()


def test_architectures_are_named_and_kept_outcomes_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(monkeypatch, "--list", "--only", "llama", "bert (decoder)")
    assert capsys.readouterr().out.splitlines() == ["bert (decoder): BertLMHeadModel", "llama: LlamaModel"]
    with pytest.raises(SystemExit, match="--only lama: no such model type; --list names them"):
        run(monkeypatch, "--only", "lama")
    write(tmp_path / "kept.json", Run("some versions", [NOT_BUILT, AGREES]))
    run(monkeypatch, "--show", str(tmp_path / "kept.json"))
    assert capsys.readouterr().out.splitlines()[-2:] == ["   1 agrees", "   1 not built"]


def test_the_whole_loop_is_kept_and_a_part_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    complete, part = tmp_path / "whole.json", tmp_path / "part.json"
    monkeypatch.setattr(architectures, "run_all", lambda *_: iter([AGREES]))
    monkeypatch.setattr(architectures, "chosen_architectures", lambda _: [LLAMA])
    monkeypatch.setattr(architectures, "OUTCOMES", complete)
    run(monkeypatch, "--only", "llama")
    assert not complete.exists()
    run(monkeypatch, "--only", "llama", "--json", str(part))
    assert read(part).outcomes == [AGREES]
    run(monkeypatch)
    assert read(complete).outcomes == [AGREES]


@pytest.mark.parametrize("kind", ["differences", "missing", "violations", "errors"])
def test_what_must_not_be_makes_the_command_fail(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding = Finding("from_config", "outputs", value=0.5, text="last_hidden_state", sdpa=1e-6)
    write(tmp_path / "kept.json", Run("some versions", [Outcome("llama", "LlamaModel", **{kind: [finding]})]))
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


def test_a_difference_is_rounding_where_other_parameters_give_errors_like_those_of_eager_attention() -> None:
    rounding = Finding("from_config", "outputs", value=1e-4, text="last_hidden_state", sdpa=1e-6)
    [drawn, large] = redrawn([rounding, replace(rounding, value=0.5)], reference_of(LLAMA))
    assert drawn.explained, drawn.redrawn
    assert not replace(drawn, redrawn=AS_EXACT + 0.1).explained
    assert large.redrawn is None


def test_the_weights_of_a_call_differ_with_its_outputs_where_sdpa_has_none() -> None:
    weights = Finding("from_config", "weights", value=0.5, text="attentions[2]")
    outputs = Finding("from_config", "weights", value=0.5, text="last_hidden_state", sdpa=0.5)
    assert not Outcome("llama", "LlamaModel", differences=[weights, outputs]).unexplained
    assert Outcome("llama", "LlamaModel", differences=[weights, replace(outputs, sdpa=0.1)]).unexplained
    elsewhere = replace(outputs, observation="outputs")
    assert Outcome("llama", "LlamaModel", differences=[weights, elsewhere]).unexplained == [weights]


def test_outcomes_survive_the_file(tmp_path: Path) -> None:
    outcome = Outcome(
        "llama", "LlamaModel", refused={"from_config": "KeyError: 'clearhead'"}, known=[Finding("a", "b")]
    )
    run = Run("some versions", [outcome], "2026-01-02", "a machine")
    write(tmp_path / "kept.json", run)
    assert read(tmp_path / "kept.json") == run


def test_the_table_of_models_names_results_and_reasons() -> None:
    refused = Outcome("sam", "SamModel", refused={"from_config": "KeyError: 'clearhead'"}, compared=5)
    on = Outcome("gpt_oss", "GptOssModel", calls={"from_config": 1}, mechanisms={"sinks: sinks": 0.5, "window: a": 0.3})
    found = sorted(types(summarize(Run("some versions", [AGREES, NOT_BUILT, refused, on, *KEEP_EAGER]))))
    assert found == [
        ("cvt", "keeps eager", "not built; no class in its source calls the attention function of transformers"),
        ("dinat", "not built", "ImportError: DinatModel requires the natten library"),
        ("falcon", "keeps eager", "computes attention with code of its own"),
        ("gpt_oss", "agrees", "with sinks, window"),
        ("llama", "agrees", ""),
        ("sam", "refused", "`from_config`: KeyError: 'clearhead'"),
    ]


def test_the_summary_lists_as_many_model_types_as_it_counts() -> None:
    summary = read_kept(architectures.SUMMARY).figures
    lists = {status: summary[status] for status in ("agrees", "refused", "differs") if summary[status]}
    for status in ("keeps eager", "not built"):
        lists[status] = [name for names in summary[status].values() for name in names]
    assert {status: len(names) for status, names in lists.items()} == {
        status: sum(counts) for status, counts in summary["counts"].items()
    }
    texts = architectures.texts(summary)
    assert int(texts["compared"]) == sum(
        int(texts[status]) for status in ("agrees", "keeps-eager", "refused", "differs")
    )
    assert int(texts["all"]) == int(texts["compared"]) + int(texts["not-built"])


def test_docs_writes_the_summary_and_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "kept.json", Run("some versions", [AGREES, NOT_BUILT]))
    page = tmp_path / "page.md"
    page.write_text("of <!-- architectures.all -->7<!-- /architectures.all --> types")
    monkeypatch.setattr(architectures, "ROOT", tmp_path)
    monkeypatch.setattr(architectures, "SUMMARY", tmp_path / "results" / "architectures.json")
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures, "pages", lambda: [page])
    run(monkeypatch, "--show", str(tmp_path / "kept.json"), "--docs")
    assert page.read_text() == "of <!-- architectures.all -->2<!-- /architectures.all --> types"
    kept = read_kept(architectures.SUMMARY)
    assert kept.versions == "some versions"
    assert kept.figures == summarize(read(tmp_path / "kept.json"))
    figures._kept_texts.cache_clear()


def test_gradients_further_from_float64_than_sdpas_are_listed() -> None:
    errors = {"near": (1e-6, 1e-7), "as sdpa": (4e-5, 3e-5), "far": (1.3e-4, 2.9e-5)}
    outcomes = [
        Outcome(name, "Model", calls={"from_config": 1}, gradient_errors={"clearhead": own, "sdpa": sdpa})
        for name, (own, sdpa) in errors.items()
    ]
    summary = summarize(Run("some versions", outcomes))
    assert summary["gradients"] == {"compared": 3, "median ratio": 1.3e-4 / 2.9e-5, "worse": {"far": [1.3e-4, 2.9e-5]}}
    assert ("far", "agrees", "error of gradients 1.3e-04, SDPA 2.9e-05") in types(summary)


def test_a_process_that_ends_or_has_no_result_is_an_outcome_and_the_next_architecture_goes_on() -> None:
    (outcome,) = run_all([LLAMA], jobs=1, seconds=60, work=leave)
    assert [finding.text for finding in outcome.errors] == ["the process ended with exit code 3"]
    outcomes = list(run_all([LLAMA, LLAMA], jobs=1, seconds=0.5, work=wait_for_ever))
    assert [outcome.errors[0].text for outcome in outcomes] == ["no result after 0 s"] * 2
    assert all(outcome.status == "differs" for outcome in outcomes)


def test_a_call_that_raises_after_upgrade_is_wrong_however_clear_the_error_is() -> None:
    error = Finding("upgrade", "outputs", text="ArgumentError: indices", refused=True)
    assert Outcome("a", "A", errors=[error]).status == "differs"
    assert Outcome("a", "A", errors=[replace(error, route="from_config")]).status == "refused"


def test_the_summary_separates_mechanisms_that_are_on_from_those_that_are_not() -> None:
    effects = {
        "window: sliding_window": 0.5123,
        "chunk: attention_chunk_size": 2e-6,
        "gate: use_gate": "ValueError: no",
    }
    summary = summarize(Run("some versions", [replace(AGREES, mechanisms=effects)]))
    assert summary["mechanisms"] == {"llama": {"window: sliding_window": 0.51}}
    assert summary["off"] == {"llama": {"chunk: attention_chunk_size": 2e-6, "gate: use_gate": "ValueError: no"}}


@pytest.mark.parametrize(
    ("name", "calls"), [("llama", True), ("deepseek_vl_hybrid", True), ("cvt", False), ("xlstm", False)]
)
def test_whether_a_model_calls_the_attention_function_is_read_from_its_source(name: str, calls: bool) -> None:
    (architecture,) = architectures.chosen_architectures([name])
    assert calls_attention_function(architecture) is calls


@pytest.mark.parametrize(
    ("name", "mechanisms"),
    [
        ("mistral", {"window: sliding_window"}),
        ("gpt_oss", {"window: sliding_window", "sinks: sinks"}),
        ("gemma2", {"window: sliding_window", "soft-cap: attn_logit_softcapping", "soft-cap: softcap"}),
        ("llama", set()),
        ("t5", {"bias of positions: position_bias"}),
    ],
)
def test_ignoring_a_mechanism_changes_the_output(name: str, mechanisms: set[str]) -> None:
    (architecture,) = architectures.chosen_architectures([name])
    model = build(architecture)
    found = effects(architecture, model, find_inputs(model))
    assert {key for key, effect in found.items() if isinstance(effect, float) and effect > ON} >= mechanisms
    assert {key.partition(":")[0] for key in found} - {"scale of scores"} == {k.partition(":")[0] for k in mechanisms}


@pytest.mark.parametrize("name", ["mistral_large4", "mistral_large4_text"])
def test_models_whose_layers_select_keys_agree(name: str) -> None:
    pytest.importorskip("transformers.models.mistral_large4")
    from benchmarks.quality.architectures_cases.comparing import compare

    (architecture,) = architectures.chosen_architectures([name])
    outcome = compare(architecture)
    assert outcome.status == "agrees", outcome.not_built
    assert not outcome.wrong
