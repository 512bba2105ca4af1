"""The projections' product: PyTorch's beside oneDNN's, forward and backward, and q, k, v in one product or three.

    python -m benchmarks.cpu.linear [--rounds 15] [--docs]

What `clearhead.nn.Linear`'s rule stands on. Ratios above 1 mean that oneDNN's product, or the single one, is faster.
The products of a backward pass are those of `clearhead.nn.Linear` itself: dx = g W and dW = gᵀ x. "joined" puts three
weights side by side in every call, as a module with three projections would have to; "packed" has them so already, as
`nn.MultiheadAttention` does. Also shown is what the rule chooses here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.timing import interleaved
from benchmarks.writing import ratio, significant, table
from clearhead._layer.linear import describe_backend, linear, use_linear

#: rows, in_features, out_features
SHAPES = [
    (1, 64, 64),
    (10, 16, 48),
    (32, 64, 64),
    (1, 768, 768),
    (16, 768, 768),
    (128, 768, 768),
    (512, 512, 512),
    (1024, 768, 768),
    (4096, 768, 768),
    (4096, 768, 2304),
    (4096, 768, 3072),
    (4096, 3072, 768),
    (777, 333, 555),
]


def products(rows: int, inner: int, outer: int) -> dict[str, dict[str, Callable[[], Tensor]]]:
    """Each product, by both libraries."""
    x, weight, bias, g = (
        torch.randn(rows, inner),
        torch.randn(outer, inner),
        torch.randn(outer),
        torch.randn(rows, outer),
    )
    operands = {"x Wᵀ + b": (x, weight, bias), "g W": (g, weight.t(), None), "gᵀ x": (g.t(), x.t(), None)}
    plain = {"x Wᵀ + b": lambda: F.linear(x, weight, bias), "g W": lambda: g @ weight, "gᵀ x": lambda: g.t() @ x}
    return {name: {"pytorch": plain[name], "onednn": _forced(*operands[name])} for name in operands}


def _forced(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with use_linear("onednn"):
            return linear(x, weight, bias)

    return run


def joined(rows: int, width: int) -> dict[str, Callable[[], object]]:
    """q, k and v of self-attention."""
    x, weights = torch.randn(rows, width), [torch.randn(width, width) for _ in range(3)]
    packed = torch.cat(weights)
    return {
        "three": lambda: [F.linear(x, weight) for weight in weights],
        "joined": lambda: F.linear(x, torch.cat(weights)).chunk(3, -1),
        "packed": lambda: F.linear(x, packed).chunk(3, -1),
    }


JOINED = [(1, 64), (10, 16), (1, 768), (128, 768), (1024, 768), (4096, 768)]
RULE = "the rule"


@torch.no_grad()
def times(ways: Mapping[str, Callable[[], object]], effort: Effort) -> dict[str, float]:
    return interleaved(ways, rounds=effort.rounds, budget=1.0)


def lines(effort: Effort) -> list[Line]:
    def measured(shape: tuple[int, int, int]) -> dict[str, dict[str, float]]:
        return {name: times(ways, effort) for name, ways in products(*map(effort.size, shape)).items()}

    def together(rows: int, width: int) -> dict[str, float]:
        return times(joined(effort.size(rows), effort.size(width)), effort)

    found = [Line(RULE, describe_backend)]
    found += [Line(_name(shape), lambda shape=shape: measured(shape)) for shape in SHAPES]
    return found + [
        Line(f"q, k, v: {rows} × {width}", functools.partial(together, rows, width)) for rows, width in JOINED
    ]


def texts(measured: Figures) -> dict[str, str]:
    rows = [
        [_name(shape), name, *(significant(one * 1e3) for one in found.values()), ratio(_ratio(found))]
        for shape in SHAPES
        for name, found in measured[_name(shape)].items()
    ]
    together: list[list[str]] = []
    for count, width in JOINED:
        found = measured[f"q, k, v: {count} × {width}"]
        ratios = (ratio(found["three"] / found[name]) for name in ("joined", "packed"))
        together.append([f"{count} × {width}", *(significant(one * 1e3) for one in found.values()), *ratios])
    choice, _, why = measured[RULE].partition(": ")
    header = ("rows × in × out", "product", "PyTorch, ms", "oneDNN, ms", "PyTorch / oneDNN")
    return {
        "choice": choice,
        "why": why,
        "table": table(header, rows, left=2),
        "joined": table(
            ("rows × E", "three, ms", "joined, ms", "packed, ms", "three / joined", "three / packed"), together
        ),
        "ratio": ratio(_ratio(measured[_name((4096, 768, 3072))]["x Wᵀ + b"])),
    }


def _name(shape: tuple[int, int, int]) -> str:
    return " × ".join(map(str, shape))


def _ratio(found: dict[str, float]) -> float:
    return found["pytorch"] / found["onednn"]


BENCHMARK = Benchmark("linear", __doc__, lines, texts, minutes=1.5, rounds=15)

if __name__ == "__main__":
    BENCHMARK.main()
