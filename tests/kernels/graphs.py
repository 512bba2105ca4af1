"""What tests of tracing share: sizes, tensors of them, and a compiler backend that counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BATCH", "HEADS", "HEAD_DIM", "LENGTHS", "Counting", "random"]

# Sizes that occur nowhere else, so that no length is taken for the same as another size.
BATCH, HEADS, HEAD_DIM = 3, 2, 5
LENGTHS = (11, 13, 23)


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
