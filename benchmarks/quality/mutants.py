"""Small faults put into the sources, and how many of them the tests catch.

    python -m benchmarks.quality.mutants [--sample 150] [--seed 0] [--only NAME] [--work FOLDER]
    python -m benchmarks.quality.mutants --files PATH ... [--sample 60] [--seed 0] [--work FOLDER]

A mutant is a copy of the sources with one change. The sample has equally many mutants of six packages: ``_call``,
``_layer``, ``kernels``, ``masks``, ``_statistics`` and ``caches``. cosmic-ray makes them: it replaces an operator, a
comparison, a number or a constant, negates a condition, empties a loop or removes a decorator. One more operator, of
this command, removes a keyword argument. Twenty faults in C++ are listed in ``benchmarks/quality/mutation/native.py``.
``--only`` names one package, or ``native`` for the faults in C++.

``--files`` names sources of any package instead, such as those that a change touches, and the sample is of their
mutants together. They are tried with the tests of their packages alone, less those of whole models, of a browser and
of several processes, so that 60 mutants take about half an hour. What it learns is kept apart, in ``files`` below
``--work``.

Docstrings, annotations, texts of errors, ``__repr__``, imports, ``TYPE_CHECKING`` blocks and decorators without an
effect at run time are left out: no test has to catch a change of them. An operator is replaced by the likeliest
mistakes only. Others, such as ``+`` by ``**``, fail in every test that reaches them.

The command works in a copy of the checkout, in ``--work``. It first runs the tests under coverage, to learn which
lines each test runs. It then tries each mutant with the tests that run its lines, the fastest first, and at most 60
seconds of them. Faults in C++ are tried with all tests of the kernels, of statistics and of state. A failed test, a
crash, or a run of three times the expected length catches the mutant. After an interruption, or with new tests, run
the command again: it keeps the mutants that were caught, and tries the survivors again.

``benchmarks/results/mutants.json`` holds the numbers of each package and the survivors. Some survivors compute the
same as the source; ``benchmarks/quality/mutation/equivalent.py`` lists them with reasons, and they do not count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from benchmarks.quality.mutation.equivalent import EQUIVALENT
from benchmarks.quality.mutation.native import FAULTS, FOLDER, Build
from benchmarks.quality.mutation.trying import SOURCES, Copy, Tests, package_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
NATIVE_TESTS = (
    "tests/native",
    "tests/kernels",
    "tests/statistics",
    "tests/plans",
    "tests/call/test_packed.py",
)


@final
@dataclass(frozen=True)
class Trial:
    """One mutant.

    Args:
        package: that it belongs to.
        where: file and line.
        change: what is changed.
        changed: the changed source, or the fault, by which an outcome is kept.
        run: tries it, and returns the outcome and the test that fails.
    """

    package: str
    where: str
    change: str
    changed: str
    run: Callable[[], tuple[str, str]]

    @property
    def name(self) -> tuple[str, str]:
        """By which `EQUIVALENT` lists it: lines move, so that the file alone is named."""
        return self.where.partition(":")[0], self.change

    @property
    def is_equivalent(self) -> bool:
        return self.name in EQUIVALENT

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.where} {self.change} {self.changed}".encode()).hexdigest()[:16]


def trials_of_package(package: str, count: int, seed: int, copy: Copy, tests: Tests) -> list[Trial]:
    from benchmarks.quality.mutation.drawing import draw  # cosmic-ray is absent where only the results are shown

    return python_trials(draw(copy.tree, f"src/clearhead/{package}", count, seed), copy, tests)


def trials_of_files(files: Sequence[str], count: int, seed: int, copy: Copy, tests: Tests) -> list[Trial]:
    from benchmarks.quality.mutation.drawing import draw_from

    return python_trials(draw_from(copy.tree, files, count, f"{seed} {' '.join(files)}"), copy, tests)


def python_trials(mutants: Sequence[Any], copy: Copy, tests: Tests) -> list[Trial]:
    found = []
    for mutant in mutants:
        source = copy.tree / mutant.path
        text = source.read_text(encoding="utf-8")
        changed = mutant.apply(text)

        def run(
            mutant: Any = mutant, source: Path = source, text: str = text, changed: str = changed
        ) -> tuple[str, str]:
            source.write_text(changed, encoding="utf-8")
            try:
                return copy.try_in_turn(tests.of_lines(mutant.path, mutant.lines))
            finally:
                source.write_text(text, encoding="utf-8")

        package = package_of(mutant.path) or "clearhead"
        found.append(Trial(package, f"{mutant.path}:{mutant.lines[0]}", mutant.change, changed, run))
    return found


def native_trials(copy: Copy, tests: Tests, work: Path) -> list[Trial]:
    build = Build(copy.tree, work / "objects")
    chosen = tests.of_files(NATIVE_TESTS, without="tests/native/test_plan.py")  # it chooses instruction sets itself
    build.unchanged()
    outcome = copy.try_in_turn(chosen, "generic")
    if outcome[0] != "passed":
        raise SystemExit(f"The unchanged extension fails: {outcome[1]}")
    found = []
    for fault in FAULTS:
        text = (copy.tree / FOLDER / fault.file).read_text(encoding="utf-8")

        def run(fault: Any = fault) -> tuple[str, str]:
            if not build.with_fault(fault):
                raise SystemExit(f"{fault.file} does not compile: {fault.description}")
            return copy.try_in_turn(chosen, "generic")

        where = f"{FOLDER}/{fault.file}:{fault.line(text)}"
        found.append(Trial("native", where, fault.description, fault.apply(text), run))
    return found


def table(trials: list[Trial], outcomes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of each package how many mutants there are, how many are equivalent and caught, and the part that is caught."""
    packages: dict[str, dict[str, float]] = {}
    for name in (*dict.fromkeys(trial.package for trial in trials), "all"):
        of_package = [trial for trial in trials if name in (trial.package, "all")]
        caught = sum(outcomes[trial.key]["outcome"] != "passed" for trial in of_package)
        equivalent = sum(outcomes[trial.key]["outcome"] == "passed" and trial.is_equivalent for trial in of_package)
        percent = round(100 * caught / max(1, len(of_package) - equivalent), 1)
        packages[name] = {"mutants": len(of_package), "equivalent": equivalent, "caught": caught, "percent": percent}
    return packages


def try_all(trials: list[Trial], work: Path, tests: str) -> dict[str, Any]:
    """The outcome of each trial; those known from another run are kept, survivors only if the tests are the same."""
    kept = work / "outcomes.json"
    outcomes: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for number, trial in enumerate(trials, 1):
        known = outcomes.get(trial.key)
        if known is None or (known["outcome"] == "passed" and known["tests"] != tests):
            if known is not None and trial.is_equivalent:
                continue
            outcome, test = trial.run()
            outcomes[trial.key] = known = {"outcome": outcome, "test": test, "tests": tests}
            kept.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
            word = "survived" if outcome == "passed" else f"caught ({outcome}) {test}"
            print(f"{number}/{len(trials)} {trial.where} {trial.change[:160]}\n    {word}", flush=True)
    return outcomes


def check_the_tests(trials: list[Trial], outcomes: dict[str, Any], copy: Copy) -> None:
    """Refuse a result where a test that caught a mutant also fails without it."""
    # Whole functions: pytest cuts the names of parameters short.
    tests = {outcomes[trial.key]["test"].partition("[")[0] for trial in trials} - {"", "an import"}
    failing = copy.failing(sorted(tests))
    if failing:
        raise SystemExit(f"These tests fail although nothing is changed: {', '.join(failing)}")


def chosen_files(names: Sequence[Path]) -> list[str]:
    """Sources by their paths from the root of the checkout, in order. Raise for anything else."""
    files = {path.resolve() if path.is_absolute() else (ROOT / path).resolve() for path in names}
    wrong = [
        path
        for path in files
        if not (path.is_file() and path.suffix == ".py" and (ROOT / "src" / "clearhead").resolve() in path.parents)
    ]
    if wrong:
        raise SystemExit(f"--files: expected Python sources below src/clearhead, got {', '.join(map(str, wrong))}")
    return sorted(path.relative_to(ROOT.resolve()).as_posix() for path in files)


def try_files(files: list[str], options: argparse.Namespace) -> tuple[list[Trial], dict[str, Any]]:
    """Mutants of some sources, with the tests of their packages."""
    work = options.work / "files"
    work.mkdir(parents=True, exist_ok=True)
    with Copy(ROOT, work, sorted({package_of(file) for file in files})) as copy:
        tests = Tests(copy, work)
        trials = trials_of_files(files, options.sample, options.seed, copy, tests)
        outcomes = try_all(trials, work, tests.hash)
        check_the_tests(trials, outcomes, copy)
    return trials, outcomes


def try_packages(names: Sequence[str], options: argparse.Namespace) -> tuple[list[Trial], dict[str, Any]]:
    """Mutants of packages, equally many of each of the six, and the faults in C++ if ``native`` is among the names."""
    options.work.mkdir(parents=True, exist_ok=True)
    with Copy(ROOT, options.work) as copy:
        tests = Tests(copy, options.work)
        rest = options.sample % len(SOURCES)
        shares = {name: options.sample // len(SOURCES) + (n < rest) for n, name in enumerate(SOURCES)}
        packages = [name for name in names if name != "native"]
        trials = [
            trial for name in packages for trial in trials_of_package(name, shares[name], options.seed, copy, tests)
        ]
        outcomes = try_all(trials, options.work, tests.hash)
        check_the_tests(trials, outcomes, copy)
        if "native" in names:
            native = native_trials(copy, tests, options.work)
            outcomes.update(try_all(native, options.work, tests.hash))
            trials += native
    return trials, outcomes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.mutants", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--sample", type=int, help="how many mutants together. Default 150, and 60 of --files")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", choices=(*SOURCES, "native"), help="one package, or the faults in C++")
    chosen.add_argument("--files", type=Path, nargs="+", help="sources, of any package")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "clearhead-mutants")
    parser.add_argument(
        "--json", type=Path, default=RESULTS, help="where the numbers go; whole runs only, without --only or --files"
    )
    options = parser.parse_args(arguments)
    options.sample = options.sample or (60 if options.files else 150)
    if options.files:
        trials, outcomes = try_files(chosen_files(options.files), options)
    else:
        trials, outcomes = try_packages([options.only] if options.only else [*SOURCES, "native"], options)
    found = table(trials, outcomes)
    for name, row in found.items():
        counts = f"{row['mutants']:4} mutants, {row['equivalent']:3} equivalent, {row['caught']:4} caught"
        print(f"{name:12} {counts}, {row['percent']} %")
    survivors = [
        {"where": trial.where, "change": trial.change, "equivalent": EQUIVALENT.get(trial.name)}
        for trial in trials
        if outcomes[trial.key]["outcome"] == "passed"
    ]
    for survivor in survivors:
        print(f"survived: {survivor['where']} {survivor['change']}")
    if options.only or options.files:
        return
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    command = f"python -m benchmarks.quality.mutants --sample {options.sample} --seed {options.seed}"
    result = {"command": command, "commit": commit.strip(), "packages": found, "survivors": survivors}
    options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
