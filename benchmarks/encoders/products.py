"""The products of an encoder's layers: PyTorch's, oneDNN's, and oneDNN's on weights that were laid out for it.

    python -m benchmarks.encoders.products [--rounds 15] [--docs]

What the choice in `clearhead._encoder.products` stands on, measured in turn. "GELU" is x → GELU(x Wᵀ + b): two passes
of PyTorch, and one of oneDNN. The last column is what the loop over an encoder's layers uses on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.timing import interleaved
from benchmarks.writing import ratio, significant, table
from clearhead._encoder.products import Affine, Product
from clearhead._torch_private import onednn_linear

ROWS = (16, 200, 3072)
SHAPES = ((384, 1152), (384, 1536), (1536, 384), (768, 3072))
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PYTORCH, ONEDNN, OURS = "PyTorch", "oneDNN", "laid out"


@torch.no_grad()
def product(rows: int, inner: int, outer: int, dtype: torch.dtype, effort: Effort) -> dict[str, float]:
    """Seconds of x Wᵀ + b by each way, and of it with GELU."""
    rows, inner, outer = map(effort.size, (rows, inner, outer))
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, inner), (outer, inner), (outer,)))
    ours, with_gelu = (Product([Affine(weight, bias)], dtype, activation) for activation in (None, ACT2FN["gelu"]))
    ways: dict[str, Callable[[], Tensor]] = {
        PYTORCH: lambda: F.linear(x, weight, bias),
        ONEDNN: lambda: onednn_linear(x, weight, bias),
        OURS: lambda: ours(x),
        f"GELU, {PYTORCH}": lambda: F.gelu(F.linear(x, weight, bias)),
        f"GELU, {OURS}": lambda: with_gelu(x),
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
        [name, *(significant(seconds * 1e3) for seconds in found.values()), ratio(found[PYTORCH] / found[OURS])]
        for name, found in figures.items()
    ]
    columns = (PYTORCH, ONEDNN, OURS, f"GELU, {PYTORCH}", f"GELU, {OURS}")
    return {"table": table(("dtype, rows × in × out", *(f"{each}, ms" for each in columns), "ratio"), rows)}


BENCHMARK = Benchmark("products", __doc__, lines, texts, minutes=1, rounds=15, peers=("transformers",))

if __name__ == "__main__":
    BENCHMARK.main()
