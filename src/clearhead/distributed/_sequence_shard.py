"""How an attention module is called that holds one shard of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.caching import KeyValues, Positions
from .._call.call import Results, valid_call, weights_wanted
from .._call.dropout import draw_seed
from .._call.observers import computing, notify
from .._checks import FLOATS, shown, size
from .._environment import Environment, autocast_off, listening, outside_graphs, read_environment
from .._layer.layer import Layer
from .._layer.positions import of_whole, positions_of_queries, require_one_length, split_axes, with_hidden
from .._multihead import MultiHeadAttention, layer_of
from .._multihead_checks import complete, require_cache, require_features, require_inputs
from ..caches._kv import CrossKVCache, KVCache
from ..errors import ArgumentError, KernelError, RecordError, ShapeError, shape_text
from ..kernels._choice import choose
from ..masks._base import Mask
from ..masks._grid import Grid, Offset
from ..masks._tensors import as_mask
from ._agreement import Gathered, OfThisProcess, agreement, fingerprint, not_announced, require_device, require_equal
from ._collectives import WHERE, from_every_rank
from ._decode import ShardedKVCache, SplitCache, decode, sizes_of
from ._layout import Layout, Shards
from ._methods import Chunk, Method, Operands, SharedCall, by_gathering, by_heads, heads_divide, mask_fact, of_all_sizes
from ._ring import by_ring
from ._sequence import require_shards, shards_of
from ._statistics import shared_call_of

_SAME = "All processes of the mesh make the same call, each with its part of the sequence."
_NUMBER = "number of the module"
_IN_ORDER = "Each attention is numbered when it is split: split and call modules in one order in every process."

#: Facts in which the processes may differ: the lengths of their shards, and the seeds that they draw.
_MAY_DIFFER = ("query", "key", "seed")


@dataclass(frozen=True)
class LocalSequence(OfThisProcess):
    """The `SequenceShard` of one process.

    Args:
        group: the group of the processes.
        agreements: groups that are used for agreements only: of the same processes, and of the processes that share the
            heads of this shard, if there are any.
        device: the device of their collectives.
        rank, world: this process, and the number of processes.
        method, layout: see `context_parallel`.
        number: the number of the module among all modules that were split over the group; 0 for a stack.
    """

    where: ClassVar[str] = WHERE

    group: dist.ProcessGroup
    agreements: tuple[dist.ProcessGroup, ...]
    device: str
    rank: int
    world: int
    method: Method
    layout: Layout
    number: int = 0

    @outside_graphs
    @not_announced()  # all processes raise it, or the others wait in an exchange
    def call(self, module: MultiHeadAttention, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        environment = read_environment()
        with agreement(WHERE, self.agreements, self.device) as exchange:
            checked = self._read(module, environment, *arguments)
            gathered = exchange({_NUMBER: self.number, **facts_of(module, checked, environment)})
            shards = self._shards(gathered, checked.cache)
        layer = layer_of(module, environment)
        if checked.cache is not None:
            results = decode(layer, checked[:3], checked.mask, checked.cache, shards, self.group, environment)
            return layer.projected_out(results, checked.query, environment, batched=checked.batched)
        if layer.options.get("dropout_p"):
            heads = layer.options.get("offset") or Offset(module.num_heads)
            seed_tensor = torch.tensor(gathered[0]["seed"], device="cpu")
            if not checked.query.is_cpu:  # exchanged on the device, so that no process waits for it
                seed_tensor = from_every_rank(draw_seed(checked.query.device), self.group)[0]
            layer = replace(layer, options={**layer.options, "seed": seed_tensor, "offset": heads})
        queries, keys = shards
        return self._compute(layer, checked, queries, keys, environment)

    def _read(self, module: MultiHeadAttention, environment: Environment, *arguments: Any) -> Arguments:
        """The checked arguments of a call of a module, which are those of its `forward`."""
        query, key, value, mask, positions, cache, need_weights, average_attn_weights = arguments
        shards = {"query": query, "key": key, "value": value}
        if cache is not None:  # every process has all new tokens, and its shard of a memory
            shards = {"key": key, "value": value} if isinstance(cache, CrossKVCache) else {}
        require_shards(self.group, self.layout, **shards)
        require_device(WHERE, "query", query, self.device)
        weights = weights_wanted(need_weights, average_attn_weights)
        cache = _read_cache(module, environment, cache, positions, weights)
        _require_supported(module, environment)
        for name, x in (("query", query), ("key", key), ("value", value)):
            if isinstance(x, Tensor) and x.is_nested:
                fix = "Pad them and pass masks.lengths(...)."
                raise ArgumentError(name, expected="a padded tensor", got="a jagged one", fix=fix)
        if cache is None or cache.get() is None:
            if isinstance(cache, CrossKVCache) and key is None:
                fix = "The first call needs it; later ones with the same cache do not."
                raise ArgumentError("key", expected="this process's part of the memory", got="None", fix=fix)
            key, value = complete(query, key, value)
            require_inputs(module, query, key, value, environment)
        else:  # a memory whose keys are projected already
            require_features("query", query, module.q_proj)
            key = value = query
        mask = as_mask(mask)
        if module.head_shard is not None:
            mask = module.head_shard.mask(mask)
        of_tokens, _ = split_axes(positions, module.position)
        if of_tokens is not None:
            positions_of_queries(of_tokens, None, query.shape[-2])
        batched = query.dim() == 3
        if not batched:  # one tensor stays one
            batches = {id(x): x[None] for x in (query, key, value)}
            query, key, value = (batches[id(x)] for x in (query, key, value))
        return Arguments(query, key, value, mask, positions, cache, weights, batched)

    def _shards(self, gathered: Gathered, cache: SplitCache | None) -> list[Shards]:
        """The shards of queries and keys as far as these are split. Raise unless all processes make one call."""
        require_equal(WHERE, gathered, (_NUMBER,), _IN_ORDER)
        require_equal(WHERE, gathered, [name for name in gathered[0] if name not in _MAY_DIFFER], _SAME)
        # With a cache of its own every process has all tokens, and with a memory all queries.
        equal = () if cache is None else ("query",) if isinstance(cache, CrossKVCache) else ("query", "key")
        require_equal(WHERE, gathered, equal, "With a cache every process is given all new tokens.")
        return [shards_of(WHERE, gathered, name, self.layout) for name in ("query", "key") if name not in equal]

    def _compute(
        self, layer: Layer, arguments: Arguments, queries: Shards, keys: Shards, environment: Environment
    ) -> tuple[Tensor, Tensor | None]:
        """Project, attend, and project out."""
        query, key, value, mask, positions, _, weights, batched = arguments
        of_tokens, of_axes = split_axes(positions, layer.position)
        at = None if of_tokens is None else positions_of_queries(of_tokens, None, queries.length)
        rotated_at = at if of_axes is None else of_axes
        if isinstance(rotated_at, Tensor) and rotated_at.shape[-1] != queries.length:
            expected = f"positions of the whole sequence, ({queries.length},) or (B, {queries.length})"
            raise ShapeError("positions", expected=expected, got=shape_text(rotated_at.shape))
        # The keys have the same positions in the same cases as in `Layer`.
        keys_at = at if key is query or layer.position is not None else None
        combined = with_hidden(layer.combined(mask), KeyValues(query, query), 0 if at is None else at)
        grid = Grid(query.shape[0], layer.num_heads, queries.length, keys.length, query.device, at, keys_at)
        if combined is not None:  # before anything is exchanged, and in every process alike
            combined.validate(grid)
        if layer.position is not None:
            require_one_length(queries.length, keys.length)
            layer = replace(layer, position=of_whole(layer.position, rotated_at, queries.length))
        # A ring merges partial results by their lse. Rows of weights need all keys at once.
        is_ring = self.method == "ring" and weights is None
        options = {**layer.options, "mask": combined, "lse": is_ring, "weights": weights}
        shared = SharedCall(self.group, self.rank, queries, keys, grid, options, environment)
        operands = layer.projected(query, key, value, self._positions(rotated_at, queries, query.device), environment)
        _require_kernel(operands, shared)
        return layer.projected_out(self._attend(operands, shared), query, environment, batched=batched)

    def _attend(self, operands: Operands, shared: SharedCall) -> Results:
        """Exchange and attend, and show the call to observers."""
        if not shared.environment.observed:
            return self._exchanged(operands, shared)[0]
        shared = replace(shared, environment=shared.environment._replace(observed=False))
        with computing():
            results, chunks = self._exchanged(operands, shared)
            with torch.no_grad(), autocast_off(operands[0]):
                notify(shared_call_of(operands, shared, chunks, results.lse), results.output)
        return results

    def _exchanged(self, operands: Operands, shared: SharedCall) -> tuple[Results, list[Chunk]]:
        """The results, and the chunks that they were computed from, if keys did not travel around."""
        if shared.options["lse"]:
            return by_ring(*operands, shared), []
        q, k, _ = operands
        divides = heads_divide(q.shape[1], k.shape[1], self.world)
        uses_heads = shared.options["weights"] is None and self.method != "gather" and divides
        return (by_heads if uses_heads else by_gathering)(*operands, shared)

    def _positions(self, at: Positions | None, queries: Shards, device: torch.device) -> Positions:
        """The positions of this process's queries: an int where they count up."""
        if isinstance(at, Tensor):
            return queries.take(at, -1, self.rank)
        columns = queries.columns(self.rank, device)
        return (at or 0) + (columns.start if isinstance(columns, range) else columns)

    def shared_cache(self, make: Callable[[int], KVCache], max_length: int) -> ShardedKVCache:
        return ShardedKVCache(make(-(-size("max_length", max_length) // self.world)), max_length, self.rank, self.world)


def _require_kernel(operands: Operands, shared: SharedCall) -> None:
    """Raise if a forced kernel refuses the shared call: in every process alike, and before an exchange."""
    kernel = shared.environment.kernel
    if kernel is not None:
        # Kernels refuse shapes, dtypes and masks, not values.
        call = shared.call_at(shared.start, *of_all_sizes(operands, shared.queries, shared.keys))
        choose(valid_call(call, shared.environment), kernel)


class Arguments(NamedTuple):
    """The arguments of a call.

    Args:
        query, key, value: with a batch.
        mask: the mask of the call, for the heads of this process.
        positions: the positions of the whole sequence.
        cache: the cache of the split module.
        weights: which weights are returned.
        batched: whether the caller passed a batch.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    positions: Positions | None
    cache: SplitCache | None
    weights: str | None
    batched: bool


def _read_cache(
    module: MultiHeadAttention, environment: Environment, cache: object, positions: object, weights: str | None
) -> SplitCache | None:
    """The cache. Raise for a cache or a call that does not support decoding with split keys."""
    if cache is None:
        return None
    if not isinstance(cache, SplitCache):
        fix = "module.make_cache(batch_size, max_length) makes one after context_parallel."
        raise ArgumentError("cache", expected="a cache of the split module", got=type(cache).__name__, fix=fix)
    require_cache(cache, module.position)
    for name, argument in (("positions", positions), ("need_weights", weights and True)):
        if argument is not None:
            fix = "Decode with a module that was not split."
            raise ArgumentError(name, expected="nothing beside keys that are split", got=shown(argument), fix=fix)
    if environment.observed:
        raise RecordError(f"{WHERE}: a recorder does not see decoding with keys that are split.")
    if module.training and module.dropout:
        raise ArgumentError("cache", expected="a module in eval()", got="one that drops weights", fix="Call eval().")
    return cache


def _require_supported(module: MultiHeadAttention, environment: Environment) -> None:
    if environment.transformed:
        raise KernelError(f"{WHERE}: torch.func and forward-mode derivatives do not follow exchanges.")
    kernel = environment.kernel
    if module.training and module.dropout and kernel is not None and not kernel.seeds_dropout:
        raise KernelError(
            f"{WHERE}: use_kernel({kernel.name!r}) cannot drop the weights that one process drops. "
            "Leave the choice to Clearhead, or set module.dropout = 0.0."
        )


def facts_of(module: MultiHeadAttention, arguments: Arguments, environment: Environment) -> dict[str, int]:
    """The facts of a call that the processes agree on."""
    query, key, value, mask, positions, cache, weights, batched = arguments
    gradients = [tensor.requires_grad for tensor in (query, key, value, *module.parameters())]
    of_positions = tuple(positions.shape) if isinstance(positions, Tensor) else positions
    return {
        "batch size": query.shape[0],
        "a batch": batched,
        "dtype": FLOATS.index(query.dtype),
        "cache": fingerprint(sizes_of(cache)),
        "key is query": key is query,
        "value is key": value is key,
        "need_weights": weights is not None,
        "average_attn_weights": weights == "average",
        "training": module.training,
        # A process that needs no gradient of the keys joins no exchange of it.
        "gradients": environment.gradients and fingerprint(gradients),
        "autocast": environment.autocast,
        "kernel": fingerprint(getattr(environment.kernel, "name", None)),
        "mask": mask_fact(mask),
        "positions": fingerprint(of_positions),
        "dropout": fingerprint(module.dropout),
        "recorders": fingerprint([observer.wanted() for observer in listening()]) if environment.observed else 0,
        "query": query.shape[1],
        "key": key.shape[1] if cache is None or cache.get() is None else cache.length,
        # Every process draws a seed, so that all generators advance alike. The first process's seed is used.
        "seed": int(draw_seed(query.device)) if query.is_cpu and module.training and module.dropout else 0,
    }
