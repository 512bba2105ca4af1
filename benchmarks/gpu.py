"""Clearhead on a GPU: its module beside `nn.MultiheadAttention`, and a record beside keeping every weight.

    python -m benchmarks.gpu [--only PATTERN] [--rounds 15] [--json FILE] [--docs]
    python -m benchmarks.gpu --show FILE [FILE ...] [--docs]

Every kernel of Clearhead that takes the call is forced in turn. The record (entropy, received, max_logit, top-8) stands
beside eager attention that builds the weights and computes the same from them. Without a GPU nothing is measured.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from benchmarks.comparing import Result, read, write
from benchmarks.comparing.options import comparison_options
from benchmarks.comparing.page import fill
from benchmarks.comparing.tables import markdown, show
from benchmarks.gpu_cases import all_cases
from benchmarks.timing import console, progress

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "benchmarks.md"


def measure(pattern: re.Pattern[str], rounds: int, keep: Path | None) -> tuple[str, list[Result]]:
    """Measure in order on the current GPU, keeping what there is so far."""
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    cases = [case for case in all_cases("cuda") if pattern.search(f"{case.section}, {case.name}")]
    results: list[Result] = []
    for case in progress(cases, "measuring"):
        results.append(case.measure(rounds))
        if keep is not None:
            write(keep, where, results)
    return where, results


def main() -> None:
    writes = f"write the tables into {PAGE.relative_to(ROOT)}"
    parser = comparison_options(__doc__.splitlines()[0], rounds=15, results=RESULTS, writes=writes)
    chosen = parser.parse_args()
    if chosen.show:
        where, results = read(chosen.show)
    elif not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is False, so there is nothing to measure here")
    else:
        torch.manual_seed(0)
        keep = chosen.json or (None if chosen.only else RESULTS)
        where, results = measure(re.compile(chosen.only, re.IGNORECASE), chosen.rounds, keep)
    show(console, where, results)
    if chosen.docs:
        fill(PAGE, "gpu", markdown(where, results))
        console.print(f"written: {PAGE}")
    if any(result.wrong for result in results):
        raise SystemExit("some results differ from Clearhead's by more than the tolerance; they are named above")


if __name__ == "__main__":
    main()
