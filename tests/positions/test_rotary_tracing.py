"""Rotary positions in a traced graph: one graph for all positions and lengths, with the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, export

from clearhead.positions import DynamicNTKScaling, LinearScaling, Rotary, YarnScaling

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BATCH, HEADS, KV_HEADS, HEAD_DIM = 3, 10, 5, 14

#: Every option once, because each variant is several graphs.
VARIANTS = {
    "plain": Rotary(HEAD_DIM),
    "interleaved, linear": Rotary(HEAD_DIM, interleaved=True, scaling=LinearScaling(2.0)),
    "dynamic": Rotary(HEAD_DIM, scaling=DynamicNTKScaling(2.0, 11)),
    "partial, yarn": Rotary(HEAD_DIM, fraction=10 / 14, scaling=YarnScaling(8.0, 11)),
}


def states(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    q = torch.randn(BATCH, HEADS, length, HEAD_DIM, dtype=dtype)
    return q, torch.randn(BATCH, KV_HEADS, length, HEAD_DIM, dtype=dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_growing_positions_need_one_graph_as_tensors_and_two_at_most_as_ints(variant: str) -> None:
    rotary, counter = VARIANTS[variant], CompileCounter()
    compiled = torch.compile(rotary, backend=counter, fullgraph=True)
    for position in range(3, 15):
        q, k = states(1)
        for given in (torch.tensor([[-1], [position], [position]]), position):
            torch.testing.assert_close(compiled(q, k, given), rotary(q, k, given))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_graph_for_all_lengths(dtype: torch.dtype) -> None:
    rotary, counter = VARIANTS["plain"], CompileCounter()
    compiled = torch.compile(rotary, backend=counter, fullgraph=True, dynamic=True)
    for length in (13, 17, 23):
        q, k = states(length, dtype)
        torch.testing.assert_close(compiled(q, k, 4), rotary(q, k, 4), rtol=0, atol=100 * torch.finfo(dtype).eps)
    assert counter.frame_count == 1


class Turning(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary(q, k, positions)


@pytest.mark.parametrize("variant", VARIANTS)
def test_export_with_an_open_length(variant: str) -> None:
    length = Dim("length", min=2, max=1000)
    module, (q, k) = Turning(VARIANTS[variant]), states(5)
    shapes = {"q": {2: length}, "k": {2: length}, "positions": {1: length}}
    program = export(module, (q, k, torch.arange(5).expand(BATCH, -1)), dynamic_shapes=shapes)
    q, k = states(23)
    positions = torch.arange(23).expand(BATCH, -1) - 1
    torch.testing.assert_close(program.module()(q, k, positions), module(q, k, positions))
