"""The projections' product: PyTorch's beside oneDNN's, forward and backward, and q, k, v in one product or three.

    python -m benchmarks.linear [--rounds N]

What `clearhead.nn.Linear`'s rule stands on. Ratios above 1 mean that oneDNN's product, or the single one, is faster.
The products of a backward pass are those of `clearhead.nn.Linear` itself: dx = g W and dW = gᵀ x. "joined" puts three
weights side by side in every call, as a module with three projections would have to; "packed" has them so already, as
`nn.MultiheadAttention` does. Also shown is what the rule chooses here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from benchmarks.timing import console, interleaved, machine, progress
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


def product_table(rounds: int) -> Table:
    table = Table(
        title="float32 products, milliseconds (medians)", caption=f"{machine()}; the rule: {describe_backend()}"
    )
    for column in ("rows", "in", "out", "product", "PyTorch", "oneDNN", "ratio"):
        table.add_column(column, justify="right")
    for shape in progress(SHAPES, "timing products"):
        for name, ways in products(*shape).items():
            times = interleaved(ways, rounds=rounds, budget=1.0)
            ratio = times["pytorch"] / times["onednn"]
            cells = (name, f"{times['pytorch'] * 1e3:.3f}", f"{times['onednn'] * 1e3:.3f}", f"{ratio:.2f}")
            table.add_row(*map(str, shape), *cells)
    return table


def joined_table(rounds: int) -> Table:
    table = Table(title="q, k and v, milliseconds (medians)", caption=machine())
    for column in ("rows", "E", "three", "joined", "packed", "three / joined", "three / packed"):
        table.add_column(column, justify="right")
    for rows, width in progress([(1, 64), (10, 16), (1, 768), (128, 768), (1024, 768), (4096, 768)], "timing q, k, v"):
        times = interleaved(joined(rows, width), rounds=rounds, budget=1.0)
        milliseconds = (f"{times[name] * 1e3:.3f}" for name in ("three", "joined", "packed"))
        ratios = (f"{times['three'] / times[name]:.2f}" for name in ("joined", "packed"))
        table.add_row(str(rows), str(width), *milliseconds, *ratios)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds per figure")
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    with torch.no_grad():
        console.print(product_table(rounds))
        console.print(joined_table(rounds))


if __name__ == "__main__":
    main()
