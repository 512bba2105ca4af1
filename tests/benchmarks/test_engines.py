"""The texts, engines and tables of ``benchmarks.encoders.engines``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from benchmarks.command import Effort
from benchmarks.comparing import OURS
from benchmarks.encoders import engines, standings
from benchmarks.encoders.batches import BATCHES, EQUAL, MIXED, Batch, read_texts
from benchmarks.encoders.converted import Converted, Encode
from benchmarks.encoders.engines import Task, alone, lines, works_of
from benchmarks.encoders.models import MODELS, RANDOM
from benchmarks.encoders.peers import Eager
from benchmarks.encoders.standings import IN_TURN, LONG, SHORT, SINGLY, SORTED, THEIRS
from benchmarks.figures import Figures
from clearhead.cli._demo import default_model_path

SMALLEST = Effort(3, smallest=True)
DTYPES = ("float32", "bfloat16")


def test_texts_are_words_of_the_documentation_cut_to_the_lengths() -> None:
    texts = read_texts([13, 2, 31])
    assert [len(text) for text in texts] == [13, 2, 31]
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(default_model_path()))
    assert all(text[0] == tokenizer.cls_token_id and text[-1] == tokenizer.sep_token_id for text in texts)
    assert len(set(texts[2])) > 10
    assert texts == read_texts([13, 2, 31])


def test_a_batch_is_padded_as_far_as_its_longest_text() -> None:
    texts = [[5, 6], [7, 8, 9]]
    batch = Batch.padded(texts)
    assert batch.ids.tolist() == [[5, 6, 0], [7, 8, 9]]
    assert batch.mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.texts == texts


def test_the_mixed_texts_are_the_same_sorted_and_one_at_a_time() -> None:
    works = works_of("MiniLM", smallest=False)
    mixed = works[MIXED][0].texts
    assert [len(text) for text in mixed] == BATCHES[MIXED]
    assert [len(batch.texts) for batch in works[SORTED]] == [8, 8, 8, 8]
    assert [text for batch in works[SORTED] for text in batch.texts] == sorted(mixed, key=len)
    assert [batch.texts for batch in works[SINGLY]] == [[text] for text in mixed]
    assert sum(batch.ids.numel() for batch in works[SORTED]) < 0.6 * works[MIXED][0].ids.numel()
    assert (works[SHORT][0].ids.shape, works[LONG][0].ids.shape) == ((1, 16), (1, 200))
    assert works_of("BERT-base", smallest=False).keys() == {EQUAL, MIXED, SHORT, LONG}


def test_every_line_has_a_name_of_its_own() -> None:
    names = [line.name for line in lines(Effort(3))]
    assert len(set(names)) == len(names) == len(MODELS) * 12 + 1
    assert [line.name for line in lines(Effort(3, peers=False))] == [
        *(f"{model}, {engine}, {dtype}" for model in MODELS for engine in (OURS, THEIRS) for dtype in DTYPES),
        IN_TURN,
    ]


def test_embeddings_are_means_over_real_tokens() -> None:
    works = works_of("BERT-base", smallest=True)

    def encode(batch: Batch) -> Tensor:
        states = torch.stack([batch.ids, 2 * batch.ids], dim=-1).float()
        return states.masked_fill(~batch.real[..., None], math.nan)

    found = engines.embeddings(encode, works)
    texts = [text for name in (EQUAL, MIXED, SHORT, LONG) for text in works[name][0].texts]
    expected = torch.tensor([sum(text) / len(text) for text in texts], dtype=torch.float64)
    assert torch.allclose(found, torch.stack([expected, 2 * expected], dim=1), rtol=1e-12)


def set_engine(monkeypatch: pytest.MonkeyPatch, name: str, way: Converted | Callable[[nn.Module, str], Encode]) -> None:
    monkeypatch.setitem(engines.ENGINES, name, (way, ("float32",)))


def converted(convert: Callable[[nn.Module, str, list[Batch], Path], None]) -> Converted:
    """An engine that converts in one way and then runs transformers' BERT-base."""
    return Converted("json", convert, lambda precision, folder: Eager(torch.load(folder / "model", weights_only=False)))


def test_an_engine_is_converted_for_its_precision_and_compared_with_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibrations: list[int] = []

    def convert(model: nn.Module, precision: str, calibration: list[Batch], folder: Path) -> None:
        calibrations.append(len(calibration))
        with torch.no_grad():  # as far from transformers as int8
            model.get_submodule("embeddings.word_embeddings").weight.mul_(1.5)
        torch.save(model, folder / "model")

    set_engine(monkeypatch, "another", converted(convert))
    found = [alone(Task("BERT-base", "another", precision, True), SMALLEST) for precision in ("float32", "int8")]
    assert calibrations == [0, 3]
    assert all(0 < each["lost"]["mean"] <= each["lost"]["worst"] < 1 for each in found)
    assert found[0]["times"].keys() == works_of("BERT-base", smallest=True).keys()
    same = alone(Task("BERT-base", THEIRS, "float32", True), SMALLEST)
    assert same["lost"]["worst"] == pytest.approx(0, abs=1e-12)
    assert min(same["first"], *same["times"].values()) > 0


def test_a_peer_that_fails_is_skipped_with_its_reason_and_clearhead_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(model: nn.Module, precision: str, calibration: list[Batch], folder: Path) -> None:
        raise RuntimeError("no such   operator")

    def fail(model: nn.Module, precision: str) -> Encode:
        raise RuntimeError("no such operator")

    set_engine(monkeypatch, "another", converted(convert))
    found = alone(Task("BERT-base", "another", "float32", True), SMALLEST)
    assert found == {"skipped": "RuntimeError: no such operator"}
    set_engine(monkeypatch, "another", Converted("no_such_package", lambda *given: None, lambda *given: None))
    found = alone(Task("BERT-base", "another", "float32", True), SMALLEST)
    assert found == {"skipped": "not installed: no_such_package"}
    set_engine(monkeypatch, OURS, fail)
    with pytest.raises(RuntimeError, match="no such operator"):
        alone(Task("BERT-base", OURS, "float32", True), SMALLEST)


def test_an_upgrade_that_is_refused_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module, *, unpad: bool) -> None:
        raise engines.ArgumentError("unpad", expected="an encoder", got="none", fix="Leave it out.")

    monkeypatch.setattr(engines.clearhead, "upgrade", refuse)
    assert "ArgumentError: unpad" in alone(Task("BERT-base", OURS, "float32", True), SMALLEST)["skipped"]
    assert "dtype" in alone(Task("BERT-base", OURS, "bfloat16", True), SMALLEST)["skipped"]


def test_bfloat16_is_an_argument_of_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype | None] = []

    def upgrade(model: nn.Module, *, unpad: bool, dtype: torch.dtype | None = None) -> None:
        asked.append(dtype)

    monkeypatch.setattr(engines.clearhead, "upgrade", upgrade)
    for precision in DTYPES:
        assert alone(Task("BERT-base", OURS, precision, True), SMALLEST)["times"].keys() == {EQUAL, MIXED, SHORT, LONG}
    assert asked == [None, torch.bfloat16]


def measured(**of_works: float) -> dict[str, Any]:
    """Figures of an engine that needs one second for everything but these works."""
    works = {"equal": EQUAL, "mixed": MIXED, "sorted": SORTED, "singly": SINGLY, "short": SHORT, "long": LONG}
    times = {work: of_works.get(name, 1.0) for name, work in works.items()}
    lost = {"worst": 1e-6, "mean": 1e-7}
    return {"times": times, "lost": lost, "memory": 120.0, "peak": 240.0, "first": 1.5, "load": 0.01}


FIGURES: Figures = {
    f"MiniLM, {OURS}, float32": measured(equal=0.2, mixed=0.25, short=0.005),
    f"MiniLM, {OURS}, bfloat16": measured(equal=0.1, mixed=0.1),
    f"MiniLM, {THEIRS}, float32": measured(equal=0.24, mixed=0.9),
    "MiniLM, OpenVINO, float32": measured(equal=0.18, mixed=0.6, sorted=0.3, singly=0.35, short=0.004),
    "MiniLM, OpenVINO, int8": measured(equal=0.15, mixed=0.5, sorted=0.3, singly=0.4),
    "MiniLM, CTranslate2, int8": measured(equal=0.12, mixed=0.7, sorted=0.35),
    "BERT-base, CTranslate2, int8": {"skipped": "not installed: ctranslate2"},
    IN_TURN: {
        "times": {
            f"MiniLM, {OURS}, float32": {EQUAL: 0.2, MIXED: 0.3},
            f"MiniLM, {OURS}, bfloat16": {EQUAL: 0.1, MIXED: 0.2},
            f"MiniLM, {THEIRS}, float32": {EQUAL: 0.3, MIXED: 1.2},
            "MiniLM, OpenVINO, int8": {EQUAL: 0.15, MIXED: 0.8},
        },
        "skipped": {"MiniLM, CTranslate2, int8": "not installed: ctranslate2"},
    },
}


@pytest.mark.parametrize(
    ("marker", "gain", "best"),
    [
        ("equal", "0.90×", "OpenVINO, float32"),
        ("equal-turns", "1.50×", "transformers, float32"),
        ("mixed", "2.4×", "OpenVINO, float32"),
        ("mixed-any", "1.20×", "OpenVINO, float32, sorted"),
        ("half-equal", "1.20×", "CTranslate2, int8"),
        ("half-mixed-turns", "4.0×", "OpenVINO, int8"),
        ("half-mixed-sorted", "3.0×", "OpenVINO, int8, sorted"),
        ("half-default", "9.0×", "transformers, float32"),
        ("half-default-turns", "6.0×", "transformers, float32"),
        ("short", "0.80×", "OpenVINO, float32"),
        ("half-short", "–", "–"),
    ],
)
def test_clearhead_is_compared_with_the_best_other_way(marker: str, gain: str, best: str) -> None:
    found = standings.texts(FIGURES)
    assert (found[marker], found[f"{marker}-best"]) == (gain, best)
    assert all(found.values())


def test_a_row_names_the_work_and_those_beside_it() -> None:
    rows = standings.texts(FIGURES)["standings"].splitlines()
    ours, best = "bfloat16, 32 texts of mixed length", "the best engine in int8"
    assert f"| {ours} | {best}, used in its best way | OpenVINO, int8, sorted | 100 ms | 300 ms | 3.0× |" in rows
    assert f"| {ours}, in turn | {best} | OpenVINO, int8 | 200 ms | 800 ms | 4.0× |" in rows
    assert len({tuple(row.split(" | ")[:2]) for row in rows}) == len(rows)


def test_tables_have_a_row_for_each_engine_and_the_reasons_of_those_that_are_left_out() -> None:
    found = standings.texts(FIGURES)["tables"]
    assert "| OpenVINO, int8 | 150 | 500 | 300 | 400 | 1,000 | 1,000 |" in found
    assert f"| {OURS}, bfloat16 | 1.00000 | 1.00000 | 120 MB | 240 MB | 1.5 s |" in found
    assert "* Not measured, because not installed: ctranslate2: `BERT-base, CTranslate2, int8`" in found
    assert "### BERT-base" not in found
    assert all(name in found for name in RANDOM)


def test_without_bfloat16_there_is_no_ratio() -> None:
    line = f"MiniLM, {OURS}, bfloat16"
    turns = {name: each for name, each in FIGURES[IN_TURN]["times"].items() if name != line}
    found = standings.texts(FIGURES | {line: {"skipped": "no dtype"}, IN_TURN: {"times": turns, "skipped": {}}})
    assert {found["half-mixed"], found["half-mixed-turns"], found["cosine"]} == {"–"}


def test_embeddings_that_are_too_far_away_are_wrong() -> None:
    assert standings.wrong(FIGURES) == []
    for lost in (1.1e-5, math.nan):
        far = measured() | {"lost": {"worst": lost, "mean": lost}}
        assert len(standings.wrong(FIGURES | {"MiniLM, OpenVINO, float32": far})) == 1
        assert standings.wrong(FIGURES | {"MiniLM, OpenVINO, int8": far}) == []
