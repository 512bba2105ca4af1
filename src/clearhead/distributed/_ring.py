"""The method *ring*: keys and values travel around, and partial results are merged. No process holds all keys.

(Liu et al., "Ring attention with blockwise transformers", 2023.) They travel in blocks of a shard, so that the blocks
on their way need little memory beside the shard. In the backward pass they travel once more, and their gradients follow
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.call import Results, valid_call
from .._call.saved import layouts_of, restored_all, with_saved
from ..kernels._merging import gradients_of_some_keys, merge_sinks, merge_some_keys
from ..masks._base import Mask
from ..masks._bound import bind
from ..masks._grid import Grid
from ._collectives import differentiable_once, step
from ._layout import Shards
from ._methods import Chunk, SharedCall

#: The most blocks of a shard (W² for few processes), and the fewest keys of a block. Each block costs one wait and one
#: pass over all queries and their output. With two processes small blocks cost more time than their memory is worth.
_BLOCKS, _KEYS = 16, 128

#: What a backward pass reads, followed by biases.
_NAMES = "query", "key", "value", "output", "lse", "sinks"
_FORWARD, _BACKWARD, _STATISTICS = "forward: ring", "backward: ring", "statistics: ring"


def by_ring(q: Tensor, k: Tensor, v: Tensor, shared: SharedCall) -> Results:
    """Attention while the keys travel around: W − 1 exchanges of each block forward, and twice as many backward."""
    mask, sinks = shared.options.get("mask"), shared.options.get("sinks")
    biases = () if mask is None else mask.bias_tensors()
    if mask is not None:
        mask = mask.with_bias_tensors(tensor.detach() for tensor in biases)  # only autograd holds those that learn
    options, environment = {**shared.options, "mask": mask, "sinks": None}, shared.environment._replace(gradients=False)
    shared = replace(shared, options=options, environment=environment)
    return Results(*cast("tuple[Tensor, Tensor]", _Ring.apply(shared, q, k, v, sinks, *biases)))


def chunks_of_ring(q: Tensor, k: Tensor, v: Tensor | None, shared: SharedCall) -> Iterator[Chunk]:
    """The chunks that are not fully masked, while the keys, and the values if they are given, travel around."""
    for block in _around(shared, k, k[..., :0] if v is None else v, _STATISTICS):
        yield from _chunks(shared, q, block)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shared: SharedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *biases: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        output = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
        for block in _around(shared, k, v, _FORWARD):
            for chunk in _chunks(shared, q, block):
                results, rows = shared.attend(chunk), chunk.rows
                merge_some_keys(output[:, :, rows], lse[:, :, rows], results.output, cast(Tensor, results.lse))
        if sinks is not None:
            merge_sinks(output, lse, sinks)
        ctx.shared = shared
        # Autograd notices writes to the mask's tensors if they are saved.
        mask = shared.options["mask"]
        mask_tensors = () if mask is None else mask.tensors()
        ctx.read_again = tuple(x for x in mask_tensors if not x.is_inference())
        read = q, k, v, output, lse, sinks, *biases
        ctx.layouts = layouts_of(read)
        ctx.save_for_backward(*read, *ctx.read_again)
        ctx.mark_non_differentiable(lse)
        return output.to(q.dtype), lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, count = ctx.saved_tensors, len(ctx.layouts)
        q, k, v, output, lse, sinks, *biases = restored_all(_NAMES, saved[:count], ctx.layouts)
        options = ctx.shared.options
        options = options | with_saved(options, ctx.read_again, saved[count:])
        shared: SharedCall = replace(ctx.shared, options=options)
        dtype, of_output = output.dtype, gradients[0]
        learns = any(ctx.needs_input_grad[5:])
        correction = (of_output.to(dtype) * output).sum(-1)  # δ (B, H, l)
        of_query = torch.zeros_like(q, dtype=dtype)
        of_biases = [torch.zeros_like(tensor, dtype=dtype) for tensor in biases]
        of_keys = _Gradients(shared, k, v, dtype)
        for block in _around(shared, k, v, _BACKWARD):
            of_block = of_keys.zeros(block)
            for chunk in _chunks(shared, q, block):
                of_rows = (x[:, :, chunk.rows] for x in (output, lse, correction, of_output))
                call = shared.call_at(chunk.offset, chunk.query, chunk.key, chunk.value, lse=False)
                call = valid_call(call, shared.environment)
                dq, *gradients_of_chunk = gradients_of_some_keys(call, *of_rows, learns=learns)
                of_query[:, :, chunk.rows] += dq
                totals = *_key_and_value(of_block[chunk.columns], k.shape[3]), *(of_biases if learns else ())
                for total, gradient in zip(totals, gradients_of_chunk, strict=True):
                    total += gradient
            of_keys.add(block, of_block)
        of_key, of_value = (x.to(q.dtype) for x in _key_and_value(of_keys.home(), k.shape[3]))
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.to(dtype)[None, :, None] - lse).exp() * correction).sum((0, 2)).to(sinks.dtype)
        bias_gradients = [total.to(tensor.dtype) for total, tensor in zip(of_biases, biases, strict=True)]
        returned = bias_gradients if learns else [None] * len(biases)
        return None, of_query.to(q.dtype), of_key, of_value, of_sinks, *returned


class _Segment(NamedTuple):
    """The positions that a block and one interval of a shard have in common.

    Args:
        of_shard: the segment as a slice of the shard.
        of_block: the segment as a slice of the block.
        position: its first position in the whole sequence.
    """

    of_shard: slice
    of_block: slice
    position: int


class _RingBlock(NamedTuple):
    """Keys and values that this process holds at the moment.

    Args:
        rank: the process of whose shard they are.
        number: the number of the block. ``None`` for the whole shard of this process.
        segments: its intervals.
        key, value: (B, Hkv, s, D) and (B, Hkv, s, Dv).
    """

    rank: int
    number: int | None
    segments: list[_Segment]
    key: Tensor
    value: Tensor


def _chunks(shared: SharedCall, q: Tensor, block: _RingBlock) -> Iterator[Chunk]:
    """The chunks of a block that are not fully masked. Each has one interval of queries and one of keys."""
    for rows, _, first_row in _segments(shared.queries, shared.rank):
        for _, columns, first_column in block.segments:
            offset = shared.start._replace(row=first_row, column=first_column)
            key, value = block.key[:, :, columns], block.value[:, :, columns]
            chunk = Chunk(q[:, :, rows], key, value, offset, rows, columns)
            mask = shared.mask_at(offset)
            if mask is None or _may_see(mask, chunk):
                yield chunk


def _may_see(mask: Mask, chunk: Chunk) -> bool:
    (batch, heads, length, _), keys = chunk.query.shape, chunk.key.shape[2]
    grid = Grid(batch, heads, length, keys, chunk.query.device)
    start, stop = bind(mask, grid).structure.columns(grid, slice(0, length))
    return start < stop and keys > 0


def _blocks(shared: SharedCall) -> int:
    """The number of blocks of each shard."""
    return max(1, min(shared.keys.world_size**2, _BLOCKS, shared.keys.longest // _KEYS))


def _segments(shards: Shards, rank: int, number: int = 0, blocks: int = 1) -> list[_Segment]:
    """The segments of a block. It has an equal share of each interval, so a causal mask balances the work of blocks."""
    segments: list[_Segment] = []
    of_shard = of_block = 0
    for interval in shards.intervals[rank]:
        length = len(interval)
        start, stop = (length * index // blocks for index in (number, number + 1))
        if start < stop:
            block_slice = slice(of_block, of_block + stop - start)
            segments.append(_Segment(slice(of_shard + start, of_shard + stop), block_slice, interval.start + start))
        of_shard, of_block = of_shard + length, of_block + stop - start
    return segments


def _size(segments: list[_Segment]) -> int:
    return segments[-1].of_block.stop if segments else 0


def _key_and_value(joined: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values (s, B, Hkv, D + Dv), side by side as neighbours exchange them, as (B, Hkv, s, D) and (…, Dv)."""
    key, value = joined.permute(1, 2, 0, 3).tensor_split((key_dim,), -1)
    return key, value


def _longest(shared: SharedCall) -> int:
    """The number of keys of the longest block, which is a last one. Every block travels in a buffer of this size."""
    keys, blocks = shared.keys, _blocks(shared)
    return max(_size(_segments(keys, rank, blocks - 1, blocks)) for rank in range(keys.world_size))


def _around(shared: SharedCall, k: Tensor, v: Tensor, name: str) -> Iterator[_RingBlock]:
    """The shard of this process, and then the blocks of the others. Each is computed with while the next one arrives.

    A process holds three blocks beside its shard: one is computed with, one is sent, and one is received. Their memory
    is used again, so a block is valid until the next one is yielded.
    """
    world, rank, blocks = shared.keys.world_size, shared.rank, _blocks(shared)
    buffers = k.new_zeros((3, _longest(shared), *k.shape[:2], k.shape[3] + v.shape[3]))
    turns = [(number, turn) for number in range(blocks) for turn in range(1, world)]

    def start(index: int) -> list[Any]:
        if index == len(turns):
            return []
        number, turn = turns[index]
        received, sent = buffers[index % 3], buffers[(index - 1) % 3]
        if turn == 1:
            sent = buffers[(index + 1) % 3]
            for segment in _segments(shared.keys, rank, number, blocks):
                for target, x in zip(_key_and_value(sent[segment.of_block], k.shape[3]), (k, v), strict=True):
                    target.copy_(x[:, :, segment.of_shard])
        return _shift(shared, sent, received, name)

    works = start(0)
    yield _RingBlock(rank, None, _segments(shared.keys, rank), k, v)
    for index, (number, turn) in enumerate(turns):
        _wait(works, name)
        works = start(index + 1)
        sender = (rank - turn) % world
        segments = _segments(shared.keys, sender, number, blocks)
        yield _RingBlock(sender, number, segments, *_key_and_value(buffers[index % 3, : _size(segments)], k.shape[3]))


class _Gradients:
    """Gradients of keys and values. Those of a block follow it from process to process, back to its own process."""

    def __init__(self, shared: SharedCall, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self._shared, self._longest = shared, _longest(shared)
        self._of_shard = k.new_zeros((0, *k.shape[:2], k.shape[3] + v.shape[3]), dtype=dtype)
        self._arriving: tuple[int, int, Tensor, list[Any]] | None = None  # rank, number, gradients, works

    def zeros(self, block: _RingBlock) -> Tensor:
        """Zeros for the keys and values of a block, (s, B, Hkv, D + Dv); of one length if it travels."""
        count = block.key.shape[2] if block.number is None else self._longest
        return self._of_shard.new_zeros((count, *self._of_shard.shape[1:]))

    def add(self, block: _RingBlock, gradients: Tensor) -> None:
        """Add the gradients of this process to the received gradients of the same block, and send the sum on."""
        if block.number is None:
            self._of_shard = gradients
            return
        self._receive(gradients)
        received = torch.empty_like(gradients)
        works = _shift(self._shared, gradients, received, _BACKWARD)
        self._arriving = (block.rank - 1) % self._shared.keys.world_size, block.number, received, works

    def home(self) -> Tensor:
        """The gradients of the shard of this process, (s, B, Hkv, D + Dv)."""
        self._receive(self._of_shard)
        return self._of_shard

    def _receive(self, gradients: Tensor) -> None:
        """Wait for gradients. Add them to those of this process's shard, or to `gradients` of another block."""
        if self._arriving is None:
            return
        rank, number, received, works = self._arriving
        _wait(works, _BACKWARD)
        if rank != self._shared.rank:
            gradients += received
            return
        for of_shard, of_block, _ in _segments(self._shared.keys, rank, number, _blocks(self._shared)):
            self._of_shard[of_shard] += received[of_block]


def _shift(shared: SharedCall, sent: Tensor, received: Tensor, name: str) -> list[Any]:
    """Send to the next process, and receive from the previous one."""
    world, group = shared.keys.world_size, shared.group
    after, before = (dist.get_global_rank(group, (shared.rank + next) % world) for next in (1, -1))
    operations = [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, received, before, group)]
    with step(name):
        return dist.batch_isend_irecv(operations)


def _wait(works: list[Any], name: str) -> None:
    with step(name):
        for work in works:
            work.wait()
