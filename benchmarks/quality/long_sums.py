"""Errors of attention over many keys, against float64: whether they grow with the number of keys.

    python -m benchmarks.quality.long_sums [--docs]

Keys that are all equal give every key the same weight, so that the output is the sum of S numbers of one sign: of one
number again and again (the first column), or of numbers in [0.5, 1.5) (the others). Errors are relative to the largest
number of each result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.writing import table

LENGTHS = (512, 8_192, 32_768, 131_072)
ROWS, DIM = 64, 64
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def lines(effort: Effort) -> list[Line]:
    def errors(name: str, length: int) -> list[float]:
        attend = F.scaled_dot_product_attention if name == "SDPA" else _kernel(name)
        found = _errors(attend, _equal_keys(length, constant=True))[:1]
        return found + _errors(attend, _equal_keys(length, constant=False))

    return [
        Line(f"{length:,} keys, {name}", lambda name=name, length=length: errors(name, effort.size(length)))
        for length in LENGTHS
        for name in ("native", "SDPA", "reference")
    ]


def texts(measured: Figures) -> dict[str, str]:
    rows = [[*name.split(" keys, "), *(f"{error:.1e}" for error in errors)] for name, errors in measured.items()]
    header = ("keys", "kernel", "output, constant values", "output", "gradient of key", "gradient of value")
    return {"table": table(header, rows, left=2)}


def _equal_keys(length: int, constant: bool) -> list[Tensor]:
    """Query, key and value (1, 1, rows, D)."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, ROWS, DIM, generator=generator)
    key = torch.randn(1, 1, 1, DIM, generator=generator).expand(-1, -1, length, -1).contiguous()
    value = 0.5 + torch.rand(1, 1, 1 if constant else length, DIM, generator=generator)
    return [query, key, value.expand(-1, -1, length, -1).contiguous()]


def _kernel(name: str) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with clearhead.use_kernel(name):
            return clearhead.attention(query, key, value)

    return attend


def _errors(attend: Attention, inputs: list[Tensor]) -> list[float]:
    """Of the output and of the gradients of key and value; the query's is zero."""
    exact = _results(_kernel("reference"), [tensor.double() for tensor in inputs])
    pairs = zip(_results(attend, inputs), exact, strict=True)
    return [((actual.double() - one).abs().max() / one.abs().max()).item() for actual, one in pairs]


def _results(attend: Attention, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves[1:])]


BENCHMARK = Benchmark("long_sums", __doc__, lines, texts, minutes=1)

if __name__ == "__main__":
    BENCHMARK.main()
