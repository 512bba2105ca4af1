"""What a small call enters: Clearhead's functions and PyTorch's operators, on the CPU and on a simulated GPU.

    python -m benchmarks.gpu.call_counts [--docs]

Counted is the second call of each kind, so that plans and masks are known: the distinct functions of Clearhead, how
often functions of Clearhead are called, and the operators that PyTorch dispatches, views and allocations included.
Comprehensions and lambdas are no functions. Nothing is timed, so a busy machine gives the same figures. The simulated
GPU is that of the tests (`tests/support/pretended_cuda`), with the rules of an H100; it needs Linux, a C++ compiler and
a build of PyTorch without CUDA.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, final
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import ROOT, Figures
from benchmarks.gpu.small_calls import small_calls
from benchmarks.writing import table

__all__ = ["BENCHMARK", "counts"]

CPU, GPU = "CPU", "simulated GPU"
KINDS = ("functions", "calls", "operators")
PACKAGE = str(Path(clearhead.__file__).parent)


@final
class Counting(TorchDispatchMode):
    """Counts the operators that PyTorch dispatches while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def counts(device: str) -> dict[str, dict[str, int]]:
    """The figures of every small call on this device, by the name of the call."""
    # Calls heed dispatch modes of other people; this one counts what they do without any.
    with patch("clearhead._environment.dispatch_modes", lambda: 0):
        return {name: _counted(call) for name, call in small_calls(device).items()}


def _counted(call: Callable[[], object]) -> dict[str, int]:
    call()
    functions, calls = _entered(call)
    with Counting() as mode:
        call()
    return dict(zip(KINDS, (functions, calls, mode.operators), strict=True))


def _entered(call: Callable[[], object]) -> tuple[int, int]:
    """How many distinct functions of Clearhead a call enters, and how often it enters one."""
    entered: list[tuple[str, int]] = []

    def notice(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            entered.append((code.co_filename, code.co_firstlineno))

    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(set(entered)), len(entered)


def _on_simulated_gpu() -> dict[str, dict[str, int]]:
    """PyTorch has the simulated GPU in a process of its own, where it is loaded before PyTorch."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.call_counts_on_gpu"], cwd=ROOT, capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return json.loads(run.stdout)


def lines(effort: Effort) -> list[Line]:
    return [Line(CPU, lambda: counts("cpu")), Line(GPU, _on_simulated_gpu)]


def texts(measured: Figures) -> dict[str, str]:
    devices = [device for device in (CPU, GPU) if device in measured]
    rows = [
        (name, *(str(measured[device][name][kind]) for device in devices for kind in KINDS))
        for name in measured[devices[0]]
    ]
    header = ("the second call", *(f"{kind}, {device}" for device in devices for kind in KINDS))
    on_gpu = [(name, str(of["functions"]), str(of["operators"])) for name, of in measured.get(GPU, {}).items()]
    return {
        "table": table(header, rows),
        "gpu": table(("call", "functions of Clearhead", "operators of PyTorch"), on_gpu),
    }


BENCHMARK = Benchmark("call_counts", __doc__, lines, texts, minutes=0.5)

if __name__ == "__main__":
    BENCHMARK.main()
