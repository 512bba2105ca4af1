"""The method *ring*: keys and values travel around, and partial results are merged; no process holds all keys.

(Liu et al., "Ring attention with blockwise transformers", 2023.) In the backward pass they travel once more, and with
them their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._call.spec import AttentionCall, Results, validate_call
from .._environment import Environment
from .._layer.plan import attend_arguments
from ..kernels._some_keys import gradients_of_some_keys, merge_some_keys
from ..masks._base import Mask
from ._collectives import filled, step
from ._methods import Piece, Whole

_FORWARD, _BACKWARD, _STATISTICS = "forward: ring", "backward: ring", "statistics: ring"


@dataclass(frozen=True)
class Ring:
    """A call of this method, but for its tensors.

    Args:
        whole: the attention that each process computes a part of; without sinks.
        environment: of the call.
        options: scale and soft-cap.
    """

    whole: Whole
    environment: Environment
    options: dict[str, Any]


def by_ring(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Results:
    """W − 1 exchanges with the neighbours forward, and 2 W − 1 backward, of keys and values of one process each."""
    whole = ring.whole
    mask, sinks = whole.mask, whole.sinks
    biases = () if mask is None else mask.bias_tensors()
    if mask is not None:
        mask = mask.with_bias_tensors(tensor.detach() for tensor in biases)  # autograd alone holds those that learn
    ring = replace(ring, whole=replace(whole, mask=mask, sinks=None))
    return Results(*cast("tuple[Tensor, Tensor]", _Ring.apply(ring, q, k, v, sinks, *biases)))


def pieces_of_ring(q: Tensor, k: Tensor, v: Tensor | None, whole: Whole) -> Iterator[Piece]:
    """Every pair of runs of which a query may see a key, as keys, and values if there are some, come around."""
    own = _packed(whole, k, k[..., :0] if v is None else v)
    for keys, part in _around(whole, own, _STATISTICS):
        yield from _pieces(whole, q, part, keys, k.shape[3])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: Ring, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *biases: Tensor
    ) -> tuple[Tensor, Tensor]:
        whole, dtype = ring.whole, torch.promote_types(q.dtype, torch.float32)
        output = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
        own = _packed(whole, k, v)
        environment = ring.environment._replace(gradients=False)
        for keys, part in _around(whole, own, _FORWARD):
            for block in _pieces(whole, q, part, keys, k.shape[3]):
                rows = block.rows
                arguments = block.query, block.key, block.value, block.mask, environment
                options = ring.options | whole.dropout_at(*block.place)
                results = attend_arguments(*arguments, return_lse=True, **options)
                merge_some_keys(output[:, :, rows], lse[:, :, rows], results.output, cast(Tensor, results.lse))
        if sinks is not None:
            nothing = output.new_zeros(()).expand(output.shape)
            merge_some_keys(output, lse, nothing, sinks.to(dtype)[None, :, None].expand(lse.shape))
        ctx.ring, ctx.key_dim = ring, k.shape[3]
        # The mask's tensors are saved for autograd to notice writes to them.
        held = () if whole.mask is None else whole.mask.tensors()
        ctx.count = 5 + len(biases)
        ctx.save_for_backward(q, own, output, lse, sinks, *biases, *(x for x in held if not x.is_inference()))
        ctx.mark_non_differentiable(lse)
        return output.to(q.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, own, output, lse, sinks, *biases = ctx.saved_tensors[: ctx.count]
        ring: Ring = ctx.ring
        whole, dtype = ring.whole, output.dtype
        of_output = gradients[0]
        learns = any(ctx.needs_input_grad[5:])
        correction = (of_output.to(dtype) * output).sum(-1)  # δ (B, H, l)
        of_query = torch.zeros_like(q, dtype=dtype)
        of_biases = [torch.zeros_like(tensor, dtype=dtype) for tensor in biases]
        travelling = torch.zeros_like(own, dtype=dtype)  # gradients of the keys and values that are here
        for keys, part in _around(whole, own, _BACKWARD):
            if keys != whole.rank:
                travelling = _shifted(whole, travelling)
            for block in _pieces(whole, q, part, keys, ctx.key_dim):
                rows, columns = block.rows, block.columns
                dq, dk, dv, *others = gradients_of_some_keys(
                    _call(ring, block),
                    output[:, :, rows],
                    lse[:, :, rows],
                    correction[:, :, rows],
                    of_output[:, :, rows],
                    learns,
                )
                of_query[:, :, rows] += dq
                travelling[columns, ..., : ctx.key_dim] += dk.permute(2, 0, 1, 3)
                travelling[columns, ..., ctx.key_dim :] += dv.permute(2, 0, 1, 3)
                for total, other in zip(of_biases, others, strict=bool(others)):
                    total += other
        home = _shifted(whole, travelling)[: whole.keys.lengths[whole.rank]].to(q.dtype).permute(1, 2, 0, 3)
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.to(dtype)[None, :, None] - lse).exp() * correction).sum((0, 2)).to(sinks.dtype)
        bias_gradients = [total.to(tensor.dtype) for total, tensor in zip(of_biases, biases, strict=True)]
        found = bias_gradients if learns else [None] * len(biases)
        return None, of_query.to(q.dtype), home[..., : ctx.key_dim], home[..., ctx.key_dim :], of_sinks, *found


def _pieces(whole: Whole, q: Tensor, part: Tensor, holder: int, key_dim: int) -> Iterator[Piece]:
    """Pairs of runs of which a query may see a key."""
    key, value = part[..., :key_dim].permute(1, 2, 0, 3), part[..., key_dim:].permute(1, 2, 0, 3)
    for rows, first_row in _places(whole.queries.runs(whole.rank)):
        for columns, first_column in _places(whole.keys.runs(holder)):
            place = 0, first_row, first_column
            mask = whole.mask_at(*place)
            block = Piece(q[:, :, rows], key[:, :, columns], value[:, :, columns], mask, rows, columns, place)
            if mask is None or _may_see(mask, block):
                yield block


def _places(runs: tuple[slice, ...]) -> Iterator[tuple[slice, int]]:
    """Which numbers of a process's own each run is, and at which position it begins."""
    start = 0
    for run in runs:
        count = run.stop - run.start
        yield slice(start, start + count), run.start
        start += count


def _may_see(mask: Mask, block: Piece) -> bool:
    q, keys = block.query, block.key.shape[2]
    grid = AttentionCall(cast(Any, None), q, block.key, block.value).grid
    start, stop = mask.structure(grid).columns(grid, slice(0, q.shape[2]))
    return start < stop and keys > 0


def _call(ring: Ring, block: Piece) -> AttentionCall:
    arguments = block.query, block.key, block.value, block.mask
    options = ring.options | ring.whole.dropout_at(*block.place)
    return validate_call(*arguments, environment=ring.environment._replace(gradients=False), **options)


def _packed(whole: Whole, k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one tensor (longest part, B, Hkv, D + Dv), which neighbours exchange."""
    rows = torch.cat([x.permute(2, 0, 1, 3) for x in (k, v)], -1)
    return filled(rows, whole.keys.longest).contiguous()


def _around(whole: Whole, own: Tensor, name: str) -> Iterator[tuple[int, Tensor]]:
    """Whose keys and values are here, and these, beginning with this process's own; the next ones come meanwhile."""
    world, here = whole.keys.world_size, own
    for turn in range(world):
        coming, works = None, []
        if turn < world - 1:
            coming, works = _shift(whole, here, name)
        yield (whole.rank - turn) % world, here
        _wait(works, name)
        here = here if coming is None else coming


def _shifted(whole: Whole, x: Tensor) -> Tensor:
    """What the process before this one holds, this one's going to the process after it."""
    coming, works = _shift(whole, x, _BACKWARD)
    _wait(works, _BACKWARD)
    return coming


def _shift(whole: Whole, x: Tensor, name: str) -> tuple[Tensor, list[Any]]:
    world, group = whole.keys.world_size, whole.group
    after, before = (dist.get_global_rank(group, (whole.rank + next) % world) for next in (1, -1))
    coming = torch.empty_like(x)
    operations = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, coming, before, group)]
    with step(name):
        return coming, dist.batch_isend_irecv(operations)


def _wait(works: list[Any], name: str) -> None:
    with step(name):
        for work in works:
            work.wait()
