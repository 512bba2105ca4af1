"""What every benchmark's command does: measure line by line, keep what was measured, and fill the pages."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

import torch

from benchmarks import figures
from benchmarks.figures import Figures, Kept
from benchmarks.machine import machine, versions
from benchmarks.memory import in_a_process
from benchmarks.timing import console

__all__ = ["Benchmark", "Effort", "Line", "none_wrong"]

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Args:
        rounds: how often everything is timed.
        smallest: whether tiny inputs stand for the real ones, as in the tests.
        peers: whether the peers that are not PyTorch's, and what has to be compiled, take part.
    """

    rounds: int
    smallest: bool = False
    peers: bool = True

    def size(self, full: int, smallest: int = 16) -> int:
        """A size of the real work, or the smallest that still shows all of it."""
        return min(full, smallest) if self.smallest else full

    def least(self, seconds: float) -> float:
        """How long one figure takes at least; the smallest work is called once."""
        return 0.0 if self.smallest else seconds

    def in_a_process(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a process that starts from nothing; the smallest work stays in this one."""
        return function(*arguments) if self.smallest else in_a_process(function, *arguments)


@final
@dataclass(frozen=True)
class Line:
    """One piece of work.

    Args:
        name: in the result file; of the real work, whatever the effort.
        measure: gives plain data.
    """

    name: str
    measure: Callable[[], Any]


def none_wrong(measured: Figures) -> list[str]:
    """Nothing in the figures can be wrong."""
    return []


@final
@dataclass(frozen=True)
class Benchmark:
    """A command ``python -m benchmarks.FOLDER.NAME`` and its result file.

    Args:
        name: of the file, or of the folder whose main command it is.
        description: its docstring.
        lines: the work.
        texts: what the figures say, by marker; a line that was not measured is a KeyError.
        minutes: about how long the whole takes.
        rounds: how often everything is timed by default.
        peers: libraries whose versions are named.
        wrong: what in the figures must not be, one sentence each.
    """

    name: str
    description: str | None
    lines: Callable[[Effort], Iterable[Line]]
    texts: Callable[[Figures], dict[str, str]]
    minutes: float
    rounds: int = 5
    peers: tuple[str, ...] = ()
    wrong: Callable[[Figures], list[str]] = none_wrong

    @property
    def results(self) -> Path:
        """The result file."""
        return figures.RESULTS / f"{self.name}.json"

    @property
    def command(self) -> str:
        """What runs it."""
        return f"python -m {figures.command_of(self.name)}"

    def main(self, arguments: list[str] | None = None) -> None:
        """Run the command.

        Raises:
            SystemExit: if a line failed or gave something wrong; what was measured is kept.
        """
        chosen = self._parser().parse_args(arguments)
        if chosen.smallest and chosen.docs:
            raise SystemExit("--smallest measures nothing that a page may show; leave out --docs")
        kept, failed = (figures.read(chosen.json or self.results), []) if chosen.show else self._measure(chosen)
        wrong = self.wrong(kept.figures)
        self._show(kept)
        if chosen.docs:
            for path in figures.fill_pages():
                console.print(f"written: {path.relative_to(figures.ROOT)}")
        if failed or wrong:
            raise SystemExit("\n".join([*(f"failed: {line}" for line in failed), *wrong]))

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=self.command,
            description=self.description,
            epilog=f"The whole takes about {self.minutes:g} minutes on two processors.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--list", action="store_true", help="name the work and stop")
        parser.add_argument("--only", metavar="PATTERN", default="", help="measure work whose name matches this regex")
        how_often = f"how often everything is timed (default {self.rounds}, at least 3)"
        parser.add_argument("--rounds", type=int, help=how_often)
        parser.add_argument("--smallest", action="store_true", help="tiny inputs: shows that the command works")
        parser.add_argument("--no-peers", dest="peers", action="store_false", help="PyTorch's own ways only")
        parser.add_argument("--json", type=Path, metavar="FILE", help=f"the result file (default {self.results})")
        parser.add_argument("--show", action="store_true", help="measure nothing; show the result file")
        parser.add_argument("--docs", action="store_true", help="write the figures of all result files into the pages")
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        parser.add_argument("--date", default=today, help="the day on which a run of several benchmarks began")
        return parser

    def _measure(self, chosen: argparse.Namespace) -> tuple[Kept, list[str]]:
        """Measure line by line; gives what is known now, and the lines that failed with their errors."""
        effort = Effort(chosen.rounds or (3 if chosen.smallest else self.rounds), chosen.smallest, chosen.peers)
        pattern = re.compile(chosen.only, re.IGNORECASE)
        lines = [line for line in self.lines(effort) if pattern.search(line.name)]
        if chosen.list:
            console.print("\n".join(line.name for line in lines), highlight=False, markup=False, soft_wrap=True)
            raise SystemExit(0)
        if not lines:
            raise SystemExit(f"--only {chosen.only!r} matches nothing; --list names the work")
        about = (machine(), chosen.date, versions(self.peers), self.command)
        kept = Kept(*about, self._before(about) if chosen.only else {})
        path = chosen.json or self._place(chosen, kept)
        torch.manual_seed(0)
        failed: list[str] = []
        for number, line in enumerate(lines, 1):
            console.print(f"{number}/{len(lines)} {line.name}", highlight=False, markup=False, soft_wrap=True)
            try:
                kept.figures[line.name] = json.loads(json.dumps(line.measure()))
            except Exception as error:  # a later line may still be measured
                failed.append(f"{line.name}: {type(error).__name__}: {' '.join(str(error).split())}")
                console.print(traceback.format_exc(), highlight=False, markup=False)
            if path is not None and kept.figures:
                kept.write(path)
        return kept, failed

    def _before(self, about: tuple[str, ...]) -> Figures:
        """The figures of the same machine, day and versions that were kept before."""
        if not self.results.exists():
            return {}
        before = figures.read(self.results)
        return before.figures if (before.machine, before.date, before.versions, before.command) == about else {}

    def _place(self, chosen: argparse.Namespace, kept: Kept) -> Path | None:
        """The result file, unless this run is only a part of one."""
        if chosen.smallest or not chosen.peers:
            return None
        if chosen.only and not kept.figures and self.results.exists():
            console.print("not kept: the result file is of another machine, day or version; --json FILE keeps a part")
            return None
        return self.results

    def _show(self, kept: Kept) -> None:
        try:
            texts = kept.texts | self.texts(kept.figures)
        except KeyError as missing:
            console.print(f"the texts need the line {missing}, which was not measured; the figures:")
            texts = {name: json.dumps(value, ensure_ascii=False) for name, value in kept.figures.items()}
        for what, text in texts.items():
            shown = f"\n{text}\n" if "\n" in text else text
            console.print(f"{what}: {shown}", highlight=False, markup=False, soft_wrap=True)
