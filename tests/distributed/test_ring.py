"""The method *ring*: what merging many partial results costs in bfloat16, and what each process holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import clearhead
from benchmarks.cpu.distributed import Live
from clearhead import masks
from clearhead.distributed import context_parallel, shard_sequence
from clearhead.errors import ShapeError
from tests.support.saving import EXACT, returning

from .building import DIM, EMBED, attention, layouts
from .processes import in_processes, line


def _plain(dtype: torch.dtype) -> Any:
    """A module that computes attention of its inputs as they are."""
    module = clearhead.MultiHeadAttention(128, 2, bias=False, dtype=dtype)
    for parameter in module.parameters():
        torch.nn.init.eye_(parameter)
    return module


@in_processes(4)
@pytest.mark.parametrize(
    ("layout", "causal"), [pytest.param("contiguous", False, marks=pytest.mark.slow), ("zigzag", True)]
)
def test_thirteen_blocks_in_bfloat16_are_as_exact_as_one_kernel(layout: Any, causal: bool) -> None:
    """Largest errors against float64 of output and gradients: of the ring, and of one call of a kernel."""
    mask = masks.causal() if causal else None
    cut = partial(shard_sequence, mesh=line(), layout=layout)
    *inputs, factors = torch.randn(4, 1, 2048, 128, dtype=torch.bfloat16)

    def results(module: Any, inputs: list[Tensor], factors: Tensor) -> list[Tensor]:
        own = [x.clone().requires_grad_() for x in inputs]
        output = module(*own, mask=mask)
        return [output.detach(), *torch.autograd.grad(output, own, factors)]

    split = context_parallel(_plain(torch.bfloat16), line(), method="ring", layout=layout)
    found = results(split, [cut(x) for x in inputs], cut(factors))
    one = results(_plain(torch.bfloat16), inputs, factors)
    exact = results(_plain(torch.float64), [x.double() for x in inputs], factors.double())
    for name, number, other, right in zip(("output", "query", "key", "value"), found, one, exact, strict=True):
        error = (number - cut(right)).abs().max()
        dist.all_reduce(error, dist.ReduceOp.MAX)
        assert 0 < error <= 2.5 * (other - right).abs().max(), name


def _few_queries(layout: Any, keys: int) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """A ring's module with its part of few queries and many keys, and that of one process with all of them."""
    x = torch.randn(1, keys, EMBED)
    queries = x[:, : 2 * dist.get_world_size()]
    ring = context_parallel(_frozen(), line(), method="ring", layout=layout)
    query, key = (shard_sequence(each, line(), layout=layout).clone() for each in (queries, x))
    yield ring, query.requires_grad_(), key
    yield _frozen(), queries.clone().requires_grad_(), x


def _frozen() -> Any:
    return attention(4, dtype=torch.float32).requires_grad_(False)


@in_processes(4)
@layouts
def test_a_process_holds_its_part_of_keys_and_values(layout: Any) -> None:
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
    assert 0 < held[0] <= 0.3 * held[1]


@in_processes(2)
@pytest.mark.parametrize("hooks", ["save_on_cpu", "permuted", "gaps", "copies"])
def test_saved_tensors_that_come_back_otherwise(hooks: str) -> None:
    around = EXACT.get(hooks, lambda: saved_tensors_hooks(Tensor.clone, lambda x: x))
    x = torch.randn(2, 14, EMBED, generator=torch.Generator().manual_seed(3))
    found = []
    for hooked in (False, True):
        ring = context_parallel(_frozen(), line(), method="ring")
        own, visible = shard_sequence(x, line()).clone().requires_grad_(), torch.arange(14).expand(14, 14) % 5 > 0
        visible = visible.clone()
        query = own * 1
        with around() if hooked else nullcontext():
            output = ring(query, own, own, mask=masks.keep(visible))
        if hooked and hooks == "copies":
            visible[:] = True  # which autograd does not notice
        found.append(torch.autograd.grad(output.square().sum(), own)[0])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


@in_processes(2)
def test_saved_tensors_of_another_shape() -> None:
    ring = context_parallel(_frozen(), line(), method="ring")
    own = shard_sequence(torch.randn(2, 14, EMBED), line()).clone().requires_grad_()
    with returning(lambda x: x[:, :, 1:] if x.dim() == 4 else x)():
        output = ring(own, own, own)
    with pytest.raises(ShapeError, match=r"^saved query: expected the shape .* that was saved"):
        output.sum().backward()


@in_processes(4)
@layouts
def test_what_travels_needs_little_beside_it(layout: Any) -> None:
    """Bytes of keys and values alive at once, of this process and of one."""
    most, keys = [], 32768  # the record by which processes agree is nothing beside it
    size = 2 * keys * 4 * DIM * 4
    for module, query, key in _few_queries(layout, keys):
        with Live() as live:
            module(query, key)
        most.append(live.most)
    assert size <= most[1] <= 1.01 * size  # the few queries are next to nothing
    assert 0.25 * size < most[0] <= 0.3 * size
