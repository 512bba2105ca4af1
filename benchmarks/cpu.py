"""Clearhead beside everybody else on this machine's CPU: every peer in one process, timed in turn, held against bars.

    python -m benchmarks.cpu [--only PATTERN] [--rounds 7] [--json FILE] [--docs]
    python -m benchmarks.cpu --show FILE [FILE ...] [--docs]

Peers: SDPA, FlexAttention compiled, x-transformers, transformers' eager attention, ONNX Runtime, OpenVINO and
`nn.MultiheadAttention`; ``pip install -c constraints.txt -e ".[bench]"`` brings those that are not PyTorch's. One that
is not installed is left out by name. Beside them run two ceilings: matrix products, and reading memory. Before anybody
is timed their results are compared with Clearhead's; a different result is named, and makes the command fail. The whole
table takes about twenty minutes, most of which FlexAttention spends compiling.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from pathlib import Path

import torch

from benchmarks.comparing import Case, Result, read, write
from benchmarks.comparing.options import comparison_options
from benchmarks.comparing.page import fill
from benchmarks.comparing.pictures import draw_bars, draw_rates
from benchmarks.comparing.tables import markdown, show
from benchmarks.cpu_cases import all_cases
from benchmarks.cpu_cases.attention import FORWARD, FORWARD_BACKWARD
from benchmarks.cpu_cases.ceilings import GEMM
from benchmarks.timing import console, machine, progress

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
PAGE = ROOT / "docs" / "benchmarks.md"
RATES, BARS = ROOT / "docs" / "images" / "cpu-rates.png", ROOT / "docs" / "images" / "cpu-bars.png"
PICTURES = f"""![What is measured as a share of every bar](images/{BARS.name})

![GFLOP/s over the length](images/{RATES.name})"""
PEERS = ("transformers", "x-transformers", "onnxruntime", "openvino")


def measure(cases: list[Case], rounds: int, keep: Path | None) -> list[Result]:
    """Measure in order, say how each case went, and keep what there is so far."""
    results: list[Result] = []
    for case in progress(cases, "measuring"):
        result = case.measure(rounds)
        results.append(result)
        verdicts = ", ".join(f"{verdict.bar}: {verdict.text}" for verdict in result.verdicts)
        console.print(f"{case.section}, {case.name} ({result.kernel or 'mixed'}): {verdicts}", highlight=False)
        if keep is not None:
            write(keep, described_machine(), results)
    return results


def described_machine() -> str:
    """The machine, and the versions of the peers that are installed."""
    versions = []
    for name in PEERS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([machine(), *versions])


def arguments() -> argparse.Namespace:
    writes = f"write tables and pictures into {PAGE.relative_to(ROOT)}"
    parser = comparison_options(__doc__.splitlines()[0], rounds=7, results=RESULTS, writes=writes)
    parser.add_argument("--list", action="store_true", help="name the work and stop")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    pattern = re.compile(chosen.only, re.IGNORECASE)
    cases = [case for case in all_cases() if pattern.search(f"{case.section}, {case.name}")]
    if chosen.list:
        console.print("\n".join(f"{case.section}, {case.name}" for case in cases), highlight=False)
        return
    if not cases:
        raise SystemExit(f"--only {chosen.only!r} matches nothing; --list names the work")
    if chosen.show:
        where, results = read(chosen.show)
        results = [result for result in results if pattern.search(f"{result.section}, {result.name}")]
    else:
        torch.manual_seed(0)
        keep = chosen.json or (None if chosen.only else RESULTS)
        where, results = described_machine(), measure(cases, chosen.rounds, keep)
    show(console, where, results)
    if chosen.docs:
        draw_rates(results, (FORWARD, FORWARD_BACKWARD), GEMM, RATES)
        draw_bars(results, BARS)
        fill(PAGE, "cpu", f"{PICTURES}\n\n{markdown(where, results)}")
        console.print(f"written: {PAGE}, {RATES}, {BARS}")
    if any(result.wrong for result in results):
        raise SystemExit("some results differ from Clearhead's by more than the tolerance; they are named above")


if __name__ == "__main__":
    main()
