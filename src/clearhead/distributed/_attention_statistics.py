"""`attention_statistics` of queries and keys of which each process holds a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._call.call import Call, valid_call
from .._checks import FLOATS
from .._environment import Environment, autocast_off, cast_for_autocast, read_environment
from .._statistics.arguments import DEFAULT, Per, counted_queries, make_options, query_marks, require_names, require_per
from .._statistics.compute import attention_statistics as of_one_process
from .._statistics.compute import compute_statistics
from .._statistics.definitions import need_values
from .._statistics.result import AttentionStatistics
from .._statistics.statistic import Options
from .._weights import Queries, checked_queries, row_numbers
from ..errors import KernelError, ShapeError
from ..masks._base import Mask
from ..masks._grid import as_positions
from ..masks._tensors import as_mask
from ._agreement import Gathered, agreement, fingerprint, group_of, require_equal, require_mesh
from ._layout import Layout, require_layout
from ._methods import Operands, SharedCall, chunks_of_queries, mask_fact, of_all_sizes
from ._sequence import shards_of
from ._statistics import shared_call_of

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
    how: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    how |= {"query_positions": query_positions, "key_positions": key_positions}
    options: dict[str, Any] = {"top_k": top_k, "map_size": map_size, "map_pooling": map_pooling}
    options |= {"sink_keys": sink_keys, "offsets": offsets}
    chosen: dict[str, Any] = {"statistics": statistics, "query_mask": query_mask, "queries": queries, "per": per}
    group, device = group_of(mesh)
    if dist.get_world_size(group) == 1:
        require_mesh(mesh)
        require_layout(layout)
        return of_one_process(query, key, mask, value=value, **how, **options, **chosen)

    with agreement(_WHERE, (group, group), device) as exchange:
        require_mesh(mesh)
        require_layout(layout)
        facts, local = _read(query, key, value, {"mask": as_mask(mask), **how}, make_options(**options), **chosen)
        gathered = exchange({"layout": fingerprint(layout), **facts})
        # The second agreement is about errors that show only in the length of the whole sequence.
        shared, counted = _shared_call(group, layout, query_mask, gathered, local)
    with torch.no_grad(), autocast_off(local.operands[0]):
        # Statistics of gathered keys and of each interval of this process's queries.
        call = shared_call_of(local.operands, shared, chunks_of_queries(*local.operands, shared))
        return compute_statistics(call, local.names, local.options, counted, local.queries, per)


class _Arguments(NamedTuple):
    """The checked arguments of one process. Its values have no features if no statistic reads them."""

    operands: Operands
    how: dict[str, Any]
    names: tuple[str, ...]
    options: Options
    queries: Queries | None
    environment: Environment


def _read(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    how: dict[str, Any],
    options: Options,
    statistics: Sequence[str],
    query_mask: Tensor | None,
    queries: Queries | None,
    per: Per,
) -> tuple[dict[str, int], _Arguments]:
    """The facts that the processes agree on, with the lengths of their shards, which may differ; and the arguments."""
    names = require_names(statistics, value is not None)
    require_per(per, names)
    environment = read_environment()._replace(gradients=False, autocast=False, observed=False)
    if environment.transformed:
        raise KernelError(f"{_WHERE}: torch.func and forward-mode derivatives do not follow exchanges.")
    query, key, *values = cast_for_autocast(query, key, *(() if value is None else (value,)))
    # Mask and positions belong to all queries and keys. The shared call checks them.
    local = {name: how[name] for name in ("scale", "softcap", "sinks")}
    with torch.no_grad(), autocast_off(query):
        call = valid_call(Call(query, key, values[0] if values else key, **local), environment)
    if call.row_sinks is not None:
        fix = "Pass one logit per head, or compute them on one process."
        raise ShapeError("sinks", expected="(H,) for a split sequence", got="sinks of single queries", fix=fix)
    as_positions("query_positions", how["query_positions"])
    as_positions("key_positions", how["key_positions"], per_head=True)
    if query_mask is not None:
        query_marks(query_mask)
    queries = checked_queries("queries", queries)
    operands = call.query, call.key, call.value if need_values(names) else call.key[..., :0]
    (batch, heads, length, dim), numbers = call.query.shape, call.layout
    alike = {**how, "mask": None, "scale": numbers.scale, "softcap": numbers.softcap, "query_mask": query_mask}
    facts = {
        "batch size": batch,
        "query heads": heads,
        "key/value heads": call.key.shape[1],
        "head_dim": dim,
        "head_dim of values": operands[2].shape[3],
        "dtype": FLOATS.index(query.dtype),
        **{name: fingerprint("a tensor" if isinstance(x, Tensor) else x) for name, x in alike.items()},
        "sinks": numbers.sinks,
        "mask": mask_fact(how["mask"]),
        "statistics": fingerprint(names, per),
        "options": fingerprint(options),
        "queries": fingerprint(queries.tolist() if isinstance(queries, Tensor) else queries),
        "query": length,
        "key": call.key.shape[2],
    }
    return facts, _Arguments(operands, how, names, options, queries, environment)


def _shared_call(
    group: dist.ProcessGroup, layout: Layout, query_mask: Tensor | None, gathered: Gathered, local: _Arguments
) -> tuple[SharedCall, Tensor | None]:
    """The shared call, and the counted queries. Raise unless all processes make one call."""
    require_equal(_WHERE, gathered, [name for name in gathered[0] if name not in ("query", "key")], _SAME)
    queries, keys = (shards_of(_WHERE, gathered, name, layout) for name in ("query", "key"))
    with torch.no_grad(), autocast_off(local.operands[0]):
        call = valid_call(Call(*of_all_sizes(local.operands, queries, keys), **local.how), local.environment)
    row_numbers(local.queries, queries.length)
    rank, counted = dist.get_rank(group), counted_queries(query_mask, call)
    return SharedCall(group, rank, queries, keys, call.grid, call.options, local.environment, _WHERE), counted
