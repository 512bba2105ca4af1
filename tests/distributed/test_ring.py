"""The method *ring*: what merging many partial results costs in bfloat16, and what each process holds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import clearhead
from benchmarks.distributed import Live
from clearhead import masks
from clearhead._call.request import Request
from clearhead._environment import read_environment
from clearhead.distributed import context_parallel, shard_sequence
from clearhead.distributed._layout import LAYOUTS, Layout, Shards
from clearhead.distributed._methods import SharedCall
from clearhead.distributed._ring import by_ring
from clearhead.masks._grid import Grid

from .building import EMBED, attention
from .meshes import line
from .processes import Processes, processes

LENGTH, BLOCKS = 2048, 16


def _errors(layout: Layout, causal: bool) -> dict[str, tuple[float, float]]:
    """Largest errors against float64 of output and gradients: of the ring, and of one call of a kernel."""
    group, rank = line().get_group(), dist.get_rank()
    parts, mask = Shards(LENGTH, BLOCKS, layout), masks.causal() if causal else None
    inputs = [torch.randn(1, 2, LENGTH, 64, dtype=torch.bfloat16) for _ in range(3)]
    factors = torch.randn(1, 2, LENGTH, 64, dtype=torch.bfloat16)

    def results(attend: Any, inputs: Any, factors: torch.Tensor) -> list[torch.Tensor]:
        own = [x.clone().requires_grad_() for x in inputs]
        output = attend(*own)
        return [output.detach(), *torch.autograd.grad(output, own, factors)]

    cut = partial(parts.take, dim=2, rank=rank)
    grid = Grid(1, 2, LENGTH, LENGTH, torch.device("cpu"))
    shared = SharedCall(group, rank, parts, parts, grid, Request(mask, lse=True), read_environment())
    found = results(lambda *own: by_ring(*own, shared).output, [cut(x) for x in inputs], cut(factors))
    one = results(lambda *own: clearhead.attention(*own, mask=mask), inputs, factors)
    exact: list[torch.Tensor] = [x.new_zeros(x.shape, dtype=torch.float64) for x in (factors, *inputs)]
    if rank == 0:
        doubles = [x.double() for x in inputs]
        exact = results(lambda *own: clearhead.attention(*own, mask=mask), doubles, factors.double())
    errors = []
    for numbers, other, right in zip(found, one, exact, strict=True):
        dist.all_reduce(right)
        errors.append([(numbers - cut(right)).abs().max(), (other - right).abs().max()])
    largest = torch.tensor(errors)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return {
        name: (float(ring), float(one))
        for name, (ring, one) in zip(("output", "query", "key", "value"), largest, strict=True)
    }


@pytest.mark.parametrize(
    ("layout", "causal"), [pytest.param("contiguous", False, marks=pytest.mark.slow), ("zigzag", True)]
)
def test_sixteen_blocks_in_bfloat16_are_as_exact_as_one_kernel(layout: Layout, causal: bool) -> None:
    with processes(BLOCKS) as many:
        for errors in many.run(_errors, layout, causal):
            for name, (ring, one) in errors.items():
                assert 0 < ring <= 2.5 * one, (name, ring, one)


def _few_queries(layout: Layout, keys: int) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """A ring's module with its part of few queries and many keys, and that of one process with all of them."""
    x = torch.randn(1, keys, EMBED)
    queries = x[:, : 2 * dist.get_world_size()]
    ring = context_parallel(_frozen(), line(), method="ring", layout=layout)
    query, key = (shard_sequence(each, line(), layout=layout).clone() for each in (queries, x))
    yield ring, query.requires_grad_(), key
    yield _frozen(), queries.clone().requires_grad_(), x


def _frozen() -> Any:
    return attention(4, dtype=torch.float32).requires_grad_(False)


def _held(layout: Layout) -> tuple[int, int]:
    """Bytes of keys and values that autograd holds, of this process and of one."""
    held = []
    for module, query, key in _few_queries(layout, 512):
        known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        storages: dict[int, int] = {}

        def keep(tensor: Tensor, known: Any = known, storages: Any = storages) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(query, key).sum().backward()
        held.append(sum(storages.values()))
    return held[0], held[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_process_holds_its_part_of_keys_and_values(four: Processes, layout: Layout) -> None:
    for own, whole in four.run(_held, layout):
        assert 0 < own <= 0.3 * whole


def _most(layout: Layout) -> tuple[int, int, int]:
    """Bytes of keys and values alive at once, of this process, of one, and by size."""
    most, size = [], 0
    for module, query, key in _few_queries(layout, 32768):  # the record by which processes agree is nothing beside it
        with Live() as live:
            module(query, key)
        most.append(live.most)
        size = 2 * key.shape[1] * module.k_proj.out_features * key.element_size()
    return most[0], most[1], size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_travels_needs_little_beside_it(four: Processes, layout: Layout) -> None:
    for own, whole, size in four.run(_most, layout):
        assert size <= whole <= 1.01 * size  # the few queries are next to nothing
        assert 0.25 * size < own <= 0.3 * size
