"""Clearhead on a GPU: its module beside `nn.MultiheadAttention`, and a record beside keeping every weight.

    python -m benchmarks.gpu [--only PATTERN] [--rounds 15] [--json FILE] [--docs]
    python -m benchmarks.gpu --show FILE [FILE ...] [--docs]

Every kernel of Clearhead that supports the call is forced in turn. The record (entropy, received, max_logit, top-8)
stands beside eager attention that builds the weights and computes the same from them. Without a GPU nothing is
measured.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.comparing.command import comparison_options, fail_if_wrong, measure_or_show
from benchmarks.comparing.page import fill
from benchmarks.comparing.tables import markdown
from benchmarks.gpu_cases import all_cases
from benchmarks.timing import console

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "benchmarks.md"


def main() -> None:
    writes = f"write the tables into {PAGE.relative_to(ROOT)}"
    parser = comparison_options(__doc__.splitlines()[0], rounds=15, results=RESULTS, writes=writes)
    chosen = parser.parse_args()
    machine = ""
    if not chosen.show and not chosen.list:
        if not torch.cuda.is_available():
            raise SystemExit("no GPU: torch.cuda.is_available() is False, so there is nothing to measure here")
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    where, results = measure_or_show(chosen, all_cases("cuda"), machine, RESULTS)
    if chosen.docs:
        fill(PAGE, "gpu", markdown(where, results))
        console.print(f"written: {PAGE}")
    fail_if_wrong(results)


if __name__ == "__main__":
    main()
