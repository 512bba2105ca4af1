"""Every benchmark that a page names, on its smallest work: its lines, what it keeps, and what happens if one fails."""

from __future__ import annotations

import functools
import importlib
import json
import re
import shlex
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks import all as every
from benchmarks import figures
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing import OURS, Case, Result
from benchmarks.cpu import cases as cpu_cases
from benchmarks.cpu import varlen
from benchmarks.encoders import __main__ as encoders
from benchmarks.encoders.batches import Batch, mixed_lengths
from benchmarks.encoders.converted import Encode
from benchmarks.encoders.peers import PEERS
from benchmarks.figures import Figures, Kept, command_of, module_of, pages, read, texts_of
from benchmarks.timing import in_blocks
from tests.support.chromium import IS_THERE
from tests.support.pretended_cuda.build import compiler

#: Named on pages, and run elsewhere: architectures and mutants in test files of their own, the GPU's work on the CPU in
#: test_gpu.py, `all` and `figures` here and in test_figures.py, aarch64 in tests/native. The sanitizers compile for
#: minutes.
ELSEWHERE = {"all", "figures", "gpu", "gpu.compile", "gpu.kernels"}
ELSEWHERE |= {f"quality.{name}" for name in ("architectures", "mutants", "native_aarch64", "native_sanitizers")}


def benchmark_of(name: str) -> Benchmark:
    return importlib.import_module(module_of(name)).BENCHMARK


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, ["--no-peers"]) for name in every.NAMES),
        *(pytest.param(name, [], marks=pytest.mark.slow) for name in ("cpu", "encoders", "engines")),
    ],
)
def test_the_smallest_work_gives_every_text(name: str, options: list[str], tmp_path: Path) -> None:
    if name == "page_actions" and not IS_THERE:
        pytest.skip("needs the package playwright and an installed chromium")
    if name == "call_counts" and (sys.platform != "linux" or torch.version.cuda is not None or compiler() is None):
        pytest.skip("the simulated GPU needs Linux, a C++ compiler and a build of PyTorch without CUDA")
    benchmark = benchmark_of(name)
    benchmark.main(["--smallest", *options, "--json", str(tmp_path / "kept.json")])
    texts = texts_of(name, read(tmp_path / "kept.json"))
    assert all(texts.values())
    shown = {
        mark["what"]
        for page in pages()
        for mark in figures.MARKED.finditer(page.read_text(encoding="utf-8"))
        if mark["file"] == name
    }
    assert shown <= set(texts) | ({"sentence", "longest"} if name == "look" else set())


#: A command of a benchmark on a page, with its options, as far as a shell reads it.
COMMAND = re.compile(r"(?:^|`)python -m benchmarks\.([a-z0-9_.]+)((?: [^\n#`]+)?)", re.M)


def is_command(module: str) -> bool:
    """Whether ``python -m`` runs it: a file, or a folder with a main command."""
    try:
        return find_spec(f"{module}.__main__") is not None
    except ModuleNotFoundError:  # it is no folder
        return find_spec(module) is not None


def test_every_benchmark_and_option_that_a_page_names_is_one() -> None:
    texts = [page.read_text(encoding="utf-8") for page in pages()]
    named = {
        name for text in texts for name in re.findall(r"python -m benchmarks\.([a-z0-9_]+(?:\.[a-z0-9_]+)?)", text)
    }
    names = {command_of(name).removeprefix("benchmarks."): name for name in every.NAMES}
    assert named - ELSEWHERE <= names.keys()
    assert len(named) > 10
    assert all(is_command(f"benchmarks.{name}") for name in named)
    commands = [(match[1], match[2]) for text in texts for match in COMMAND.finditer(text) if match[1] not in ELSEWHERE]
    for name, options in commands:
        benchmark = benchmark_of(names[name])
        chosen = benchmark._parser().parse_args(shlex.split(options))
        lines = [line.name for line in benchmark.lines(Effort(3, False, True))]
        assert any(re.search(chosen.only, line, re.IGNORECASE) for line in lines), (name, options)
    assert len(commands) > 20


def one(measured: Figures) -> dict[str, str]:
    return {"first": f"{measured['first']:.1f} ms"}


@pytest.fixture(name="benchmark")
def _benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    """Of three lines, the second of which fails; its result file lies elsewhere."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)

    def fail() -> None:
        raise TypeError("read_model() missing 1 required\n  positional argument")

    lines = [Line("first", lambda: 7.123456), Line("second", fail), Line("third", lambda: {"a": 3.0})]
    return Benchmark("module", "About.", lambda effort: lines, one, minutes=1)


def test_what_was_measured_is_kept_where_a_line_fails(benchmark: Benchmark) -> None:
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([])
    assert stopped.value.code == "failed: second: TypeError: read_model() missing 1 required positional argument"
    kept = read(benchmark.results)
    assert kept.figures == {"first": 7.123, "third": {"a": 3.0}}
    assert kept.command == "python -m benchmarks.cpu.module"


def test_a_part_joins_the_results_of_the_same_day(benchmark: Benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--only", "first", "--date", "2026-01-02"])
    benchmark.main(["--only", "THIRD", "--date", "2026-01-02"])
    assert set(read(benchmark.results).figures) == {"first", "third"}
    capsys.readouterr()
    benchmark.main(["--only", "first", "--date", "2026-01-03"])
    assert "not kept" in capsys.readouterr().out
    assert read(benchmark.results).date == "2026-01-02"


def test_the_smallest_work_is_not_kept_for_pages(benchmark: Benchmark, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--only", "first", "--smallest"])
    assert not benchmark.results.exists()
    with pytest.raises(SystemExit, match="measures nothing that a page may show"):
        benchmark.main(["--smallest", "--docs"])
    benchmark.main(["--only", "first"])
    capsys.readouterr()
    benchmark.main(["--show"])
    assert "first: 7.1 ms" in capsys.readouterr().out


def test_something_wrong_makes_the_command_fail(tmp_path: Path) -> None:
    different = Result("decoding", "one row", "ms", {OURS: 2.0, "SDPA": 3.0}, differences={"SDPA": 0.5}, tolerance=1e-5)
    kept = Kept("a machine", "2026-01-02", "torch", "python", {different.work: different.kept()})
    kept.write(tmp_path / "kept.json")
    benchmark = benchmark_of("varlen")
    with pytest.raises(SystemExit, match=r"DIFFERENT RESULT: decoding: one row: SDPA is 5\.0e-01 away"):
        benchmark.main(["--show", "--json", str(tmp_path / "kept.json")])


def test_the_work_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = benchmark_of("cpu")
    with pytest.raises(SystemExit, match="0"):
        benchmark.main(["--list", "--only", "FORWARD, fp32: L=512"])
    assert capsys.readouterr().out.splitlines() == ["attention forward, fp32: L=512", "causal forward, fp32: L=512"]
    with pytest.raises(SystemExit, match="--only 'nothing' matches nothing; --list names the work"):
        benchmark.main(["--only", "nothing"])


def test_all_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[1:])
        return subprocess.CompletedProcess(command, 1 if "benchmarks.cpu.window" in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match="1"):
        every.main(["--only", "window", "linear", "look", "--without", "look", "--rounds", "3"])
    assert [command[1] for command in ran] == ["benchmarks.cpu.window", "benchmarks.cpu.linear"]
    assert ran[0][2] == "--date"
    assert ran[0][4:] == ["--rounds", "3"]
    said = capsys.readouterr().out
    assert "window: 0 s, FAILED with 1" in said
    assert "linear: 0 s\n" in said


def test_result_files_are_small_and_one_line_of_text_is_one_line_of_work(tmp_path: Path) -> None:
    kept = Kept("a machine", "2026-01-02", "torch", "python", {"a": 1 / 3, "b": {"c": [1, 2.000001]}})
    kept.write(tmp_path / "kept.json")
    text = (tmp_path / "kept.json").read_text(encoding="utf-8")
    assert json.loads(text)["figures"] == {"a": 0.3333, "b": {"c": [1, 2.0]}}
    assert len(text.splitlines()) == 10


@pytest.mark.parametrize(
    ("cases", "count"),
    [
        (cpu_cases.all_cases(Effort(3)), None),
        (encoders.all_cases(Effort(3)), 18),
        (varlen.all_cases(Effort(3, smallest=True)), 16),
    ],
    ids=["cpu", "encoders", "varlen"],
)
def test_every_line_has_a_name_of_its_own(cases: list[Case], count: int | None) -> None:
    assert all(isinstance(case, Case) for case in cases)
    assert len({(case.section, case.name) for case in cases}) == len(cases)
    assert count in (None, len(cases))


def test_a_peer_that_cannot_be_built_is_skipped_with_its_reason() -> None:
    def broken(model: torch.nn.Module) -> Encode:
        raise RuntimeError("no such   operator")

    def missing(model: torch.nn.Module) -> Encode:
        raise ModuleNotFoundError(name="elsewhere")

    peers = {name: PEERS[name] for name in encoders.EAGER} | {"broken": broken, "missing": missing}
    built = encoders._Built(functools.partial(encoders._model, "BERT-base", "float32", smallest=True), peers)
    contest = encoders._contest(built, Batch.of([7, 2, 5]))
    assert list(contest.ways) == list(encoders.EAGER)
    assert contest.skipped == {"broken": "RuntimeError: no such operator", "missing": "not installed: elsewhere"}


def test_the_mixed_batch_is_42_per_cent_real() -> None:
    lengths = mixed_lengths()
    batch = Batch.of(lengths)
    assert batch.ids.shape == (32, 256)
    assert batch.mask.sum(1).tolist() == lengths
    assert float(batch.mask.float().mean()) == pytest.approx(0.42, abs=0.02)
    assert min(lengths) >= 1


@pytest.mark.parametrize("name", [OURS, varlen.BATCH])
def test_memory_beyond_operands_and_results_is_positive(name: str) -> None:
    assert varlen.extra_memory(name, varlen.Setting((7, 5), causal=True, backward=True)) > 0


def test_mixed_lengths_add_up_and_the_headings_name_them() -> None:
    lengths = varlen.mixed_lengths(1009, 3, 31)
    assert sum(lengths) == 1009
    assert all(3 <= length <= 31 for length in lengths[:-1])
    assert any(one != other for one, other in pairwise(lengths))
    assert f"{varlen.TOKENS // 256} documents of 256 tokens" == varlen.EQUAL
    count = len(varlen.mixed_lengths(varlen.TOKENS, 16, 1024))
    assert f"{count} documents of 16 to 1024 tokens" == varlen.MIXED


def test_blocks_are_calls_within_the_context_of_their_way_behind_one_that_is_not_timed() -> None:
    entered: list[str] = []

    def within(name: str) -> AbstractContextManager[None]:
        entered.append(name)
        return nullcontext()

    called: list[str] = []
    ways = {name: lambda name=name: called.append(name) or len(called) for name in ("a", "b")}
    times, results = in_blocks(ways, rounds=3, seconds=0.0, within=within)
    assert entered == ["a", "b"] * 4
    assert called == ["a", "a", "b", "b"] * 4
    assert results == {"a": 13, "b": 15}
    assert all(0 < seconds < 1 for seconds in times.values())
