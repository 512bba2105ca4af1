"""The products of an encoder's layers: PyTorch's, oneDNN's, oneDNN's on weights that were laid out for it, and our own.

    python -m benchmarks.encoders.products [--rounds 15] [--docs]

What the choice in `clearhead._encoder.products` stands on, measured in turn. "GELU" is x → GELU(x Wᵀ + b): two passes
of PyTorch, and one of the others. Each product is repeated on the same weights, which stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.timing import interleaved
from benchmarks.writing import ratio, significant, table
from clearhead._encoder.steps import affine
from clearhead._torch_private import onednn_linear, onednn_weight

ROWS = (16, 32, 64, 200, 3072)
SHAPES = ((384, 1152), (384, 1536), (1536, 384), (768, 3072))
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PYTORCH, ONEDNN, LAID_OUT, OWN = "PyTorch", "oneDNN", "laid out", "own"


@torch.no_grad()
def product(rows: int, inner: int, outer: int, dtype: torch.dtype, effort: Effort) -> dict[str, float]:
    """Seconds of x Wᵀ + b by each way, and of it with GELU."""
    rows, inner, outer = map(effort.size, (rows, inner, outer))
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, inner), (outer, inner), (outer,)))
    laid_out = onednn_weight(weight)
    ways: dict[str, Callable[[], Tensor]] = {
        PYTORCH: lambda: F.linear(x, weight, bias),
        ONEDNN: lambda: onednn_linear(x, weight, bias),
        LAID_OUT: lambda: onednn_linear(x, laid_out, bias),
        OWN: lambda: affine(x, weight, bias),
        f"GELU, {PYTORCH}": lambda: F.gelu(F.linear(x, weight, bias)),
        f"GELU, {LAID_OUT}": lambda: onednn_linear(x, laid_out, bias, "gelu", "none"),
        f"GELU, {OWN}": lambda: affine(x, weight, bias, "gelu"),
    }
    return interleaved(ways, rounds=effort.rounds, budget=1.0)


def lines(effort: Effort) -> Iterator[Line]:
    for name, dtype in TYPES.items():
        for rows in ROWS:
            for inner, outer in SHAPES:
                size = rows, inner, outer, dtype
                yield Line(_name(name, rows, inner, outer), lambda size=size: product(*size, effort))


def _name(dtype: str, rows: int, inner: int, outer: int) -> str:
    return f"{dtype}, {rows} × {inner} × {outer}"


def texts(figures: Figures) -> dict[str, str]:
    rows = [
        [
            name,
            *(significant(seconds * 1e3) for seconds in found.values()),
            ratio(found[PYTORCH] / min(found[LAID_OUT], found[OWN])),
        ]
        for name, found in figures.items()
    ]
    columns = (PYTORCH, ONEDNN, LAID_OUT, OWN, *(f"GELU, {each}" for each in (PYTORCH, LAID_OUT, OWN)))
    return {"table": table(("dtype, rows × in × out", *(f"{each}, ms" for each in columns), "ratio"), rows)}


BENCHMARK = Benchmark("products", __doc__, lines, texts, minutes=1, rounds=15)

if __name__ == "__main__":
    BENCHMARK.main()
