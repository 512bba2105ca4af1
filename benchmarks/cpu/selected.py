"""Selected keys beside dense attention: time, memory and errors of `masks.selected`.

    python -m benchmarks.cpu.selected [--rounds 3] [--docs]

Each query lists 2,048 of 32,768 keys at random, which is the worst case: neighbouring queries share nothing. Dense is
the same call without a mask. A step of decoding lists as many of 131,072 keys, other ones in each step, and its time
includes the construction of the mask; steps are timed in blocks, as a model decodes. Shares of the keys show from which
one on gathering loses. Memory is the growth of the peak resident memory of a process of its own, forward alone (with
its output) and forward and backward (with its gradients). Errors are those of the output and of the gradients against
float64, relative to the largest number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.memory import growth_of_peak
from benchmarks.timing import in_blocks, interleaved
from benchmarks.writing import ratio, significant, table
from clearhead import masks
from clearhead.kernels import _gathered

KEYS, LISTED, DIM, QUERIES, BLOCK = 32768, 2048, 128, 1024, 128
DECODED, STEPS = 131072, 64
DENSE, SELECTED = "dense", "selected"
#: By the name of the line: query heads of one key/value head, and keys of a block.
GROUPS = {
    "1 query head": (1, 1),
    "8 query heads": (8, 1),
    "16 query heads": (16, 1),
    f"16 query heads, blocks of {BLOCK}": (16, BLOCK),
}
SHARES = (16, 8, 4, 3, 2)
SHARED_KEYS, SHARED_HEADS = 4096, (1, 16)
LISTS = (512, 1024, 2048, 4096)


Operands = tuple[Tensor, Tensor, Tensor]


def operands(heads: int, queries: int, keys: int, train: bool = False) -> Operands:
    """Of one key/value head."""
    query, key, value = (
        torch.randn(1, n, m, DIM, requires_grad=train) for n, m in ((heads, queries), (1, keys), (1, keys))
    )
    return query, key, value


def lists(queries: int, keys: int, listed: int) -> Tensor:
    """Numbers (1, L, k) without repetition, in no order."""
    numbers = torch.empty(1, queries, listed, dtype=torch.int32)
    for row in numbers[0]:
        row.copy_(torch.randperm(keys)[:listed])
    return numbers


def group(effort: Effort, heads: int, block: int) -> dict[str, float]:
    queries, keys = effort.size(QUERIES), effort.size(KEYS, 64 * block)
    mask = masks.selected(lists(queries, keys // block, max(1, effort.size(LISTED, 4 * block) // block)), block=block)
    query, key, value = operands(heads, queries, keys)
    calls: dict[str, Callable[[], object]] = {
        DENSE: lambda: clearhead.attention(query, key, value),
        SELECTED: lambda: clearhead.attention(query, key, value, mask),
    }
    with torch.no_grad():
        return interleaved(calls, rounds=effort.rounds, budget=40.0)


def decoding(effort: Effort) -> dict[str, float]:
    query, key, value = operands(16, 1, effort.size(DECODED, 64))
    steps = itertools.cycle([lists(1, key.shape[2], effort.size(LISTED)) for _ in range(effort.size(STEPS, 2))])
    calls: dict[str, Callable[[], object]] = {
        DENSE: lambda: clearhead.attention(query, key, value),
        SELECTED: lambda: clearhead.attention(query, key, value, masks.selected(next(steps))),
    }
    with torch.no_grad():
        return in_blocks(calls, rounds=max(effort.rounds, 5), seconds=effort.least(0.4))[0]


def shares(effort: Effort, heads: int) -> dict[str, list[float]]:
    """Of each share of the keys, seconds of gathering them and of all keys under the same mask, which heads share."""
    queries, keys = effort.size(QUERIES), effort.size(SHARED_KEYS, 64)
    query, key, value = (torch.randn(1, heads, n, DIM) for n in (queries, keys, keys))
    found: dict[str, list[float]] = {}

    def call(mask: masks.Mask, fewest: int) -> Callable[[], object]:
        def run() -> object:
            chosen, _gathered.FEWEST_SKIPPED = _gathered.FEWEST_SKIPPED, fewest
            try:
                return clearhead.attention(query, key, value, mask)
            finally:
                _gathered.FEWEST_SKIPPED = chosen

        return run

    with torch.no_grad():
        for share in SHARES:
            mask = masks.selected(lists(queries, keys, keys // share))
            times = interleaved({"gathered": call(mask, 0), "all": call(mask, keys)}, rounds=effort.rounds, budget=10.0)
            found[f"1/{share}"] = list(times.values())
    return found


def peak_growth(queries: int, keys: int, listed: int, train: bool) -> float:
    """Megabytes (10⁶ bytes) that a call needs on top of its inputs and lists."""

    def run(tensors: Operands, mask: masks.Mask) -> None:
        output = clearhead.attention(*tensors, mask)
        if train:
            output.sum().backward()

    run(operands(1, 8, 512, train), masks.selected(lists(8, 512, 8)))  # libraries and thread pools are loaded once
    tensors, mask = operands(1, queries, keys, train), masks.selected(lists(queries, keys, listed))
    return growth_of_peak(lambda: run(tensors, mask))[0]


def memory(effort: Effort) -> dict[str, list[float]]:
    sizes = effort.size(QUERIES), effort.size(KEYS, 64)
    return {
        str(listed): [effort.in_a_process(peak_growth, *sizes, effort.size(listed), train) for train in (False, True)]
        for listed in LISTS
    }


def errors(effort: Effort) -> dict[str, float]:
    torch.manual_seed(0)
    queries, keys = effort.size(128), effort.size(KEYS, 64)
    mask, tensors = masks.selected(lists(queries, keys, effort.size(LISTED))), operands(4, queries, keys)
    found: list[list[Tensor]] = []
    for dtype, kernel in ((torch.float64, "reference"), (torch.float32, "native")):
        query, key, value = (x.detach().to(dtype).requires_grad_() for x in tensors)
        with clearhead.use_kernel(kernel):
            output = clearhead.attention(query, key, value, mask)
        found.append([output.detach(), *torch.autograd.grad(output.sin().sum(), (query, key, value))])
    names = ("output", "gradient of the query", "gradient of the key", "gradient of the value")
    return {
        name: float((ours.double() - exact).abs().max() / exact.abs().max())
        for name, exact, ours in zip(names, *found, strict=True)
    }


def lines(effort: Effort) -> list[Line]:
    return [
        *(Line(name, lambda one=one: group(effort, *one)) for name, one in GROUPS.items()),
        Line("a step of decoding", lambda: decoding(effort)),
        *(Line(f"shares, {heads}", lambda heads=heads: shares(effort, heads)) for heads in SHARED_HEADS),
        Line("memory", lambda: memory(effort)),
        Line("errors", lambda: errors(effort)),
    ]


def texts(measured: Figures) -> dict[str, str]:
    """Of a part of the work, its own tables."""
    found: dict[str, str] = {}
    names = [name for name in (*GROUPS, "a step of decoding") if name in measured]
    rows = [
        [name, *(significant(measured[name][way] * 1e3) for way in (DENSE, SELECTED)), _ratio(measured[name])]
        for name in names
    ]
    if rows:
        found["table"] = table(("for each key/value head", "dense, ms", "selected, ms", "faster"), rows)
    if one := measured.get("16 query heads"):
        found["sixteen"] = _ratio(one)
    if one := measured.get("a step of decoding"):
        found["decoding"] = _ratio(one)
    if one := measured.get("memory"):
        cells = [[f"{int(listed):,}", *(f"{peak:.0f}" for peak in peaks)] for listed, peaks in one.items()]
        found["memory"] = table(("keys listed", "peak, MB", "with backward, MB"), cells, left=0)
    return found


def _ratio(times: dict[str, float]) -> str:
    return ratio(times[DENSE] / times[SELECTED])


def wrong(measured: Figures) -> list[str]:
    """Errors above those of float32."""
    found = measured.get("errors") or {}
    return [f"{name}: an error of {error:.1e}" for name, error in found.items() if not error <= 1e-5]


BENCHMARK = Benchmark("selected", __doc__, lines, texts, minutes=4, rounds=3, wrong=wrong)

if __name__ == "__main__":
    BENCHMARK.main()
