"""Rotary positions in a traced graph: one graph for all positions and lengths, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, export

from clearhead.positions import DynamicNTKScaling, LinearScaling, Rotary, YarnScaling

pytestmark = pytest.mark.usefixtures("fresh_compiler")

BATCH, HEADS, KV_HEADS, HEAD_DIM = 3, 10, 5, 14

#: Every option once: each variant is several graphs to trace.
VARIANTS = {
    "plain": Rotary(HEAD_DIM),
    "interleaved, linear": Rotary(HEAD_DIM, interleaved=True, scaling=LinearScaling(2.0)),
    "dynamic": Rotary(HEAD_DIM, scaling=DynamicNTKScaling(2.0, 11)),
    "partial, yarn": Rotary(HEAD_DIM, fraction=10 / 14, scaling=YarnScaling(8.0, 11)),
}


def compiled(function: Callable[..., object], **options: object) -> tuple[Callable[..., object], CompileCounter]:
    counter = CompileCounter()
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def states(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(BATCH, HEADS, length, HEAD_DIM, dtype=dtype),
        torch.randn(BATCH, KV_HEADS, length, HEAD_DIM, dtype=dtype),
    )


@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_that_grow_need_one_graph_as_tensors_and_two_at_most_as_ints(variant: str, as_tensor: bool) -> None:
    rotary = VARIANTS[variant]
    function, counter = compiled(rotary)
    for position in range(3, 15):
        q, k = states(1)
        place = torch.tensor([[-1], [position], [position]]) if as_tensor else position
        for turned, one in zip(function(q, k, place), rotary(q, k, place), strict=True):
            torch.testing.assert_close(turned, one)
    assert counter.frame_count <= (1 if as_tensor else 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_graph_for_all_lengths(variant: str) -> None:
    rotary = VARIANTS[variant]
    function, counter = compiled(rotary, dynamic=True)
    for length in (13, 17, 23):
        q, k = states(length)
        torch.testing.assert_close(function(q, k, 4), rotary(q, k, 4))
    assert counter.frame_count == 1


def test_float64_frequencies_are_traced_too() -> None:
    rotary = Rotary(HEAD_DIM)
    function, counter = compiled(rotary)
    q, k = states(5, torch.float64)
    torch.testing.assert_close(function(q, k, 4), rotary(q, k, 4), rtol=0, atol=1e-14)
    assert counter.frame_count == 1


class Turning(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary(q, k, positions)


@pytest.mark.parametrize("variant", VARIANTS)
def test_export_with_a_length_left_open(variant: str) -> None:
    length = Dim("length", min=2, max=1000)
    q, k = states(5)
    module = Turning(VARIANTS[variant])
    program = export(
        module,
        (q, k, torch.arange(5).expand(BATCH, -1)),
        dynamic_shapes={"q": {2: length}, "k": {2: length}, "positions": {1: length}},
    )
    q, k = states(23)
    positions = torch.arange(23).expand(BATCH, -1) - 1
    for turned, one in zip(program.module()(q, k, positions), module(q, k, positions), strict=True):
        torch.testing.assert_close(turned, one)


def test_export_with_a_fixed_start() -> None:
    q, k = states(5)
    program = export(VARIANTS["plain"], (q, k, 3))
    torch.testing.assert_close(program.module()(q, k, 3), VARIANTS["plain"](q, k, 3))
