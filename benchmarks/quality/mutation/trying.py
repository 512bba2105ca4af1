"""Tries changes of sources in a copy of the checkout, against the tests that run the changed lines."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final
from xml.etree import ElementTree

from benchmarks.quality.mutation.forking import BROKEN, IMPORTED

SOURCES = ("_call", "_layer", "kernels", "masks", "_statistics", "caches")
#: Tests that reach the sources, less those of whole models, of pages in a browser and of several processes.
TESTS = (
    *("tests/masks", "tests/caches", "tests/kernels", "tests/native", "tests/nn", "tests/latent", "tests/positions"),
    *("tests/transformer", "tests/malformed", "tests/call", "tests/layer", "tests/plans", "tests/test_*.py"),
    *("tests/statistics", "tests/inspection/test_rollout.py", "tests/inspection/test_intervene.py"),
    *("tests/inspection/test_record.py", "tests/inspection/test_monitor.py", "tests/inspection/test_refusals.py"),
)
#: Where a package is tested itself: of these tests, all that run a changed line are tried, however long they take.
HOMES = {
    "_call": ("tests/call", "tests/plans", "tests/masks/test_meaning.py", "tests/kernels/test_dropout.py"),
    "_layer": ("tests/layer", "tests/plans"),
    "kernels": ("tests/kernels", "tests/native"),
    "masks": ("tests/masks",),
    "_statistics": ("tests/statistics", "tests/inspection"),
    "caches": ("tests/caches",),
}
#: Of packages that have no folder of tests named after them, or more than that.
HOMES_OF_FILES = HOMES | {
    "": ("tests/test_", "tests/call", "tests/layer", "tests/plans", "tests/kernels/test_particular_calls.py"),
    "nn": ("tests/nn", "tests/layer/test_layer.py", "tests/layer/test_padding.py"),
    "transformer": ("tests/transformer", "tests/masks/test_second_use.py"),
}
SKIPPED = ("test_builds.py", "test_docs.py", "test_public_surface.py")
#: Tests of whole models, of a browser and of several processes.
LONG = ("test_architectures.py", "test_pretended.py", "in_browser", "tests/distributed", "test_look_in", "aarch64")
FIRST_SECONDS, MOST_SECONDS = 6, 60  # of tests that a mutant is tried with, first and altogether
PYTEST = ("-n", "0", "-q", "-p", "no:cacheprovider", "-o", "addopts=-m 'not slow'")
PYTEST = (*PYTEST, "-W", "ignore::pytest.PytestAssertRewriteWarning")


@final
@dataclass(frozen=True)
class Test:
    """A test function with all its parameters, and how long they take together."""

    node: str
    seconds: float


@final
class Copy:
    """A copy of the checkout's tracked files and of its extension, where sources are changed and tested.

    Args:
        root: the checkout.
        folder: where the copy, and what was learned of the tests, is kept.
        packages: whose tests are tried. Default: those of `SOURCES`.
    """

    def __init__(self, root: Path, folder: Path, packages: Sequence[str] | None = None) -> None:
        self.tree, self._folder, self.packages = folder / "tree", folder, packages
        self._server: subprocess.Popen[str] | None = None
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=root, capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        extension = [str(path.relative_to(root)) for path in root.glob("src/clearhead/_native/*.so")]
        for name in (*listed, *extension):
            source, target = root / name, self.tree / name
            if source.is_file() and not (target.exists() and target.read_bytes() == source.read_bytes()):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            with self._server:  # which closes its pipes, so that it ends
                pass

    def test_files(self) -> list[str]:
        patterns = TESTS
        if self.packages is not None:
            homes = {home for package in self.packages for home in homes_of(package)}
            patterns = tuple(f"{home}*.py" if home.endswith("_") else home for home in homes)
        found = [path for pattern in patterns for path in self.tree.glob(pattern)]
        files = {file for path in found for file in (path.rglob("test_*.py") if path.is_dir() else (path,))}
        names = sorted(str(file.relative_to(self.tree)) for file in files if file.name not in SKIPPED)
        return [name for name in names if self.packages is None or not any(long in name for long in LONG)]

    def run(self, arguments: Sequence[str]) -> str:
        """Run Python in the copy; returns what it printed."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.tree, env={**os.environ, **self._environment()}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        return done.stdout

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.tree / "src"), str(self.tree)])
        settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "mutants"}
        # Compiled files are told from changed sources by whole seconds.
        return settings | {"PYTHONDONTWRITEBYTECODE": "1"}

    def try_tests(self, tests: Iterable[Test], instructions: str | None = None) -> tuple[str, str]:
        """Run tests until one fails; returns ``passed``, ``failed``, ``crashed`` or ``too long``, and that test.

        Args:
            tests: which, in this order.
            instructions: the best instruction set that they may use; this machine's if ``None``.
        """
        chosen = list(tests)
        if not chosen:
            return "passed", ""
        listed, output = self._folder / "chosen", self._folder / "output"
        listed.write_text("\n".join(test.node for test in chosen), encoding="utf-8")
        request = {
            "seconds": int(60 + 3 * sum(test.seconds for test in chosen)),
            "output": str(output),
            "environment": {} if instructions is None else {"CLEARHEAD_TEST_ISA": instructions},
            "arguments": [*PYTEST, "-x", f"@{listed}"],
        }
        status = self._ask(request)
        printed = output.read_text(encoding="utf-8", errors="replace")
        if status == BROKEN:
            raise RuntimeError(f"pytest did not start:\n{printed}")
        if status <= 0:
            too_long = status in (-signal.SIGXCPU, -signal.SIGKILL)
            return ("passed" if status == 0 else "too long" if too_long else "crashed"), ""
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
        return "failed", failed[0] if failed else "an import"

    def try_in_turn(self, tests: Iterable[Iterable[Test]], instructions: str | None = None) -> tuple[str, str]:
        """Run lists of tests one after the other, as `try_tests` does, until one test fails."""
        outcome = ("passed", "")
        for chosen in tests:
            outcome = self.try_tests(chosen, instructions)
            if outcome[0] != "passed":
                break
        return outcome

    def failing(self, tests: Iterable[str]) -> list[str]:
        """Those of some tests that fail although nothing is changed."""
        chosen = [Test(test, 10.0) for test in tests]
        return [test.node for test in chosen if self.try_tests([test])[0] != "passed"] if self._any(chosen) else []

    def _any(self, chosen: list[Test]) -> bool:
        return self.try_tests(chosen)[0] != "passed"

    def _ask(self, request: dict[str, object]) -> int:
        if self._server is None:
            program = Path(__file__).with_name("forking.py")
            self._server = subprocess.Popen(
                [sys.executable, "-P", str(program), *self._imported()], cwd=self.tree, text=True,
                env={**os.environ, **self._environment()}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        server = self._server
        if server.stdin is None or server.stdout is None:
            raise RuntimeError("the process that forks has no pipes")
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    def _imported(self) -> list[str]:
        """What is imported before the forks: of what tests need, what some file of the copy names."""
        files = [path for folder in ("src", "tests") for path in (self.tree / folder).rglob("*.py")]
        words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
        return [name for name in IMPORTED if name == "pytest" or name.partition(".")[0] in words]


@final
class Tests:
    """Which tests run which lines, learned by running them once under coverage.

    Test files that are new or have changed since are run again, all of them if a source has changed.
    """

    def __init__(self, copy: Copy, folder: Path) -> None:
        from coverage import CoverageData  # absent where only the results are shown

        self._copy, self._data, self._known = copy, folder / "coverage", folder / "traced.json"
        self._reports = folder / "reports"
        self._reports.mkdir(exist_ok=True)
        self._trace(folder)
        self._seconds = self._durations()
        data = CoverageData(str(self._data))
        data.read()
        self._lines: dict[str, dict[int, set[str]]] = {}
        for file in data.measured_files():
            lines = self._lines.setdefault(file[file.index("src/clearhead/") :], {})
            for line, names in data.contexts_by_lineno(file).items():
                lines.setdefault(line, set()).update(names)

    def _trace(self, folder: Path) -> None:
        tree, files = self._copy.tree, self._copy.test_files()
        packages = SOURCES if self._copy.packages is None else tuple(self._copy.packages)
        sources = _hash(sorted(tree.glob("src/**/*.py"))) + "".join(packages)
        self.hash = _hash(tree / file for file in files)
        found = {"sources": sources, **{file: _hash([tree / file]) for file in files}}
        known = json.loads(self._known.read_text()) if self._known.exists() else {}
        if known.get("sources") != sources:
            known = {}
            self._data.unlink(missing_ok=True)
            for report in self._reports.iterdir():
                report.unlink()
        changed = [file for file in files if known.get(file) != found[file]]
        if not changed:
            return
        print(f"Running {len(changed)} test files unchanged, to learn which lines they run …", flush=True)
        settings = folder / "coverage.ini"
        sources_of = ", ".join(str(tree / "src/clearhead" / name) for name in packages)
        settings.write_text(
            f"[run]\nsource = {sources_of}\ndynamic_context = test_function\ndata_file = {self._data}\n",
            encoding="utf-8",
        )
        report = self._reports / f"{len(list(self._reports.iterdir()))}.xml"
        coverage = ("-m", "coverage", "run", f"--rcfile={settings}", "--append")
        printed = self._copy.run([*coverage, "-m", "pytest", *PYTEST, f"--junitxml={report}", *changed])
        print(printed.strip().splitlines()[-1], flush=True)
        if not report.exists():
            raise SystemExit(f"The tests did not run:\n{printed[-3000:]}")
        self._known.write_text(json.dumps(found), encoding="utf-8")

    def _durations(self) -> dict[str, float]:
        """Seconds of each test function that passes."""
        seconds: dict[str, float] = {}
        failed = set[str]()
        for report in sorted(self._reports.iterdir(), key=lambda path: int(path.stem)):
            newest: dict[str, float] = {}
            for case in ElementTree.parse(report).iter("testcase"):
                name = f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}"
                newest[name] = newest.get(name, 0) + float(case.get("time", 0))
                if case.find("failure") is not None or case.find("error") is not None:
                    failed.add(name)
            seconds.update(newest)
        return {name: taken for name, taken in seconds.items() if name not in failed}

    def _node(self, name: str) -> str | None:
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            file = "/".join(parts[:count]) + ".py"
            if (self._copy.tree / file).is_file():
                return "::".join([file, *parts[count:]])
        return None

    def of_files(self, files: Sequence[str], without: str) -> tuple[list[Test], list[Test]]:
        """The tests of some files and folders but one, fastest first; some that are tried first, and all others."""
        first, second = list[Test](), list[Test]()
        total = 0.0
        for name in sorted(self._seconds, key=lambda name: (self._seconds[name], name)):
            node = self._node(name)
            if node is not None and node.startswith(tuple(files)) and not node.startswith(without):
                total += self._seconds[name]
                (first if total < MOST_SECONDS else second).append(Test(node, self._seconds[name]))
        return first, second

    def of_lines(self, path: str, lines: tuple[int, int]) -> tuple[list[Test], list[Test]]:
        """The tests that run these lines, fastest first; some that are tried first, and others."""
        by_line = self._lines.get(path, {})
        near = {name for line in range(lines[0], lines[1] + 1) for name in by_line.get(line, ())} - {""}
        every = {name for names in by_line.values() for name in names} - {""}
        homes = homes_of(package_of(path))
        first, second, last = list[Test](), list[Test](), list[Test]()
        total = 0.0
        for names in (near, every - near):
            for name in sorted(names & self._seconds.keys(), key=lambda name: (self._seconds[name], name)):
                node, seconds = self._node(name), self._seconds[name] + 0.01
                if node is None:
                    continue
                if total + seconds < MOST_SECONDS:
                    total += seconds
                    (first if total < FIRST_SECONDS else second).append(Test(node, seconds))
                elif names is near and node.startswith(homes):
                    last.append(Test(node, seconds))
        return first, [*second, *last]


def package_of(path: str) -> str:
    """The folder of a source below ``src/clearhead``, empty for a source that lies there itself."""
    folder = str(Path(path).parent.as_posix()).removeprefix("src/clearhead")
    return folder.removeprefix("/")


def homes_of(package: str) -> tuple[str, ...]:
    """Where a package is tested: as it is listed, or in the folder of its name."""
    return HOMES_OF_FILES.get(package, (f"tests/{package}",))


def _hash(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
