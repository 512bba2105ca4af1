"""The method *ring*: keys and values travel around, and partial results are merged; no process holds all keys.

(Liu et al., "Ring attention with blockwise transformers", 2023.) They travel in blocks of a process's part, so that
what is on its way needs little memory beside the part itself. In the backward pass they travel once more, and their
gradients follow them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.call import AttentionCall, Results, valid_call
from ..kernels._some_keys import gradients_of_some_keys, merge_sinks, merge_some_keys
from ..masks._base import Mask
from ..masks._grid import Grid
from ._collectives import differentiable_once, step
from ._layout import Parts
from ._methods import Chunk, Whole

#: Blocks of a part at most (W² for few processes), and keys of a block at least. Every block is waited for, and passes
#: over all queries and their output; with two processes that costs more than the memory of larger blocks is worth.
_BLOCKS, _KEYS = 16, 128

_FORWARD, _BACKWARD, _STATISTICS = "forward: ring", "backward: ring", "statistics: ring"


def by_ring(q: Tensor, k: Tensor, v: Tensor, whole: Whole) -> Results:
    """Each block of keys and values is exchanged W − 1 times forward, and twice as often backward."""
    mask, sinks = whole.mask, whole.request.sinks
    biases = () if mask is None else mask.bias_tensors()
    if mask is not None:
        mask = mask.with_bias_tensors(tensor.detach() for tensor in biases)  # autograd alone holds those that learn
    request, environment = whole.request._replace(mask=mask, sinks=None), whole.environment._replace(gradients=False)
    whole = replace(whole, request=request, environment=environment)
    return Results(*cast("tuple[Tensor, Tensor]", _Ring.apply(whole, q, k, v, sinks, *biases)))


def chunks_of_ring(q: Tensor, k: Tensor, v: Tensor | None, whole: Whole) -> Iterator[Chunk]:
    """Every chunk in which a query may see a key, while keys, and values if there are some, travel around."""
    for visit in _around(whole, k, k[..., :0] if v is None else v, _STATISTICS):
        yield from _chunks(whole, q, visit)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Whole, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *biases: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        output = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
        for visit in _around(whole, k, v, _FORWARD):
            for chunk in _chunks(whole, q, visit):
                results, rows = whole.attend(chunk), chunk.rows
                merge_some_keys(output[:, :, rows], lse[:, :, rows], results.output, cast(Tensor, results.lse))
        if sinks is not None:
            merge_sinks(output, lse, sinks)
        ctx.whole = whole
        # Autograd notices writes to the mask's tensors if they are saved.
        mask_tensors = () if whole.mask is None else whole.mask.tensors()
        ctx.count = 6 + len(biases)
        ctx.save_for_backward(q, k, v, output, lse, sinks, *biases, *(x for x in mask_tensors if not x.is_inference()))
        ctx.mark_non_differentiable(lse)
        return output.to(q.dtype), lse

    @staticmethod
    @differentiable_once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, sinks, *biases = ctx.saved_tensors[: ctx.count]
        whole: Whole = ctx.whole
        dtype, of_output = output.dtype, gradients[0]
        learns = any(ctx.needs_input_grad[5:])
        correction = (of_output.to(dtype) * output).sum(-1)  # δ (B, H, l)
        of_query = torch.zeros_like(q, dtype=dtype)
        of_biases = [torch.zeros_like(tensor, dtype=dtype) for tensor in biases]
        of_keys = _Gradients(whole, k, v, dtype)
        for visit in _around(whole, k, v, _BACKWARD):
            of_block = of_keys.zeros(visit.key.shape[2])
            for chunk in _chunks(whole, q, visit):
                of_rows = (x[:, :, chunk.rows] for x in (output, lse, correction, of_output))
                dq, dk, dv, *others = gradients_of_some_keys(_call(whole, chunk), *of_rows, learns=learns)
                of_query[:, :, chunk.rows] += dq
                totals = *_key_and_value(of_block[chunk.columns], k.shape[3]), *(of_biases if others else ())
                for total, other in zip(totals, (dk, dv, *others), strict=True):
                    total += other
            of_keys.add(visit, of_block)
        of_key, of_value = (x.to(q.dtype) for x in _key_and_value(of_keys.home(), k.shape[3]))
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.to(dtype)[None, :, None] - lse).exp() * correction).sum((0, 2)).to(sinks.dtype)
        bias_gradients = [total.to(tensor.dtype) for total, tensor in zip(of_biases, biases, strict=True)]
        returned = bias_gradients if learns else [None] * len(biases)
        return None, of_query.to(q.dtype), of_key, of_value, of_sinks, *returned


class _Share(NamedTuple):
    """What a block holds of one run of a process's positions.

    Args:
        own: which of all that the process holds.
        within: which of the block.
        position: the first, in the whole sequence.
    """

    own: slice
    within: slice
    position: int


class _Visit(NamedTuple):
    """Keys and values that are here.

    Args:
        holder: the process whose they are.
        number: of the block; ``None`` for all of this process's own.
        shares: of the holder's runs.
        key, value: (B, Hkv, s, D) and (B, Hkv, s, Dv).
    """

    holder: int
    number: int | None
    shares: list[_Share]
    key: Tensor
    value: Tensor


def _chunks(whole: Whole, q: Tensor, visit: _Visit) -> Iterator[Chunk]:
    """The chunks of a block in which a query may see a key: each has one run of queries and one run of keys."""
    for rows, _, first_row in _shares(whole.queries, whole.rank):
        for _, columns, first_column in visit.shares:
            offset = whole.start._replace(row=first_row, column=first_column)
            key, value = visit.key[:, :, columns], visit.value[:, :, columns]
            chunk = Chunk(q[:, :, rows], key, value, offset, rows, columns)
            mask = whole.mask_at(offset)
            if mask is None or _may_see(mask, chunk):
                yield chunk


def _may_see(mask: Mask, chunk: Chunk) -> bool:
    (batch, heads, length, _), keys = chunk.query.shape, chunk.key.shape[2]
    grid = Grid(batch, heads, length, keys, chunk.query.device)
    start, stop = mask.structure(grid).columns(grid, slice(0, length))
    return start < stop and keys > 0


def _call(whole: Whole, chunk: Chunk) -> AttentionCall:
    request = whole.request_at(chunk.offset, chunk.query.shape[1])._replace(lse=False)
    return valid_call(chunk.query, chunk.key, chunk.value, request, whole.environment)


def _blocks(whole: Whole) -> int:
    """In how many blocks each part travels."""
    return max(1, min(whole.keys.world_size**2, _BLOCKS, whole.keys.longest // _KEYS))


def _shares(parts: Parts, holder: int, number: int = 0, blocks: int = 1) -> list[_Share]:
    """What a block holds: of every run as much, so that a causal mask leaves all processes as much of each block."""
    found: list[_Share] = []
    before = taken = 0
    for run in parts.runs(holder):
        length = run.stop - run.start
        least, more = divmod(length, blocks)
        start, count = number * least + min(number, more), least + (number < more)
        own = slice(before + start, before + start + count)
        found.append(_Share(own, slice(taken, taken + count), run.start + start))
        before, taken = before + length, taken + count
    return [share for share in found if share.own.start < share.own.stop]


def _size(shares: list[_Share]) -> int:
    return shares[-1].within.stop if shares else 0


def _key_and_value(rows: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values (s, B, Hkv, D + Dv), side by side as neighbours exchange them, as (B, Hkv, s, D) and (…, Dv)."""
    key, value = rows.permute(1, 2, 0, 3).tensor_split((key_dim,), -1)
    return key, value


def _longest(whole: Whole) -> int:
    """Keys of the longest block; every block travels in space for so many."""
    return max(_size(_shares(whole.keys, rank, 0, _blocks(whole))) for rank in range(whole.keys.world_size))


def _around(whole: Whole, k: Tensor, v: Tensor, name: str) -> Iterator[_Visit]:
    """This process's own keys and values, and then the others' blocks; the next one comes meanwhile.

    Three blocks are held beside the own part: the one that is here, one that leaves, and one that comes. Their memory
    is used again: a visit is over when the next one begins.
    """
    world, rank, blocks = whole.keys.world_size, whole.rank, _blocks(whole)
    held = k.new_zeros((3, _longest(whole), *k.shape[:2], k.shape[3] + v.shape[3]))
    turns = [(number, turn) for number in range(blocks) for turn in range(1, world)]

    def start(index: int) -> list[Any]:
        if index == len(turns):
            return []
        number, turn = turns[index]
        coming, sent = held[index % 3], held[(index - 1) % 3]
        if turn == 1:
            sent = held[(index + 1) % 3]
            for own, within, _ in _shares(whole.keys, rank, number, blocks):
                for place, x in zip(_key_and_value(sent[within], k.shape[3]), (k, v), strict=True):
                    place.copy_(x[:, :, own])
        return _shift(whole, sent, coming, name)

    works = start(0)
    yield _Visit(rank, None, _shares(whole.keys, rank), k, v)
    for index, (number, turn) in enumerate(turns):
        _wait(works, name)
        works = start(index + 1)
        holder = (rank - turn) % world
        shares = _shares(whole.keys, holder, number, blocks)
        yield _Visit(holder, number, shares, *_key_and_value(held[index % 3, : _size(shares)], k.shape[3]))


class _Gradients:
    """Gradients of keys and values: each block's follow it from process to process, until they are at home."""

    def __init__(self, whole: Whole, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self._whole, self._like, self._dtype = whole, (k, v), dtype
        self._home, self._longest = k.new_zeros(0), _longest(whole)
        self._coming: tuple[int, int, Tensor, list[Any]] | None = None  # holder, number, rows, works

    def zeros(self, count: int) -> Tensor:
        """For so many keys, (s, B, Hkv, D + Dv)."""
        k, v = self._like
        return k.new_zeros((count, *k.shape[:2], k.shape[3] + v.shape[3]), dtype=self._dtype)

    def add(self, visit: _Visit, found: Tensor) -> None:
        """Those that this process found; with what came for the same block they go on."""
        if visit.number is None:
            self._home = found
            return
        self._arrive(found)
        sent = self.zeros(self._longest)
        sent[: len(found)] = found
        coming = torch.empty_like(sent)
        works = _shift(self._whole, sent, coming, _BACKWARD)
        self._coming = (visit.holder - 1) % self._whole.keys.world_size, visit.number, coming, works

    def home(self) -> Tensor:
        """Of all of this process's keys and values, (s, B, Hkv, D + Dv)."""
        self._arrive(self._home)
        return self._home

    def _arrive(self, found: Tensor) -> None:
        """Wait for what comes: gradients of this process's own block, or of the one that is `found`."""
        if self._coming is None:
            return
        holder, number, coming, works = self._coming
        _wait(works, _BACKWARD)
        for own, within, _ in _shares(self._whole.keys, holder, number, _blocks(self._whole)):
            target = self._home[own] if holder == self._whole.rank else found[within]
            target += coming[within]


def _shift(whole: Whole, sent: Tensor, coming: Tensor, name: str) -> list[Any]:
    """To the process after this one, and from the one before it."""
    world, group = whole.keys.world_size, whole.group
    after, before = (dist.get_global_rank(group, (whole.rank + next) % world) for next in (1, -1))
    operations = [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, coming, before, group)]
    with step(name):
        return dist.batch_isend_irecv(operations)


def _wait(works: list[Any], name: str) -> None:
    with step(name):
        for work in works:
            work.wait()
