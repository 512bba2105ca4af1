"""`attention_statistics` of queries and keys of which each process holds a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._call.call import AttentionCall, valid_call
from .._call.request import Request
from .._checks import FLOATS
from .._environment import Environment, autocast_off, cast_for_autocast, read_environment
from .._statistics.arguments import DEFAULT, Per, counted_queries, make_options, query_marks, require_names, require_per
from .._statistics.compute import attention_statistics as of_one_process
from .._statistics.compute import compute_statistics
from .._statistics.definitions import need_values
from .._statistics.result import AttentionStatistics
from .._statistics.statistic import Options
from .._weights import Queries, checked_queries, row_numbers
from ..errors import KernelError
from ..masks._base import Mask
from ..masks._check import as_positions
from ..masks._tensors import as_mask
from ._agreement import Gathered, agree_in_turn, fingerprint, group_of, require_equal, require_mesh
from ._layout import Layout, require_layout
from ._methods import Whole, like_whole, mask_fact, runs_of_queries
from ._sequence import shards_of
from ._statistics import shared_call

_WHERE = "attention_statistics"
_SAME = "All processes of the mesh make the same call, each with its part of query, key and value, and all else whole."


def attention_statistics(
    query: Tensor,
    key: Tensor,
    mesh: DeviceMesh,
    mask: Mask | Tensor | None = None,
    *,
    layout: Layout = "contiguous",
    value: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    statistics: Sequence[str] = DEFAULT,
    query_mask: Tensor | None = None,
    queries: Queries | None = None,
    top_k: int = 8,
    map_size: int = 128,
    map_pooling: Literal["mass", "max"] = "mass",
    sink_keys: int = 1,
    offsets: Sequence[int] = (-1,),
    per: Per = "query_head",
) -> AttentionStatistics:
    """`clearhead.attention_statistics` of one call whose queries and keys are split over processes.

    Every process passes its shard of query, key and value. All other arguments are those of the whole, as for one
    process. The processes agree on the call by two small records, and gather the keys. They gather the values only for
    ``output`` and ``output_norm``. Statistics exchange the same totals as in a record under *gather*. A mesh of one
    process exchanges nothing.

    Args:
        query: (B, H, l, D), or (H, l, D) without a batch. It is this process's shard of the L queries, as
            ``shard_sequence(query, mesh, dim=-2)`` cuts it.
        key: (B, Hkv, s, D), its shard of the S keys.
        mesh: a mesh of one dimension with W processes, as ``mesh["cp"]`` of a larger one.
        mask, sinks, query_positions, key_positions: as for `clearhead.attention_statistics`, for all queries and keys.
        layout: the layout of both sequences, as in `shard_sequence`. Default ``"contiguous"``.
        value: (B, Hkv, s, Dv), its shard of the values.
        query_mask: bool or 0/1 (B, L), for all queries. By default all queries count.
        queries: the queries that ``rows`` covers, among all queries. By default ``rows`` covers all.
        scale, softcap, statistics, top_k, map_size, map_pooling, sink_keys, offsets, per: as for
            `clearhead.attention_statistics`.

    Returns:
        An `AttentionStatistics`. Per-query statistics, and ``head_average``, cover this process's queries. ``rows``
        covers the chosen queries among them, and ``received`` covers its keys. All others cover the whole. Keys in
        ``top_k`` are numbered in the whole sequence.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError, MaskTypeError: as `clearhead.attention_statistics`, and for
            a mesh of several dimensions or an unknown layout.
        KernelError: inside `torch.func` and forward-mode derivatives.
        DistributedError: if another process raises one of these or makes another call, or if the shards do not fit
            together.

    Example:
        >>> import torch, torch.distributed as dist, clearhead
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from clearhead.distributed import attention_statistics, gather_sequence, shard_sequence
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun sets these
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> query, key = (shard_sequence(torch.randn(2, h, 7, 8), mesh, dim=2) for h in (4, 2))
        >>> found = attention_statistics(query, key, mesh, clearhead.masks.causal(), statistics=("entropy",))
        >>> gather_sequence(found.entropy, mesh, dim=2).shape
        torch.Size([2, 4, 7])
        >>> dist.destroy_process_group()
    """
    given: dict[str, Any] = {
        "value": value,
        "scale": scale,
        "softcap": softcap,
        "sinks": sinks,
        "query_positions": query_positions,
        "key_positions": key_positions,
        "statistics": statistics,
        "query_mask": query_mask,
        "queries": queries,
        "top_k": top_k,
        "map_size": map_size,
        "map_pooling": map_pooling,
        "sink_keys": sink_keys,
        "offsets": offsets,
        "per": per,
    }
    group, device = group_of(mesh)
    if dist.get_world_size(group) == 1:
        require_mesh(mesh)
        require_layout(layout)
        return of_one_process(query, key, mask, **given)

    def find() -> tuple[dict[str, int], _Call]:
        require_mesh(mesh)
        call = _read(query, key, mask, layout, given)
        return _facts(call), call

    # The second agreement is about errors that show only in the length of the whole sequence.
    return _computed(*agree_in_turn(_WHERE, (group, group), device, find, partial(_whole, group)))


@dataclass(frozen=True)
class _Call:
    """The call of one process.

    Args:
        local: the query, key and value of this process as a call. The values have no features if no statistic reads
            them.
        request: how the whole attends.
        query_mask, per: as in `attention_statistics`.
        queries: the chosen queries.
        names, options: the statistics.
        layout: the layout of both sequences.
        environment: the environment of the call.
    """

    local: AttentionCall
    request: Request
    query_mask: Tensor | None
    per: Per
    queries: Queries | None
    names: tuple[str, ...]
    options: Options
    layout: Layout
    environment: Environment

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.local.query, self.local.key, self.local.value


def _read(query: Tensor, key: Tensor, mask: Mask | Tensor | None, layout: Layout, given: dict[str, Any]) -> _Call:
    """The checked arguments."""
    require_layout(layout)
    names = require_names(given["statistics"], given["value"] is not None)
    options = make_options(*(given[name] for name in ("top_k", "map_size", "map_pooling", "sink_keys", "offsets")))
    require_per(given["per"], names)
    environment = read_environment()._replace(gradients=False, autocast=False, observed=False)
    if environment.transformed:
        raise KernelError(f"{_WHERE}: torch.func and forward-mode derivatives do not follow exchanges.")
    query, key, *values = cast_for_autocast(query, key, *(() if given["value"] is None else (given["value"],)))
    numbers = {name: given[name] for name in ("scale", "softcap", "sinks")}
    with torch.no_grad(), autocast_off(query):
        local = valid_call(query, key, values[0] if values else None, Request(**numbers), environment)
    if not need_values(names):
        local = replace(local, value=local.key[..., :0])
    positions = {name: given[name] for name in ("query_positions", "key_positions")}
    for name, each in positions.items():
        as_positions(name, each, per_head=name == "key_positions")
    if given["query_mask"] is not None:
        query_marks(given["query_mask"])
    request = Request(None if mask is None else as_mask(mask), **numbers, **positions)
    queries = checked_queries("queries", given["queries"])
    return _Call(local, request, given["query_mask"], given["per"], queries, names, options, layout, environment)


def _facts(call: _Call) -> dict[str, int]:
    """The facts that the processes agree on, and the lengths of their shards, which may differ."""
    (query, key, value), spec = call.operands, call.local.spec
    # The call of the whole checks the sizes of tensors.
    tensors = {
        "query_positions": call.request.query_positions,
        "key_positions": call.request.key_positions,
        "query_mask": call.query_mask,
    }
    rows = call.queries.tolist() if isinstance(call.queries, Tensor) else call.queries
    return {
        "layout": fingerprint(call.layout),
        "batch size": query.shape[0],
        "query heads": query.shape[1],
        "key/value heads": key.shape[1],
        "head_dim": query.shape[3],
        "head_dim of values": value.shape[3],
        "dtype": FLOATS.index(query.dtype),
        "mask": mask_fact(cast("Mask | None", call.request.mask)),
        **{name: fingerprint("a tensor" if isinstance(x, Tensor) else x) for name, x in tensors.items()},
        "scale": fingerprint(spec.scale),
        "softcap": fingerprint(spec.softcap),
        "sinks": spec.sinks,
        "statistics": fingerprint(call.names, call.per),
        "options": fingerprint(call.options),
        "queries": fingerprint(rows),
        "query": query.shape[2],
        "key": key.shape[2],
    }


def _whole(group: dist.ProcessGroup, gathered: Gathered, call: _Call) -> tuple[_Call, Whole, Tensor | None]:
    """The call, the whole, and the counted queries. Raise unless all processes make one call."""
    require_equal(_WHERE, gathered, [name for name in gathered[0] if name not in ("query", "key")], _SAME)
    queries, keys = (shards_of(_WHERE, gathered, name, call.layout) for name in ("query", "key"))
    with torch.no_grad(), autocast_off(call.local.query):
        whole = valid_call(*like_whole(call.operands, queries, keys), call.request, call.environment)
    row_numbers(call.queries, queries.length)
    counted = counted_queries(call.query_mask, whole)
    rank, environment = dist.get_rank(group), call.environment
    return call, Whole(group, rank, queries, keys, whole.grid, whole.request, environment, _WHERE), counted


def _computed(call: _Call, whole: Whole, counted: Tensor | None) -> AttentionStatistics:
    """Statistics of gathered keys and of each run of this process's queries."""
    with torch.no_grad(), autocast_off(call.local.query):
        shared = shared_call(call.operands, whole, [*runs_of_queries(*call.operands, whole)])
        return compute_statistics(shared, call.names, call.options, counted, call.queries, call.per)
