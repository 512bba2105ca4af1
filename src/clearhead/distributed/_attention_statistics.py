"""`attention_statistics` of queries and keys of which each process holds a part of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

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
from .._statistics.definitions import Options
from .._statistics.result import AttentionStatistics
from .._weights import Queries, checked_queries, row_numbers
from ..errors import KernelError
from ..masks._base import Mask
from ..masks._check import as_positions
from ..masks._tensors import as_mask
from ._agreement import Gathered, agree_in_turn, fingerprint, group_of, require_equal, require_mesh
from ._layout import Layout, require_layout
from ._methods import Whole, like_whole, mask_fact, runs_of_queries
from ._sequence import parts_of
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
    """`clearhead.attention_statistics` of one call whose queries and keys are parts of sequences over processes.

    Every process gives its part of query, key and value, and all else as for one process, of the whole. The processes
    agree on the call by two small records and gather the keys (the values only for ``output`` and ``output_norm``);
    statistics exchange besides what they do in a record under *gather*. A mesh of one process exchanges nothing.

    Args:
        query: (B, H, l, D), or (H, l, D) without a batch: this process's part of the L queries, as
            ``shard_sequence(query, mesh, dim=-2)`` cuts it.
        key: (B, Hkv, s, D), its part of the S keys.
        mesh: one-dimensional, as ``mesh["cp"]`` of a larger one; W processes.
        mask, sinks, query_positions, key_positions: of all queries and keys; as for `clearhead.attention_statistics`.
        layout: of both sequences; see `shard_sequence`. Default ``"contiguous"``.
        value: (B, Hkv, s, Dv), its part of the values.
        query_mask: bool or 0/1 (B, L), of all queries. Default: all count.
        queries: which of all queries ``rows`` means; default all.
        scale, softcap, statistics, top_k, map_size, map_pooling, sink_keys, offsets, per: as for
            `clearhead.attention_statistics`.

    Returns:
        An `AttentionStatistics`. What has a number for each query (``head_average`` too) is of this process's queries,
        ``rows`` of the chosen ones among them, ``received`` of its keys, and all else of the whole. Keys in ``top_k``
        are numbered in the whole sequence.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError, MaskTypeError: as `clearhead.attention_statistics`; for a
            mesh of several dimensions or an unknown layout.
        KernelError: inside `torch.func` and forward-mode derivatives.
        DistributedError: if another process raises one of these or makes another call, or the parts do not belong
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
    """What one process asks for.

    Args:
        part: query, key and value of this process, with what is checked without the others; values have no features
            where none are wanted.
        mask: of the whole.
        given: arguments by name, those of the whole among them.
        queries: those that are chosen.
        names, options: of statistics.
        layout: of both sequences.
        environment: of the call.
    """

    part: AttentionCall
    mask: Mask | None
    given: dict[str, Any]
    queries: Queries | None
    names: tuple[str, ...]
    options: Options
    layout: Layout
    environment: Environment

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.part.query, self.part.key, self.part.value


def _read(query: Tensor, key: Tensor, mask: Mask | Tensor | None, layout: Layout, given: dict[str, Any]) -> _Call:
    """The arguments; raise for those that fit no call."""
    require_layout(layout)
    names = require_names(given["statistics"], given["value"] is not None)
    options = make_options(*(given[name] for name in ("top_k", "map_size", "map_pooling", "sink_keys", "offsets")))
    require_per(given["per"], names)
    environment = read_environment()._replace(gradients=False, autocast=False, observed=False)
    if environment.transformed:
        raise KernelError(f"{_WHERE}: torch.func and forward-mode derivatives do not follow exchanges.")
    query, key, *values = cast_for_autocast(query, key, *(() if given["value"] is None else (given["value"],)))
    request = Request(None, given["scale"], given["softcap"], given["sinks"])
    with torch.no_grad(), autocast_off(query):
        part = valid_call(query, key, values[0] if values else None, request, environment)
    if {"output", "output_norm"}.isdisjoint(names):
        part = replace(part, value=part.key[..., :0])
    for name in ("query_positions", "key_positions"):
        as_positions(name, given[name], per_head=name == "key_positions")
    if given["query_mask"] is not None:
        query_marks(given["query_mask"])
    own = None if mask is None else as_mask(mask)
    return _Call(part, own, given, checked_queries("queries", given["queries"]), names, options, layout, environment)


def _facts(call: _Call) -> dict[str, int]:
    """What the processes have to agree on; and the lengths of their parts, which may differ."""
    (query, key, value), spec = call.operands, call.part.spec
    # Whether those fit that are tensors is seen in the whole.
    others = {name: call.given[name] for name in ("query_positions", "key_positions", "query_mask")}
    rows = call.queries.tolist() if isinstance(call.queries, Tensor) else call.queries
    return {
        "layout": fingerprint(call.layout),
        "batch size": query.shape[0],
        "query heads": query.shape[1],
        "key/value heads": key.shape[1],
        "head_dim": query.shape[3],
        "head_dim of values": value.shape[3],
        "dtype": FLOATS.index(query.dtype),
        "mask": mask_fact(call.mask),
        **{name: fingerprint("a tensor" if isinstance(x, Tensor) else x) for name, x in others.items()},
        "scale": fingerprint(spec.scale),
        "softcap": fingerprint(spec.softcap),
        "sinks": spec.sinks,
        "statistics": fingerprint(call.names, call.given["per"]),
        "options": fingerprint(call.options),
        "queries": fingerprint(rows),
        "query": query.shape[2],
        "key": key.shape[2],
    }


def _whole(group: dist.ProcessGroup, gathered: Gathered, call: _Call) -> tuple[_Call, Whole, Tensor | None]:
    """The call, the whole of which it is a part, and counted queries; raise unless all processes make one call."""
    require_equal(_WHERE, gathered, [name for name in gathered[0] if name not in ("query", "key")], _SAME)
    queries, keys = (parts_of(_WHERE, gathered, name, call.layout) for name in ("query", "key"))
    spec, given = call.part.spec, call.given
    with torch.no_grad(), autocast_off(call.part.query):
        positions = {name: given[name] for name in ("query_positions", "key_positions")}
        request = Request(call.mask, spec.scale, spec.softcap, given["sinks"], **positions)
        whole = valid_call(*like_whole(call.operands, queries, keys), request, call.environment)
    row_numbers(call.queries, queries.length)
    counted = counted_queries(given["query_mask"], whole)
    rank, environment = dist.get_rank(group), call.environment
    return call, Whole(group, rank, queries, keys, whole.grid, whole.request, environment, _WHERE), counted


def _computed(call: _Call, whole: Whole, counted: Tensor | None) -> AttentionStatistics:
    """Keys are gathered, and each run of this process's queries is folded by itself."""
    with torch.no_grad(), autocast_off(call.part.query):
        shared = shared_call(call.operands, whole, [*runs_of_queries(*call.operands, whole)])
        return compute_statistics(shared, call.names, call.options, counted, call.queries, call.given["per"])
