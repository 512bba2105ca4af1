"""Clearhead beside other implementations of attention on this machine's CPU, timed in turn in one process.

    python -m benchmarks.cpu [--only PATTERN] [--rounds 7] [--json FILE] [--docs]
    python -m benchmarks.cpu --show FILE [FILE ...] [--docs]

Peers: SDPA, FlexAttention compiled, x-transformers, transformers' eager attention, ONNX Runtime, OpenVINO and
`nn.MultiheadAttention`; ``pip install -c constraints.txt -e ".[bench]"`` installs those that are not PyTorch's. A peer
that is not installed is skipped, with a remark. Two ceilings are timed in the same rounds: matrix products, and reading
memory. Results are compared with Clearhead's before timing; a different result is reported, and makes the command fail.
The whole table takes about twenty minutes, most of which FlexAttention spends compiling.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from benchmarks.comparing.command import comparison_options, fail_if_wrong, measure_or_show
from benchmarks.comparing.page import fill
from benchmarks.comparing.pictures import draw_rates, draw_ratios
from benchmarks.comparing.tables import markdown
from benchmarks.cpu_cases import all_cases
from benchmarks.cpu_cases.attention import FORWARD, FORWARD_BACKWARD
from benchmarks.cpu_cases.ceilings import GEMM
from benchmarks.cpu_cases.modules import THEIRS
from benchmarks.cpu_cases.text import TRANSFORMERS_SDPA
from benchmarks.peers import SDPA
from benchmarks.timing import console, machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
PAGE = ROOT / "docs" / "benchmarks.md"
RATES, RATIOS = ROOT / "docs" / "images" / "cpu-rates.png", ROOT / "docs" / "images" / "cpu-ratios.png"
PICTURES = f"""![Speed relative to PyTorch's](images/{RATIOS.name})

![GFLOP/s over the length](images/{RATES.name})"""
#: PyTorch's own, which the picture of ratios takes as 1.
REFERENCES = (SDPA, THEIRS, TRANSFORMERS_SDPA)
PEERS = ("transformers", "x-transformers", "onnxruntime", "openvino")


def described_machine() -> str:
    """The machine, and the versions of the peers that are installed."""
    versions = []
    for name in PEERS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([machine(), *versions])


def main() -> None:
    writes = f"write tables and pictures into {PAGE.relative_to(ROOT)}"
    parser = comparison_options(__doc__.splitlines()[0], rounds=7, results=RESULTS, writes=writes)
    chosen = parser.parse_args()
    where, results = measure_or_show(chosen, all_cases(), described_machine(), RESULTS)
    if chosen.docs:
        draw_rates(results, (FORWARD, FORWARD_BACKWARD), GEMM, RATES)
        draw_ratios(results, REFERENCES, RATIOS)
        fill(PAGE, "cpu", f"{PICTURES}\n\n{markdown(where, results)}")
        console.print(f"written: {PAGE}, {RATES}, {RATIOS}")
    fail_if_wrong(results)


if __name__ == "__main__":
    main()
