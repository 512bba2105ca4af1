"""Clearhead beside eager attention inside every architecture of transformers that a tiny configuration can build.

    python -m benchmarks.quality.architectures [--only NAME ...] [--jobs 2] [--json FILE] [--docs]
    python -m benchmarks.quality.architectures --list
    python -m benchmarks.quality.architectures --show FILE [--docs]

Each architecture gets the implementation by both routes, after construction and at construction, and by `upgrade`. Its
outputs, weights, cached steps, generated tokens and gradients are compared with eager attention's, without padding and
padded on either side; a later token must not change earlier outputs where it does not with eager attention. How much
each mechanism of attention changes the output is measured. Nothing is downloaded. The whole loop takes about twenty
minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
from pathlib import Path

from benchmarks.figures import RESULTS, ROOT, Figures, Kept, fill_pages
from benchmarks.machine import machine
from benchmarks.quality.architectures_cases.report import show
from benchmarks.quality.architectures_cases.results import Outcome, Run, read, write
from benchmarks.quality.architectures_cases.running import run_all
from benchmarks.quality.architectures_cases.summary import counts_of, summarize
from benchmarks.quality.architectures_cases.types import Architecture, architectures
from benchmarks.timing import console

#: Every outcome of the last run; git ignores it.
OUTCOMES = ROOT / "out" / "architectures.json"
SUMMARY = RESULTS / "architectures.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", nargs="+", default=[], help="these model types only")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of one architecture (default 120)")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="keep the outcomes here (default for the whole loop: out/architectures.json)",
    )
    parser.add_argument("--show", type=Path, metavar="FILE", help="compute nothing; show kept outcomes")
    parser.add_argument("--list", action="store_true", help="name the architectures and stop")
    parser.add_argument("--docs", action="store_true", help="write the summary, and the figures into the pages")
    return parser.parse_args()


def chosen_architectures(names: list[str]) -> list[Architecture]:
    found = architectures()
    unknown = sorted(set(names) - {architecture.name for architecture in found})
    if unknown:
        raise SystemExit(f"--only {', '.join(unknown)}: no such model type; --list names them")
    return [architecture for architecture in found if not names or architecture.name in names]


def run(chosen: list[Architecture], jobs: int, seconds: float, keep: Path | None) -> Run:
    """Compare the chosen architectures; the outcomes of others are kept as long as the versions are the same."""
    kept: dict[str, Outcome] = {}
    if keep is not None and keep.exists() and (before := read(keep)).versions == versions():
        kept = {outcome.name: outcome for outcome in before.outcomes}
    outcomes: list[Outcome] = []
    for outcome in run_all(chosen, jobs, seconds):
        outcomes.append(outcome)
        kept[outcome.name] = outcome
        found = f"{len(outcomes)}/{len(chosen)} {outcome.name}: {outcome.status}"
        console.print(f"{found} {outcome.not_built}"[:200], highlight=False)
        if keep is not None and (len(outcomes) % 20 == 0 or len(outcomes) == len(chosen)):
            write(keep, described(kept))
    return described(kept)


def described(outcomes: dict[str, Outcome]) -> Run:
    today = datetime.date.today().isoformat()
    return Run(versions(), [outcomes[name] for name in sorted(outcomes)], today, machine())


def versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))


def texts(measured: Figures) -> dict[str, str]:
    return counts_of(measured)


def main() -> None:
    options = arguments()
    if options.show:
        found = read(options.show)
    else:
        chosen = chosen_architectures(options.only)
        if options.list:
            console.print("\n".join(f"{item.name}: {item.class_name}" for item in chosen), highlight=False)
            return
        keep = options.json if options.only else options.json or OUTCOMES
        found = run(chosen, options.jobs, options.seconds, keep)
    show(console, found)
    if options.docs:
        about = (found.machine, found.date, found.versions, "python -m benchmarks.quality.architectures")
        Kept(*about, summarize(found)).write(SUMMARY)
        for path in fill_pages():
            console.print(f"written: {path.relative_to(ROOT)}")
    if any(outcome.wrong for outcome in found.outcomes):
        raise SystemExit("some architectures differ from eager attention; they are named above")


if __name__ == "__main__":
    main()
