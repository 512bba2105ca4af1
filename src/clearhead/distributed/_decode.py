"""Decoding with split keys. Each process attends to the keys that it holds, and the results are merged."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.caching import KeyValues
from .._call.call import Results
from .._call.request import Request
from .._environment import Environment
from .._layer.layer import Layer
from .._layer.plan import attend
from ..caches._base import unchanged_if_refused
from ..errors import CacheError
from ..kernels._some_keys import merge_sinks, merge_some_keys
from ..masks._base import Mask
from ..masks._grid import Grid, Offset
from ..masks._part import part_of
from ._arguments import Arguments
from ._cached import ShardedKVCache, SplitCache
from ._collectives import from_every_rank, step
from ._layout import Shards


def decode(
    layer: Layer,
    arguments: Arguments,
    cache: SplitCache,
    memory: list[Shards],
    group: dist.ProcessGroup,
    environment: Environment,
) -> tuple[Tensor, None]:
    """The output (B, L, E) of new tokens, in every process. Every process has all of them.

    One all-gather exchanges partial outputs and their log-sum-exps. Each process merges them alike.

    Args:
        layer: the call of the module.
        arguments: the new tokens, or with a memory the queries and this process's shard of the memory.
        cache: the cache, which takes the new keys and values.
        memory: the shards of the memory, one item; empty without a memory.
        group: the group of the processes.
        environment: the environment of the call.
    """
    query, key, value, mask, *_ = arguments
    grid, columns = _place(layer.num_heads, arguments, cache, memory, group)
    with unchanged_if_refused((cache,), query, layer.request.mask, mask):
        combined = layer.combined(mask)
        if combined is not None:
            combined.validate(grid)
        key_values = cache.get()
        if key_values is None:
            q, k, v = layer.projected(query, key, value, cast(int, grid.query_positions), environment)
            key_values = cache.update(k, v)
        else:
            q = layer.projected_query(query, environment)
        if torch.is_grad_enabled() and q.requires_grad:
            expected, got = "no gradients beside keys that are split", "a tensor that requires them"
            fix = "Decode under torch.no_grad() or torch.inference_mode()."
            raise CacheError("query", expected=expected, got=got, fix=fix)
        request = layer.request._replace(mask=combined, lse=True)
        partial = _attend_to_shard(request, q, key_values, grid, columns, environment)
    dtype = torch.promote_types(q.dtype, torch.float32)
    sent = torch.cat(
        (partial.output.to(dtype), cast(Tensor, partial.lse).to(dtype)[..., None]), -1
    )  # (B, H, L, Dv + 1)
    with step("decoding: all-gather"):
        partials = from_every_rank(sent, group)  # (W, B, H, L, Dv + 1)
    output, lse = partials[0, ..., :-1].clone(), partials[0, ..., -1].clone()
    for other in partials[1:]:
        merge_some_keys(output, lse, other[..., :-1], other[..., -1])
    if layer.request.sinks is not None:
        merge_sinks(output, lse, layer.request.sinks)
    return layer.projected_out(Results(output.to(q.dtype)), environment, batched=arguments.batched)[0], None


def _place(
    num_heads: int, arguments: Arguments, cache: SplitCache, memory: list[Shards], group: dist.ProcessGroup
) -> tuple[Grid, Tensor]:
    """The grid of the new tokens and the keys of all processes, and the keys that this process then holds."""
    (batch, count, _), device = arguments.query.shape, arguments.query.device
    if isinstance(cache, ShardedKVCache):
        length, first = cache.length + arguments.key.shape[1], cache.length
        columns = torch.arange(cache.rank, max(cache.rank, length), cache.world, device=device)
    else:
        (keys,) = memory
        length, first, columns = keys.length, 0, keys.positions(dist.get_rank(group), device)
    return Grid(batch, num_heads, count, length, device, first), columns


def _attend_to_shard(
    request: Request, q: Tensor, key_values: KeyValues, grid: Grid, columns: Tensor, environment: Environment
) -> Results:
    """Attention to the keys that this process holds, with its log-sum-exp and without sinks, which are merged once."""
    key, value = key_values.key, key_values.value

    def attend_to(key: Tensor, value: Tensor, columns: Tensor) -> Results:
        mask = part_of(cast("Mask | None", request.mask), Offset(grid.num_heads), grid, columns)
        return attend(q, key, value, request._replace(mask=mask, sinks=None), environment)

    if environment.kernel is not None and key.shape[2] == 0 < grid.key_length:
        # Without keys a forced kernel may run a call that it refuses in the other processes. Here it refuses too.
        one_key, one_value = (x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (key, value))
        attend_to(one_key, one_value, columns.new_zeros(1))
    return attend_to(key, value, columns)
