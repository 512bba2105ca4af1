"""Decoding with split keys. Each process attends to the keys of its cache, and the results are merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.caching import Cache, KeyValues, Positions, unchanged_if_refused
from .._call.call import Call, Results
from .._checks import integer
from .._environment import Environment
from .._layer.layer import Layer
from .._layer.plan import attend
from ..caches._kv import CrossKVCache, KVCache
from ..errors import CacheError
from ..kernels._merging import merge_sinks, merge_some_keys
from ..masks._base import Mask
from ..masks._bound import bind
from ..masks._grid import Grid, Offset
from ..masks._part import Columns, part_of
from ._collectives import from_every_rank, step
from ._layout import Shards


@final
class ShardedKVCache(Cache):
    """The keys and values of one process of W: token n of the text is held by process n mod W.

    Made by `MultiHeadAttention.make_cache` after `context_parallel`.

    Args:
        local: the cache of this process's tokens.
        max_length: the most tokens that all processes hold together.
        rank, world: this process, and W.
    """

    saves_cheaply: ClassVar[bool] = True

    def __init__(self, local: KVCache, max_length: int, rank: int, world: int) -> None:
        self.local, self.max_length, self.rank, self.world = local, max_length, rank, world
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def next_positions(self, count: int) -> Positions:
        return self._length

    def update(self, key: Tensor, value: Tensor, positions: Positions | None = None) -> KeyValues:
        """Store this process's keys and values of new tokens, and return all that it holds."""
        count = key.shape[2]
        if self._length + count > self.max_length:
            got = f"{self._length} held and {count} more"
            fix = "Make the cache larger. Nothing was written."
            raise CacheError("cache", expected=f"at most max_length = {self.max_length} tokens", got=got, fix=fix)
        first = (self.rank - self._length) % self.world
        key_values = self.local.update(key[:, :, first :: self.world], value[:, :, first :: self.world])
        self._length += count
        return key_values

    def saved(self, count: int) -> Callable[[], None]:
        length, restore_local = self._length, self.local.saved(count)

        def restore() -> None:
            self._length = length
            restore_local()

        return restore

    def reorder(self, indices: Tensor) -> None:
        self.local.reorder(indices)

    def crop(self, length: int | Tensor) -> None:
        if isinstance(length, Tensor):
            fix = "Give one length for all rows."
            raise CacheError("length", expected="an int", got="a tensor, one for each row", fix=fix)
        length = integer("length", length, least=0, most=self._length, expected=f"0 … {self._length}")
        self.local.crop(len(range(self.rank, length, self.world)))
        self._length = length

    def reset(self) -> None:
        self.local.reset()
        self._length = 0

    def __repr__(self) -> str:
        return f"ShardedKVCache({self._length} of {self.max_length} tokens, process {self.rank} of {self.world})"


#: The cache of a split module: of the text that is generated, or of this process's shard of a memory.
SplitCache = ShardedKVCache | CrossKVCache


def sizes_of(cache: SplitCache | None) -> object:
    """The sizes and the dtype of a call's cache, equal in every process."""
    if cache is None:
        return None
    sharded = isinstance(cache, ShardedKVCache)
    key_values = cache.local if sharded else cache.get()
    if key_values is None:
        return "no memory"
    key, value = key_values.key, key_values.value
    lengths = (cache.length, cache.max_length) if sharded else ()
    return lengths, key.shape[:2], key.shape[3], value.shape[3], key.dtype


def decode(
    layer: Layer,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Mask | None,
    cache: SplitCache,
    memory: list[Shards],
    group: dist.ProcessGroup,
    environment: Environment,
) -> Results:
    """The output (B, H, L, Dv) of new tokens, in every process. Every process has all of them.

    One all-gather exchanges partial outputs and their log-sum-exps. Each process merges them alike.

    Args:
        layer: the call of the module.
        inputs: three times the new tokens, or with a memory the queries and this process's shard of the memory.
        mask: the mask of the call.
        cache: the cache, which takes the new keys and values.
        memory: the shards of the memory, one item; empty without a memory.
        group: the group of the processes.
        environment: the environment of the call.
    """
    query, key, value = inputs
    grid, columns = _grid_and_columns(layer.num_heads, query, key, cache, memory, group)
    with unchanged_if_refused((cache,), query, layer.mask, mask):
        combined = layer.combined(mask)
        if combined is not None:
            combined.validate(grid)
        key_values = cache.get()
        if key_values is None:
            q, k, v = layer.projected(query, key, value, cast(int, grid.query_positions), environment)
            key_values = cache.update(k, v)
        else:
            q = layer.projected_query(query, environment)
        if environment.gradients and q.requires_grad:
            expected, got = "no gradients beside keys that are split", "a tensor that requires them"
            fix = "Decode under torch.no_grad() or torch.inference_mode()."
            raise CacheError("query", expected=expected, got=got, fix=fix)
        options = {**layer.options, "mask": combined, "lse": True}
        results = _attend_to_shard(options, q, key_values, grid, columns, environment)
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = cast(Tensor, results.lse)
    sent = torch.cat((results.output.to(dtype), lse.to(dtype)[..., None]), -1)  # (B, H, L, Dv + 1)
    with step("decoding: all-gather"):
        partials = from_every_rank(sent, group)  # (W, B, H, L, Dv + 1)
    output, lse = partials[0, ..., :-1].clone(), partials[0, ..., -1].clone()
    for partial in partials[1:]:
        merge_some_keys(output, lse, partial[..., :-1], partial[..., -1])
    if (sinks := layer.options.get("sinks")) is not None:
        merge_sinks(output, lse, sinks)
    return Results(output.to(q.dtype))


def _grid_and_columns(
    num_heads: int, query: Tensor, key: Tensor, cache: SplitCache, memory: list[Shards], group: dist.ProcessGroup
) -> tuple[Grid, Columns]:
    """The grid of the new tokens and the keys of all processes, and the keys that this process then holds."""
    (batch, count, _), device = query.shape, query.device
    if isinstance(cache, ShardedKVCache):
        length, first = cache.length + key.shape[1], cache.length
        columns = range(cache.rank, max(cache.rank, length), cache.world)
    else:
        (keys,) = memory
        length, first, columns = keys.length, 0, keys.columns(dist.get_rank(group), device)
    return Grid(batch, num_heads, count, length, device, first), columns


def _attend_to_shard(
    options: dict[str, Any], q: Tensor, key_values: KeyValues, grid: Grid, columns: Columns, environment: Environment
) -> Results:
    """Attention to the keys that this process holds, with its log-sum-exp and without sinks, which are merged once."""
    key, value = key_values.key, key_values.value

    def attend_to(key: Tensor, value: Tensor, columns: Columns) -> Results:
        mask = part_of(bind(options["mask"], grid), Offset(grid.num_heads), columns)
        of_shard: dict[str, Any] = {**options, "mask": mask, "sinks": None}
        return attend(Call(q, key, value, **of_shard), environment)

    if environment.kernel is not None and key.shape[2] == 0 < grid.key_length:
        # Without keys a forced kernel may run a call that it refuses in the other processes. Here it refuses too.
        one_key, one_value = (x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (key, value))
        attend_to(one_key, one_value, range(1))
    return attend_to(key, value, columns)
