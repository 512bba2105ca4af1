"""Decoding with keys that are split over processes: each attends to its own, and partial results are merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.caching import Cache, KeyValues, Positions
from .._call.call import Results
from .._call.request import Request
from .._checks import integer
from .._environment import Environment
from .._layer.layer import Layer
from .._layer.plan import attend
from ..caches._base import unchanged_if_refused
from ..caches._cross import CrossKVCache
from ..caches._kv import KVCache
from ..errors import CacheError
from ..kernels._some_keys import merge_sinks, merge_some_keys
from ..masks._base import Mask
from ..masks._grid import Grid, Offset
from ..masks._part import part_of
from ._collectives import from_every_rank, step


@final
class ShardedKVCache(Cache):
    """The keys and values of one process of W: token n of the text is held by process n mod W.

    Made by `MultiHeadAttention.make_cache` after `context_parallel`.

    Args:
        own: holds this process's.
        max_length: how many tokens all processes hold together.
        rank, world: of this process, and W.
    """

    saves_cheaply: ClassVar[bool] = True

    def __init__(self, own: KVCache, max_length: int, rank: int, world: int) -> None:
        self.own, self.max_length, self.rank, self.world = own, max_length, rank, world
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def next_positions(self, count: int) -> Positions:
        return self._length

    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        """Take this process's of the keys and values of new tokens, and return all that it holds."""
        count = key.shape[2]
        if self._length + count > self.max_length:
            got = f"{self._length} held and {count} more"
            fix = "Make the cache larger. Nothing was written."
            raise CacheError("cache", expected=f"at most max_length = {self.max_length} tokens", got=got, fix=fix)
        first = (self.rank - self._length) % self.world
        found = self.own.update(key[:, :, first :: self.world], value[:, :, first :: self.world])
        self._length += count
        return found

    def saved(self, count: int) -> Callable[[], None]:
        length, bring_back = self._length, self.own.saved(count)

        def both() -> None:
            self._length = length
            bring_back()

        return both

    def reorder(self, indices: Tensor) -> None:
        self.own.reorder(indices)

    def crop(self, length: int | Tensor) -> None:
        if isinstance(length, Tensor):
            fix = "Give one length for all rows."
            raise CacheError("length", expected="an int", got="a tensor, one for each row", fix=fix)
        kept = integer("length", length, least=0, most=self._length, expected=f"0 … {self._length}")
        self.own.crop(len(range(self.rank, kept, self.world)))
        self._length = kept

    def reset(self) -> None:
        self.own.reset()
        self._length = 0

    def __repr__(self) -> str:
        return f"ShardedKVCache({self._length} of {self.max_length} tokens, process {self.rank} of {self.world})"


#: The cache of a module that is split: of the text being written, or of this process's part of a memory.
PartCache = ShardedKVCache | CrossKVCache


def common_facts(cache: PartCache | None) -> object:
    """What is equal in every process of a call's cache."""
    if cache is None:
        return None
    if isinstance(cache, ShardedKVCache):
        known, sizes = cache.own, (cache.length, cache.max_length)
    else:
        known, sizes = cache.get(), ()
    if known is None:
        return "no memory"
    key, value = known.key, known.value
    return sizes, key.shape[:2], key.shape[3], value.shape[3], key.dtype


def decode(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    cache: PartCache,
    grid: Grid,
    columns: Tensor,
    group: dist.ProcessGroup,
    environment: Environment,
) -> Tensor:
    """The output (B, L, E) of new tokens, which every process was given, in every process.

    One all-gather of partial outputs and their log-sum-exps, which each process merges alike.

    Args:
        layer: the call of the module.
        query: (B, L, features).
        key, value: of the new tokens, or of this process's part of a memory that the cache does not hold yet.
        mask: of the call.
        cache: takes the new keys and values.
        grid: of the new tokens and the keys of all processes.
        columns: the keys among them that the cache of this process then holds.
        group: of the processes.
        environment: of the call.
    """
    start = cast(int, grid.query_positions)
    with unchanged_if_refused((cache,), query, layer.request.mask, mask):
        combined = layer.combined(mask)
        if combined is not None:
            combined.validate(grid)
        known = cache.get()
        if known is None:
            q, k, v = layer.projected(query, key, value, start, environment)
            known = cache.update(k, v)
        else:
            q = layer.projected_query(query, environment)
        if torch.is_grad_enabled() and q.requires_grad:
            fix = "Decode under torch.no_grad() or torch.inference_mode()."
            raise CacheError(
                "query", expected="no gradients beside keys that are split", got="a tensor that requires them", fix=fix
            )
        part = _own_part(layer.request._replace(mask=combined, lse=True), q, known, grid, columns, environment)
    dtype = torch.promote_types(q.dtype, torch.float32)
    sent = torch.cat((part.output.to(dtype), cast(Tensor, part.lse).to(dtype)[..., None]), -1)  # (B, H, L, Dv + 1)
    with step("decoding: all-gather"):
        parts = from_every_rank(sent, group)
    output, lse = parts[0, ..., :-1].clone(), parts[0, ..., -1].clone()
    for other in parts[1:]:
        merge_some_keys(output, lse, other[..., :-1], other[..., -1])
    sinks = layer.request.sinks
    if sinks is not None:
        merge_sinks(output, lse, sinks)
    return layer.projected_out(Results(output.to(q.dtype)), environment)[0]


def _own_part(
    request: Request, q: Tensor, known: KeyValues, grid: Grid, columns: Tensor, environment: Environment
) -> Results:
    """Attention to the keys that this process holds, with its log-sum-exp; sinks are merged once, by all processes."""
    key, value = known.key, known.value

    def attend_to(key: Tensor, value: Tensor, columns: Tensor) -> Results:
        mask = part_of(cast("Mask | None", request.mask), Offset(grid.num_heads), grid, columns)
        return attend(q, key, value, request._replace(mask=mask, sinks=None), environment)

    if environment.kernel is not None and key.shape[2] == 0 < grid.key_length:
        # Without keys a forced kernel may run what it refuses in the other processes, which then refuse alone.
        one_key, one_value = (x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (key, value))
        attend_to(one_key, one_value, columns.new_zeros(1))
    return attend_to(key, value, columns)
