"""Contests between ways to do the same work: what is timed, compared, skipped and reported."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.command import Effort
from benchmarks.comparing import (
    OURS,
    Contest,
    Result,
    TimedCase,
    enter,
    markdown,
    read_results,
    scale_difference,
    wrong_results,
)
from benchmarks.comparing.load import with_load
from benchmarks.comparing.pictures import draw_rates, draw_speed
from benchmarks.comparing.tables import grid, remarks
from benchmarks.cpu.cases.attention import ours
from benchmarks.peers import PEERS, AttentionWork, Unsupported
from benchmarks.peers.work import Outputs, Way, draw


def constant(*values: float) -> Way:
    return lambda: (torch.tensor(values),)


def failing(error: Exception) -> Callable[[], Any]:
    def fail() -> Outputs:
        raise error

    return fail


no_operator = failing(RuntimeError("no such\n   operator"))


def contest() -> Contest:
    ways = Contest(kernel="chunked")
    enter(ways, OURS, lambda: constant(1.0, 2.0), 3e9)
    enter(ways, "close", lambda: constant(1.0, 2.00001), 3e9)
    enter(ways, "wrong", lambda: constant(1.0, 3.0))
    enter(ways, "poisoned", lambda: constant(1.0, math.nan))
    enter(ways, "ceiling", lambda: tuple, 5e9)
    enter(ways, "refusing", failing(Unsupported("it has no backward pass")))
    enter(ways, "missing", failing(ModuleNotFoundError(name="someones_library")))
    enter(ways, "failing", lambda: no_operator)
    return ways


@pytest.fixture(scope="module")
def result() -> Result:
    case = TimedCase("somewhere", "L=7", contest, "GFLOP/s")
    return case.measure(Effort(3))


def test_ways_are_timed_or_skipped_with_the_reason_and_another_result_is_named(result: Result) -> None:
    assert list(result.figures) == [OURS, "close", "wrong", "poisoned", "ceiling"]
    assert all(low <= result.figures[name] <= high for name, (low, high) in result.spreads.items())
    assert result.rates[OURS] == pytest.approx(3 / (result.figures[OURS] / 1e3))
    assert set(result.rates) == {OURS, "close", "ceiling"}
    assert result.skipped == {
        "refusing": "it has no backward pass",
        "missing": "not installed: someones_library",
        "failing": "RuntimeError: no such operator",
    }
    said = remarks([result])
    assert "refusing not measured, because it has no backward pass: `somewhere (L=7)`" in said
    assert set(result.differences) == {"close", "wrong", "poisoned"}
    assert set(result.wrong) == {"wrong", "poisoned"}
    different = [line for line in said if line.startswith("DIFFERENT RESULT")]
    assert different[0] == "DIFFERENT RESULT: somewhere: L=7: wrong is 5.0e-01 away, tolerance 1e-05"


@pytest.mark.parametrize(
    ("skipped", "run", "shown"),
    [("a fp32, b fp32", "", "all"), ("a bf16, b bf16", "a fp32", "all with bf16"), ("a bf16, b bf16", "c bf16", "")],
)
def test_many_skipped_lines_are_named_together(result: Result, skipped: str, run: str, shown: str) -> None:
    def lines(names: str, skipped: dict[str, str]) -> list[Result]:
        return [replace(result, name=name.replace(" ", ", "), skipped=skipped) for name in names.split(", ") if name]

    said = remarks([*lines(skipped, {"other": "it is slow"}), *lines(run, {})])
    assert f"other not measured, because it is slow: `somewhere ({shown or 'a, bf16 / b, bf16'})`" in said


def test_a_failure_of_our_own_is_raised_and_a_part_of_the_outputs_may_be_compared() -> None:
    case = TimedCase("somewhere", "L=7", lambda: Contest({OURS: no_operator}))
    with pytest.raises(RuntimeError, match="no such"):
        case.measure(Effort(3))
    ways = Contest({OURS: constant(1.0, 5.0), "other": constant(1.0, 7.0)}, compared=lambda outputs: (outputs[0][:1],))
    assert TimedCase("somewhere", "L=7", lambda: ways).measure(Effort(3)).differences == {"other": 0.0}


def test_dropout_is_compared_by_its_scale() -> None:
    assert scale_difference((torch.tensor([3.0, 4.0]),), (torch.tensor([4.0, -3.0]),)) == 0
    assert scale_difference((torch.tensor([3.0, 4.0]),), (torch.tensor([6.0, 8.0]),)) == pytest.approx(1)


def test_other_programs_are_noticed() -> None:
    busy = [sys.executable, "-c", "import time; end = time.time() + 60\nwhile time.time() < end: pass"]
    others = [subprocess.Popen(busy) for _ in range(2)]
    try:
        time.sleep(0.5)
        _, load = with_load(lambda: time.sleep(1))
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert load is None or load > 1 / (os.cpu_count() or 1) / 2


def test_a_result_measured_under_load_is_named(result: Result) -> None:
    expected = "NOT QUIET: other programs took 30% of the processors in `somewhere: L=7`"
    assert expected in remarks([replace(result, load=0.3)])
    assert not [line for line in remarks([replace(result, load=0.02)]) if line.startswith("NOT QUIET")]


def test_ratios_and_the_share_of_the_ceiling() -> None:
    figures = {OURS: 2.0, "a": 6.0, "mm": 9.0, "linear": 8.0, f"{OURS}, other": 1.0}
    rates = {OURS: 30.0, "a": 10.0, "mm": 40.0, "linear": 50.0}
    result = Result("somewhere", "L=7", "ms", figures, rates=rates, differences={"a": 0.0})
    assert result.ratios == {"a": 3.0, f"{OURS}, other": 0.5}
    assert result.ceilings == ["mm", "linear"]
    assert result.share == 0.6
    assert replace(result, rates={OURS: 30.0, "a": 10.0}).share is None


def test_results_survive_being_kept(result: Result) -> None:
    finite = replace(result, differences={"close": 5e-6, "wrong": 0.5})
    kept = json.loads(json.dumps({finite.work: finite.kept()}))
    assert read_results(kept) == [finite]
    assert "section" not in kept["somewhere: L=7"]
    assert wrong_results(kept) == ["DIFFERENT RESULT: somewhere: L=7: wrong is 5.0e-01 away, tolerance 1e-05"]


def test_the_tables_hold_ratios_the_share_of_the_ceiling_and_remarks(result: Result) -> None:
    header, rows = grid([result])
    ways = ["close", "wrong", "poisoned"]
    assert header == ["work", "kernel", f"{OURS}, ms", *ways, f"{OURS}, GFLOP/s", "share of the ceiling"]
    assert rows[0][:2] == ["L=7", "chunked"]
    assert all(cell.endswith("×") for cell in rows[0][3:6])
    assert rows[0][-1].endswith("%")
    header, rows = grid([replace(result, rates={}), replace(result, name="L=11", rates={}, figures={OURS: 2.0})])
    assert header[-1] == "ceiling", "without rates there is no ceiling"
    assert rows[1][2:] == ["2.00", "–", "–", "–", "–"]
    header, rows = grid([replace(result, kernel="")])
    assert header[:2] == ["work", f"{OURS}, ms"], "a kernel that no result names has no column"
    assert (rows[0][0], len(rows[0])) == ("L=7", len(header))
    text = markdown([result, replace(result, section="elsewhere")])
    assert text.index("### somewhere") < text.index("### elsewhere") < text.index("### Remarks on these figures")
    assert "| --- | --- | ---: |" in text


def test_the_pictures_are_drawn_with_gaps_where_nothing_was_measured(result: Result) -> None:
    longer = replace(result, name="L=11", rates={OURS: 2.0})
    rates = draw_rates([result, longer], ("somewhere", "nowhere"), ("ceiling",))
    assert "GFLOP/s" in rates
    assert "Clearhead" in rates
    speed = draw_speed({"long": 7.9, "tiny": 0.96}, "speed")
    assert all(f">{text}<" in speed for text in ("7.9×", "0.96×", "long", "tiny"))
    assert draw_speed({"long": 7.9, "tiny": 0.96}, "speed") == speed, "the same figures give the same file"


SMALL = AttentionWork(13, key_length=17, heads=3, head_dim=7)


@pytest.mark.parametrize("name", ["SDPA", "x-transformers", "transformers eager", "ONNX Runtime", "OpenVINO"])
@pytest.mark.parametrize(
    "change",
    [{}, {"key_length": 13, "causal": True}, {"mask": "bool"}, {"mask": "float"}, {"value_dim": 5}, {"backward": True}],
    ids=lambda change: ",".join(change) or "plain",
)
def test_peers_compute_what_clearhead_computes(name: str, change: dict[str, Any]) -> None:
    work = replace(SMALL, **change)
    operands = draw(work)
    try:
        theirs = PEERS[name](work, operands)()
    except (Unsupported, ModuleNotFoundError) as reason:
        pytest.skip(str(reason))
    for expected, got in zip(ours(work, operands)(), theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_the_amount_of_work_is_counted_by_products() -> None:
    work = AttentionWork(3, key_length=5, batch=2, heads=7, head_dim=11, value_dim=13)
    scores = 2 * 7 * 3 * 5
    assert work.flops == 2 * scores * (11 + 13)
    assert replace(work, backward=True).flops == 2 * scores * (4 * 11 + 3 * 13)
    assert replace(work, causal=True).flops == work.flops / 2
