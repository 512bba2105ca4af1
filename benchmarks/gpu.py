"""Clearhead on a GPU: its module beside `nn.MultiheadAttention`, and a record beside keeping every weight.

    python -m benchmarks.gpu [--only PATTERN] [--rounds 15]
    python -m benchmarks.gpu --check

Every kernel of Clearhead that supports the call is forced in turn. The record (entropy, received, max_logit, top-8)
stands beside eager attention that builds the weights and computes the same from them. Without a GPU nothing is
measured.
"""

from __future__ import annotations

import sys

import torch

from benchmarks import gpu_check
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing import lines_of, markdown, read_results, wrong_results
from benchmarks.figures import Figures
from benchmarks.gpu_cases import all_cases


def lines(effort: Effort) -> list[Line]:
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is False, so there is nothing to measure here")
    gpu = Line("device", lambda: f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    return [gpu, *lines_of(all_cases("cuda"), effort)]


def texts(measured: Figures) -> dict[str, str]:
    results = {name: found for name, found in measured.items() if name != "device"}
    return {"device": measured["device"], "tables": markdown(read_results(results))}


def wrong(measured: Figures) -> list[str]:
    return wrong_results({name: found for name, found in measured.items() if name != "device"})


BENCHMARK = Benchmark("gpu", __doc__, lines, texts, minutes=5, rounds=15, wrong=wrong)

if __name__ == "__main__":
    if "--check" in sys.argv:
        gpu_check.main([each for each in sys.argv[1:] if each != "--check"])
    else:
        BENCHMARK.main()
