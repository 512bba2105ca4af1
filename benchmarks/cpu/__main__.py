"""Clearhead beside other implementations of attention on this machine's CPU, timed in turn in one process.

    python -m benchmarks.cpu [--only PATTERN] [--rounds 5] [--docs]

Peers: SDPA, FlexAttention compiled, x-transformers, transformers' eager attention, ONNX Runtime, OpenVINO and
`nn.MultiheadAttention`; ``pip install -c constraints.txt -e ".[bench]"`` installs those that are not PyTorch's. A peer
that is not installed is skipped, with a remark. Two ceilings are timed in the same rounds: matrix products, and reading
memory. Results are compared with Clearhead's before timing; a different result is reported, and makes the command fail.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing import OURS, Result, lines_of, markdown, read_results, wrong_results
from benchmarks.comparing.pictures import draw_rates, draw_speed
from benchmarks.cpu.cases import all_cases
from benchmarks.cpu.cases.attention import CAUSAL, FORWARD, FORWARD_BACKWARD
from benchmarks.cpu.cases.ceilings import GEMM
from benchmarks.cpu.cases.inspecting import ALONE
from benchmarks.cpu.cases.inspecting import LINE as STATISTICS
from benchmarks.cpu.cases.modules import THEIRS
from benchmarks.cpu.cases.tiny import pairs_of
from benchmarks.figures import ROOT, Figures
from benchmarks.peers import SDPA
from benchmarks.writing import ratio, significant, table

RATES, SPEED = ROOT / "docs" / "images" / "cpu-rates.svg", ROOT / "docs" / "images" / "speed.svg"
MODULE = "module, B=8 L=512 E=768 H=12"
DROPOUT = "forward + backward, dropout 0.1"
#: The ratio of PyTorch's way to Clearhead's, by marker: the line, and PyTorch's way.
RATIOS = {
    "forward": (f"{FORWARD}: L=4096", SDPA),
    "causal": (f"{CAUSAL}: L=4096", SDPA),
    "backward": (f"{FORWARD_BACKWARD}: L=4096", SDPA),
    "dropout": (f"{DROPOUT}: L=1024", SDPA),
    "dropout-memory": (f"{DROPOUT}: peak memory, L=4096", SDPA),
    "bfloat16": ("attention forward, bf16: L=4096", SDPA),
    "bfloat16-backward": ("forward + backward, bf16: L=4096", SDPA),
    "decoding": ("decoding, one row: keys and values of 256 MiB", SDPA),
    "module-eval": (f"{MODULE}: eval", THEIRS),
    "module-train": (f"{MODULE}: training step", THEIRS),
    "padding": (f"{MODULE}: half the tokens padding, eval", THEIRS),
    "tiny-eval": ("tiny module: B=2 L=5 E=16 H=4, eval", THEIRS),
    "tiny-train": ("tiny module: B=2 L=5 E=16 H=4, training step", THEIRS),
}
#: The bars of the picture, by marker.
BARS = {
    "forward": "attention, 4,096 tokens",
    "causal": "causal attention, 4,096 tokens",
    "backward": "forward + backward, 4,096 tokens",
    "dropout": "forward + backward, dropout",
    "bfloat16": "attention, bfloat16",
    "bfloat16-backward": "forward + backward, bfloat16",
    "decoding": "decoding, one row",
    "module-eval": "module, eval",
    "module-train": "module, training step",
    "padding": "module, half padding",
    "tiny-eval": "tiny module, eval",
    "tiny-train": "tiny module, training step",
}


def lines(effort: Effort) -> list[Line]:
    return lines_of(all_cases(effort), effort)


def texts(measured: Figures) -> dict[str, str]:
    """Of a part of the work, its tables alone."""
    results = {result.work: result for result in read_results(measured)}
    tables = {"tables": markdown(list(results.values()))}
    if tiny := [(result, *pair) for result in results.values() for pair in pairs_of(result)]:
        rows = [
            (result.work, ours, theirs, significant(figure * 1e3), significant(other * 1e3), ratio(other / figure))
            for result, ours, theirs, figure, other in tiny
        ]
        header = ("call", "what", "beside", "µs", "beside, µs", "ratio (above 1×: faster)")
        tables["tiny"] = table(header, rows, left=3)
    if STATISTICS not in results or not {line for line, _ in RATIOS.values()} <= results.keys():
        return tables
    statistics = results[STATISTICS]
    return tables | {
        **{name: ratio(results[line].ratios[theirs]) for name, (line, theirs) in RATIOS.items()},
        "statistics": ratio(statistics.figures[OURS] / statistics.figures[SDPA]),
        "statistics-added": ratio(statistics.figures[OURS] / statistics.figures[ALONE]),
        "share": _range([result.share for result in results.values() if _is_long(result) and result.share]),
    }


def pictures(measured: Figures) -> dict[Path, str]:
    results = {result.work: result for result in read_results(measured)}
    bars = {label: results[RATIOS[name][0]].ratios[RATIOS[name][1]] for name, label in BARS.items()}
    rates = draw_rates(list(results.values()), (FORWARD, FORWARD_BACKWARD), GEMM)
    return {RATES: rates, SPEED: draw_speed(bars, "speed relative to PyTorch (1: as fast; longer: faster)")}


def _is_long(result: Result) -> bool:
    return result.section == FORWARD and result.name != "L=512"


def _range(shares: list[float]) -> str:
    return f"{min(shares) * 100:.0f} to {max(shares) * 100:.0f} %"


PEERS = ("transformers", "x-transformers", "onnxruntime", "openvino")
BENCHMARK = Benchmark("cpu", __doc__, lines, texts, minutes=10, peers=PEERS, wrong=wrong_results)

if __name__ == "__main__":
    BENCHMARK.main()
