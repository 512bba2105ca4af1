"""Contests between ways to do the same work: who is timed, who is left out and why, and what is said of bars."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.comparing import (
    OURS,
    Case,
    Contest,
    Growth,
    Result,
    Slower,
    Speedup,
    TimedCase,
    UtilisedShare,
    enter,
    read,
    scale_difference,
    write,
)
from benchmarks.comparing.load import with_load
from benchmarks.comparing.page import fill, marks
from benchmarks.comparing.pictures import draw_bars, draw_rates
from benchmarks.comparing.tables import bars, markdown, remarks, times
from benchmarks.peers import PEERS, AttentionWork, Unsupported
from benchmarks.peers.work import Outputs, Way, draw


def constant(*values: float) -> Way:
    return lambda: (torch.tensor(values),)


def refuse() -> Way:
    raise Unsupported("it has no backward pass")


def not_installed() -> Way:
    raise ModuleNotFoundError("No module named 'someones_library'", name="someones_library")


def fail() -> Outputs:
    raise RuntimeError("no such\n   operator")


def contest() -> Contest:
    ways = Contest(kernel="chunked")
    enter(ways, OURS, lambda: constant(1.0, 2.0), 3e9)
    enter(ways, "close", lambda: constant(1.0, 2.00001), 3e9)
    enter(ways, "wrong", lambda: constant(1.0, 3.0))
    enter(ways, "poisoned", lambda: constant(1.0, math.nan))
    enter(ways, "ceiling", lambda: tuple, 5e9)
    enter(ways, "refusing", refuse)
    enter(ways, "missing", not_installed)
    enter(ways, "failing", lambda: fail)
    return ways


@pytest.fixture(scope="module")
def result() -> Result:
    case = TimedCase("somewhere", "L=7", contest, (Speedup(2.0, ("close",)), Speedup(2.0, ("missing",))), "GFLOP/s")
    return case.measure(rounds=3)


def test_everybody_who_can_is_timed(result: Result) -> None:
    assert list(result.figures) == [OURS, "close", "wrong", "poisoned", "ceiling"]
    assert all(low <= result.figures[name] <= high for name, (low, high) in result.spreads.items())
    assert result.rates[OURS] == pytest.approx(3 / (result.figures[OURS] / 1e3))
    assert set(result.rates) == {OURS, "close", "ceiling"}


def test_who_is_missing_is_named_with_the_reason(result: Result) -> None:
    assert result.left_out == {
        "refusing": "it has no backward pass",
        "missing": "not installed: someones_library",
        "failing": "RuntimeError: no such operator",
    }
    assert "refusing left out (it has no backward pass): somewhere, L=7" in remarks([result])


def test_another_result_is_named(result: Result) -> None:
    assert set(result.differences) == {"close", "wrong", "poisoned"}
    assert set(result.wrong) == {"wrong", "poisoned"}
    said = [line for line in remarks([result]) if line.startswith("DIFFERENT RESULT")]
    assert said[0] == "DIFFERENT RESULT: somewhere, L=7: wrong is 5.0e-01 away, tolerance 1e-05"


def test_a_failure_of_our_own_is_raised() -> None:
    case = TimedCase("somewhere", "L=7", lambda: Contest({OURS: fail}))
    with pytest.raises(RuntimeError, match="no such"):
        case.measure(rounds=3)


def test_only_a_part_of_the_outputs_is_compared_if_the_contest_says_so() -> None:
    ways = Contest({OURS: constant(1.0, 5.0), "other": constant(1.0, 7.0)}, compared=lambda outputs: (outputs[0][:1],))
    assert TimedCase("somewhere", "L=7", lambda: ways).measure(rounds=3).differences == {"other": 0.0}


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
    expected = "NOT QUIET: other programs took 30% of the processors: somewhere, L=7"
    assert expected in remarks([replace(result, load=0.3)])
    assert not [line for line in remarks([replace(result, load=0.02)]) if line.startswith("NOT QUIET")]


FIGURES = {OURS: 2.0, "a": 6.0, "b": 5.0, f"{OURS}, other": 4.0}
RATES = {OURS: 30.0, "x": 40.0, "y": 50.0}


@pytest.mark.parametrize(
    ("bar", "words", "value", "text"),
    [
        (Speedup(2.0, ("a",)), "≥ 2× a", 3.0, "met"),
        (Speedup(4.0, ("a",)), "≥ 4× a", 3.0, "missed by 25%"),
        (Speedup(2.5, ("a", "b")), "≥ 2.5× the better of a and b", 2.5, "met"),
        (Speedup(2.5, ("nobody", "b")), "≥ 2.5× the better of nobody and b", 2.5, "met"),
        (Speedup(2.5, ("nobody",)), "≥ 2.5× nobody", None, "not measured"),
        (Speedup(1.0, ("b",), way=f"{OURS}, other"), "Clearhead, other: ≥ 1× b", 1.25, "met"),
        (Slower(0.4, "b"), "time ≤ 0.4× b", 0.4, "met"),
        (Slower(0.25, "b"), "time ≤ 0.25× b", 0.4, "missed by 60%"),
        (Slower(0.25, "nobody"), "time ≤ 0.25× nobody", None, "not measured"),
        (UtilisedShare(0.8, ("x", "y"), "the ceiling"), "≥ 80% of the ceiling", 0.6, "missed by 25%"),
        (UtilisedShare(0.5, ("nobody",), "the ceiling"), "≥ 50% of the ceiling", None, "not measured"),
        (Growth(2.5, "b", "a"), "a ≤ 2.5× b", 1.2, "met"),
        (Growth(1.0, "b", "a"), "a ≤ 1× b", 1.2, "missed by 20%"),
    ],
)
def test_bars_say_what_was_asked_and_by_how_much_it_was_missed(
    bar: Speedup, words: str, value: float | None, text: str
) -> None:
    verdict = bar.judge(FIGURES, RATES)
    assert (verdict.bar, verdict.text) == (words, text)
    assert verdict.value == (None if value is None else pytest.approx(value))
    assert verdict.reached is None or (verdict.reached >= 1) == verdict.met


def test_results_survive_being_kept(result: Result, tmp_path: Path) -> None:
    finite = replace(result, differences={})
    write(tmp_path / "one.json", "a machine", [finite])
    newer = replace(finite, kernel="another", name="L=11")
    write(tmp_path / "two.json", "a machine", [replace(finite, kernel="newer"), newer])
    assert read([tmp_path / "one.json"]) == ("a machine", [finite])
    _, both = read([tmp_path / "one.json", tmp_path / "two.json"])
    assert [(each.name, each.kernel) for each in both] == [("L=7", "newer"), ("L=11", "another")]


def test_runs_of_two_machines_do_not_make_one_table(result: Result, tmp_path: Path) -> None:
    write(tmp_path / "one.json", "a machine", [result])
    write(tmp_path / "two.json", "another", [result])
    with pytest.raises(SystemExit, match="not of one machine: a machine; another"):
        read([tmp_path / "one.json", tmp_path / "two.json"])


def test_the_tables_hold_every_figure_and_every_bar(result: Result) -> None:
    header, rows = times([result])
    assert header == ["work", "kernel", OURS, "close", "wrong", "poisoned", "ceiling", f"{OURS}, GFLOP/s"]
    assert rows[0][:2] == ["L=7", "chunked"]
    assert rows[0][3].endswith("×)"), "who is compared has a ratio"
    assert not rows[0][6].endswith("×)"), "a ceiling does other work"
    assert [row[3] for row in bars([result])[1]] == ["≥ 2× close", "≥ 2× missing"]


def test_a_page_keeps_what_stands_around_its_figures(result: Result, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = marks("cpu")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
    fill(page, "cpu", markdown("a machine", [result]))
    fill(page, "cpu", markdown("a machine", [result]))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert text.count("Measured on: a machine.") == 1
    assert "old" not in text
    with pytest.raises(ValueError, match="needs the marks"):
        fill(page, "gpu", "content")


def test_the_pictures_are_drawn_with_gaps_where_nothing_was_measured(result: Result, tmp_path: Path) -> None:
    longer = replace(result, name="L=11", rates={OURS: 2.0})
    draw_rates([result, longer], ("somewhere", "nowhere"), ("ceiling",), tmp_path / "rates.png")
    draw_bars([result, longer], tmp_path / "new" / "bars.png")
    for path in (tmp_path / "rates.png", tmp_path / "new" / "bars.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


SMALL = AttentionWork(13, key_length=17, heads=3, head_dim=7)


@pytest.mark.parametrize("name", ["SDPA", "x-transformers", "transformers eager", "ONNX Runtime", "OpenVINO"])
@pytest.mark.parametrize(
    "work",
    [
        SMALL,
        replace(SMALL, key_length=13, causal=True),
        replace(SMALL, mask="bool"),
        replace(SMALL, mask="float"),
        replace(SMALL, value_dim=5),
        replace(SMALL, backward=True),
    ],
    ids=["plain", "causal", "bool", "float", "value_dim", "backward"],
)
def test_peers_compute_what_clearhead_computes(name: str, work: AttentionWork) -> None:
    from benchmarks.cpu_cases.attention import ours

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


def test_every_line_of_the_table_has_a_name_of_its_own() -> None:
    from benchmarks.cpu_cases import all_cases

    cases = all_cases()
    assert all(isinstance(case, Case) for case in cases)
    assert len({(case.section, case.name) for case in cases}) == len(cases)
