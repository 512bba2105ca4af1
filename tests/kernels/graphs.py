"""What tests of tracing share: sizes, tensors of them, and a compiler backend that counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from clearhead import masks

__all__ = ["BATCH", "HEADS", "HEAD_DIM", "LENGTHS", "VARIANTS", "Counting", "check_compiled", "random"]

# Sizes that occur nowhere else, so that no length is taken for the same as another size.
BATCH, HEADS, HEAD_DIM = 3, 2, 5
LENGTHS = (11, 13, 23)

#: Arguments of `attention`.
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "bottom right": {"mask": masks.causal("bottom_right")},
    "window": {"mask": masks.sliding_window(3, 2)},
    "prefix": {"mask": masks.causal() | masks.prefix(2)},
    "lengths": {"mask": masks.lengths(torch.tensor([11, 4, 0]))},
    "where": {"mask": masks.mask_mod(lambda b, h, q, k: (q + k + h) % 3 != b)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -0.5], requires_grad=True)},
    "lse": {"return_lse": True},
    "scale": {"scale": 0.3, "mask": masks.causal() & masks.sliding_window(5, 0)},
}


class Counting:
    """A backend that runs graphs as they are and counts them and the operations of one name in the last of them."""

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self.graphs = 0
        self.operators = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.graphs += 1
        self.operators = sum(self._operator in str(node.target) for node in graph.graph.nodes)
        return graph.forward


def random(length: int, *, grad: bool = False) -> Tensor:
    return torch.randn(BATCH, HEADS, length, HEAD_DIM, requires_grad=grad)


def check_compiled(
    function: Callable[..., object],
    calls: Iterable[tuple[Tensor, ...]],
    operator: str = "scaled_dot_product_attention",
) -> Counting:
    """Compare a function with its graphs in every call; the backend tells how many there were."""
    backend = Counting(operator)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for arguments in calls:
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    return backend
