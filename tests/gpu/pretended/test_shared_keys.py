"""Calls that several processes share: a ring, and decoding with split keys, run on fused kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead._environment import read_environment
from clearhead.distributed import _ring
from clearhead.distributed._layout import Shards
from clearhead.distributed._methods import SharedCall
from clearhead.kernels import _flex_choice
from clearhead.masks import Mask
from clearhead.masks._bound import bind
from clearhead.masks._grid import Grid, Offset
from clearhead.masks._part import part_of
from tests.support.pretended_cuda.comparing import require_half_as_good
from tests.support.pretended_cuda.mode import PretendedDevice

CUDA = torch.device("cuda:0")
L, HEADS, DIM = 512, 2, 16
MASKS: dict[str, tuple[Mask | None, set[str]]] = {
    "none": (None, {"flash, variable lengths"}),
    "causal": (masks.causal(), {"flash, variable lengths"}),
    "window": (masks.causal() & masks.sliding_window(100, 0), {"flash, variable lengths", "flex"}),
    "prefix": (masks.causal() | masks.prefix(60), {"flex"}),
    "documents": (masks.causal() & masks.documents(torch.arange(L) // 150), {"flex"}),
    "lengths": (masks.causal() & masks.lengths(torch.tensor([L, 400])), {"flex"}),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls stand for large ones."""
    monkeypatch.setattr(_flex_choice, "FEWEST_SCORES", 1)


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, HEADS, L, DIM, generator=generator).bfloat16() for _ in range(3)]


@pytest.mark.parametrize("name", MASKS)
def test_a_ring_runs_on_fused_kernels_forward_and_backward(
    cuda: PretendedDevice, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes the first one. It receives the keys of the other one without an exchange."""
    mask, backends = MASKS[name]
    shards, rank = Shards(L, 2, "zigzag"), 0
    inputs = operands()
    exact, exact_gradient = expected(inputs, mask, torch.float64, shards)
    same, same_gradient = expected(inputs, mask, torch.bfloat16, shards)
    query, key, value = (x.to(CUDA) for x in inputs)
    own = shards.take(query, 2, rank).requires_grad_()
    environment = read_environment()
    shared = SharedCall(
        cast(Any, None), rank, shards, shards, Grid(2, HEADS, L, L, CUDA), {"mask": mask, "lse": True}, environment
    )

    def around(shared: SharedCall, k: Tensor, v: Tensor, name: str) -> Iterator[_ring._RingBlock]:
        yield _ring._RingBlock(rank, None, _ring._segments(shards, rank), k, v)
        others = [shards.take(x, 2, 1) for x in (key, value)]
        for number in range(2):
            segments = _ring._segments(shards, 1, number, 2)
            parts = (torch.cat([x[:, :, each.of_shard] for each in segments], 2) for x in others)
            yield _ring._RingBlock(1, number, segments, *parts)

    monkeypatch.setattr(_ring, "_around", around)
    monkeypatch.setattr(_ring, "_shift", lambda *_: [])  # the gradients of keys stay here
    clearhead.explain(own, key, value, return_lse=True)  # the check of the device
    found: list[Tensor] = []

    def forward() -> None:
        shards_of_keys = (shards.take(x, 2, rank) for x in (key, value))
        found.append(_ring.by_ring(own, *shards_of_keys, shared).output)

    seen = cuda.count(forward)
    assert set(seen.backends) == backends
    assert not seen.values
    gradient = gradient_of(exact).to(CUDA)
    seen = cuda.count(lambda: found.extend(torch.autograd.grad(found[0], own, gradient)))
    assert set(seen.backends) == {"flex"}
    assert not seen.values
    require_half_as_good(found, (same, same_gradient), (exact, exact_gradient))


def expected(inputs: list[Tensor], mask: Mask | None, dtype: torch.dtype, shards: Shards) -> tuple[Tensor, Tensor]:
    """The output of the first process, and the gradient of its queries."""
    query, key, value = (x.to(dtype).requires_grad_() for x in inputs)
    with clearhead.use_kernel("reference"):
        output = shards.take(clearhead.attention(query, key, value, mask), 2, 0)
    return output.detach(), shards.take(torch.autograd.grad(output, query, gradient_of(output).to(dtype))[0], 2, 0)


def gradient_of(output: Tensor) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.mark.parametrize(
    ("mask", "count", "backend"),
    [
        (masks.causal(), 1, "flash, variable lengths"),
        (masks.causal(), 256, "flex"),
        (masks.causal() & masks.sliding_window(L, 0), 1, "flash, variable lengths"),
        (masks.causal() & masks.sliding_window(100, 0), 256, "flex"),
        (masks.causal() & masks.lengths(torch.tensor([L, 400])), 256, "flex"),
    ],
)
def test_new_tokens_and_every_other_key_run_on_a_fused_kernel(
    cuda: PretendedDevice, mask: Mask, count: int, backend: str
) -> None:
    """As a process of two decodes that holds the keys 1, 3, 5, … of L."""
    columns, first = range(1, L, 2), L - count
    inputs = operands()
    with clearhead.use_kernel("reference"):
        query, key, value = inputs[0][:, :, first:], inputs[1], inputs[2]
        others = masks.keep(keys=(torch.arange(L) % 2 == 1)[None])
        exact, same = (
            clearhead.attention(
                query.to(dtype), key.to(dtype), value.to(dtype), mask & others, query_positions=first, return_lse=True
            )
            for dtype in (torch.float64, torch.bfloat16)
        )
    query, key, value = (x.to(CUDA) for x in (query, key[:, :, 1::2], value[:, :, 1::2]))
    part = part_of(bind(mask, Grid(2, HEADS, count, L, CUDA, first)), Offset(HEADS), columns)
    clearhead.explain(query, key, value, part, return_lse=True)  # the check of the device
    found: list[Tensor] = []
    seen = cuda.count(lambda: found.extend(clearhead.attention(query, key, value, part, return_lse=True)))
    assert seen.backends == [backend]
    assert not seen.values
    assert not seen.shapes
    require_half_as_good(found, same, exact, 1e-6)
