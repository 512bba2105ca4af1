"""Statistics on a GPU beside the attention whose weights they describe: time, memory, and Python's share of calls."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import clearhead
from benchmarks.gpu.cases import Setting, operands, window_of
from benchmarks.gpu.small_calls import small_calls
from benchmarks.gpu.timing import device_samples, host_seconds
from benchmarks.peers.work import Unsupported
from clearhead.kernels._triton import Operands
from clearhead.masks._terms import Terms

__all__ = [
    "ALL",
    "ATTENTION",
    "FOUR",
    "PER_QUERY",
    "PUBLIC_ALL",
    "RECEIVED",
    "WINDOW",
    "long_record",
    "small_calls_times",
    "statistics_times",
]

#: Ways of a line, by what they compute. What is not of `attention_statistics` calls the kernels alone.
ATTENTION, PER_QUERY = "attention", "lse, entropy, max_logit, confidence"
RECEIVED, ALL = "received, lse given", "all with top-8"
FOUR, WINDOW, EAGER, COLREDUCE = (
    "all without top-8",
    "all without top-8, window",
    "eager, every weight",
    "flash-colreduce",
)
PUBLIC, PUBLIC_ALL = "attention_statistics without top-8", "attention_statistics with top-8"
WANTED = ("entropy", "max_logit", "confidence", "received")
#: Seconds that the statistics of the longest sequence may take.
PATIENCE = 40.0

Ways = dict[str, Callable[[], object]]


def statistics_times(setting: Setting, rounds: int, eager: bool) -> dict[str, Any]:
    """Milliseconds of each way, and the ways that were not measured with the reason.

    Args:
        setting: of the call. Its mask is for the window alone.
        rounds: how often each is timed.
        eager: whether all weights are also built at once.
    """
    query, key, value = operands(setting)
    builders: dict[str, Callable[[], Callable[[], object]]] = {
        ATTENTION: lambda: lambda: clearhead.attention(query, key, value),
        PER_QUERY: lambda: _kernels(query, key, "rows"),
        RECEIVED: lambda: _kernels(query, key, "columns"),
        FOUR: lambda: _kernels(query, key, "both"),
        WINDOW: lambda: _kernels(query, key, "both", window_of(setting.length)),
        ALL: lambda: _kernels(query, key, "all"),
        PUBLIC: lambda: partial(_public, query, key, WANTED),
        PUBLIC_ALL: lambda: partial(_public, query, key, (*WANTED, "top_k")),
        COLREDUCE: lambda: _colreduce(query, key),
    }
    if eager:
        builders[EAGER] = lambda: partial(_eager, query, key, value)
    ways: Ways = {}
    skipped: dict[str, str] = {}
    with torch.no_grad():
        for name, build in builders.items():
            try:
                ways[name] = build()
                ways[name]()
            except Exception as error:  # the others are measured all the same
                ways.pop(name, None)
                skipped[name] = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        times = device_samples(ways, rounds=rounds, budget=4.0)
    return {"ms": {name: statistics.median(each) * 1e3 for name, each in times.items()}, "skipped": skipped}


def _public(query: Tensor, key: Tensor, names: tuple[str, ...]) -> object:
    return clearhead.attention_statistics(query, key, statistics=names, top_k=min(8, key.shape[2]))


def _kernels(query: Tensor, key: Tensor, what: str, window: int | None = None) -> Callable[[], object]:
    """Clearhead's kernels for statistics, without what stands around them. A window is causal."""
    try:
        kernels: Any = importlib.import_module("clearhead.kernels._triton._calls")
    except ImportError as error:
        raise Unsupported("this Clearhead has no Triton kernels") from error
    length, scale = key.shape[2], query.shape[-1] ** -0.5
    terms = Terms(-length, length, length) if window is None else Terms(1 - window, 0, length)
    call = Operands(query, key, terms, scale)
    want = ("lse", "entropy", "max_logit", "confidence")
    given = kernels.rows(call)["lse"]

    def run() -> object:
        top = {"top": min(8, length)} if what == "all" else {}
        rows = {"lse": given} if what == "columns" else kernels.rows(call, want=want, **top)
        received = kernels.columns(call, rows["lse"]) if what != "rows" else None
        return rows, received

    return run


def _colreduce(query: Tensor, key: Tensor) -> Callable[[], object]:
    library: Any = importlib.import_module("flash_colreduce")
    return lambda: library.flash_colreduce(query, key, reduction="sum")


def _eager(query: Tensor, key: Tensor, value: Tensor) -> object:
    """What the same costs with a tensor (B, H, L, S) of weights, which is softmaxed in float32."""
    scores = (query @ key.transpose(-2, -1)).float() * query.shape[-1] ** -0.5
    weights = scores.softmax(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    top = weights.topk(min(8, key.shape[2]))
    return weights.to(value.dtype) @ value, entropy, scores.amax(-1), weights.amax(-1), weights.sum(-2), top


def long_record(device: str, length: int, heads: int, head_dim: int = 128) -> dict[str, Any]:
    """Megabytes (10⁶ bytes) at the peak beyond query and key, and seconds, of all statistics of a long sequence.

    The first of these is measured: `attention_statistics`, the kernels alone, the kernels alone without top-8. Reasons
    why one was not are kept.
    """
    ways: dict[str, Callable[[Tensor, Tensor], Callable[[], object]]] = {
        PUBLIC_ALL: lambda query, key: partial(_public, query, key, (*WANTED, "top_k")),
        ALL: lambda query, key: _kernels(query, key, "all"),
        FOUR: lambda query, key: _kernels(query, key, "both"),
    }
    skipped: dict[str, str] = {}
    for name, build in ways.items():
        try:
            estimate = 64 * _seconds(build(*operands(Setting(device, max(16, length // 8), head_dim, heads=heads))[:2]))
            if estimate <= PATIENCE:
                return {
                    "what": name,
                    **_peak(build, Setting(device, length, head_dim, heads=heads)),
                    "skipped": skipped,
                }
            skipped[name] = f"it would take {estimate:.0f} s"
        except Exception as error:
            skipped[name] = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    return {"skipped": skipped}


def _peak(build: Callable[[Tensor, Tensor], Callable[[], object]], setting: Setting) -> dict[str, float]:
    query, key, value = operands(setting)
    del value
    run = build(query, key)
    if setting.device == "cpu":
        return {"seconds": _seconds(run)}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = _seconds(run)
    return {"seconds": seconds, "MB": (torch.cuda.max_memory_allocated() - before) / 1e6}


def _seconds(run: Callable[[], object]) -> float:
    """Of the second call, because the first one compiles; of the first where that takes long."""
    first = _once(run)
    return first if first > PATIENCE else _once(run)


def _once(run: Callable[[], object]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


@torch.no_grad()
def small_calls_times(device: str) -> dict[str, float]:
    """Microseconds that Python takes for calls that the device finishes sooner."""
    return {name: host_seconds(call) * 1e6 for name, call in small_calls(device).items()}
