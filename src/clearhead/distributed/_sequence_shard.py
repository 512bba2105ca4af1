"""How an attention module is called that holds one shard of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._call.caching import KeyValues, Positions
from .._call.call import Results, valid_call
from .._call.observers import computing, notify
from .._checks import size
from .._environment import Environment, autocast_off, outside_graphs, read_environment
from .._layer.layer import Layer
from .._layer.positions import of_whole, positions_of_queries, require_one_length, with_hidden
from .._multihead import MultiHeadAttention, layer_of
from ..caches._cross import CrossKVCache
from ..caches._kv import KVCache
from ..errors import ShapeError, shape_text
from ..kernels._choice import choose
from ..masks._grid import Grid, Offset
from ._agreement import Gathered, OfThisProcess, agree_on, not_announced, require_device, require_equal
from ._arguments import WHERE, Arguments, facts_of, read_arguments
from ._decode import ShardedKVCache, decode
from ._layout import Layout, Shards
from ._methods import Chunk, Operands, SharedCall, by_gathering, by_heads, heads_divide, of_all_sizes
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
    method: str
    layout: Layout
    number: int = 0

    @outside_graphs
    @not_announced()  # all processes raise it, or the others wait in an exchange
    def call(self, module: MultiHeadAttention, *given: Any) -> tuple[Tensor, Tensor | None]:
        environment = read_environment()

        def find() -> tuple[dict[str, int], Arguments]:
            query, key, value, _, _, cache, *_ = given
            if cache is None:
                require_shards(self.group, self.layout, query=query, key=key, value=value)
            elif isinstance(cache, CrossKVCache):
                require_shards(self.group, self.layout, key=key, value=value)
            require_device(WHERE, "query", query, self.device)
            arguments = read_arguments(module, environment, *given)
            return {_NUMBER: self.number, **facts_of(module, arguments, environment)}, arguments

        arguments, shards, seed = agree_on(WHERE, self.agreements, self.device, find, self._require_one_call)
        layer = layer_of(module, arguments.query, environment)
        if arguments.cache is not None:
            query, key, value, mask, *_ = arguments
            results = decode(layer, (query, key, value), mask, arguments.cache, shards, self.group, environment)
            return layer.projected_out(results, environment, batched=arguments.batched)
        if layer.request.dropout_p:
            heads = layer.request.offset or Offset(module.num_heads)
            seed_tensor = torch.tensor(seed, device=arguments.query.device)
            layer = replace(layer, request=layer.request._replace(seed=seed_tensor, offset=heads))
        queries, keys = shards
        return self._compute(layer, arguments, queries, keys, environment)

    def _require_one_call(self, gathered: Gathered, arguments: Arguments) -> tuple[Arguments, list[Shards], int]:
        """Raise unless all processes make one call.

        Returns:
            The arguments, the shards of queries and keys as far as these are split, and the seed of the first process.
        """
        require_equal(WHERE, gathered, (_NUMBER,), _IN_ORDER)
        require_equal(WHERE, gathered, [name for name in gathered[0] if name not in _MAY_DIFFER], _SAME)
        cache = arguments.cache
        split = ["query", "key"] if cache is None else ["key"] if isinstance(cache, CrossKVCache) else []
        equal = [name for name in ("query", "key") if name not in split]
        require_equal(WHERE, gathered, equal, "With a cache every process is given all new tokens.")
        shards = [shards_of(WHERE, gathered, name, self.layout) for name in split]
        return arguments, shards, gathered[0]["seed"]

    def _compute(
        self, layer: Layer, arguments: Arguments, queries: Shards, keys: Shards, environment: Environment
    ) -> tuple[Tensor, Tensor | None]:
        """Project, attend, and project out."""
        query, key, value, mask, positions, _, weights, batched = arguments
        at = None if positions is None else positions_of_queries(positions, None, queries.length)
        if isinstance(at, Tensor) and at.shape[-1] != queries.length:
            expected = f"positions of the whole sequence, ({queries.length},) or (B, {queries.length})"
            raise ShapeError("positions", expected=expected, got=shape_text(at.shape))
        # The keys have the same positions in the same cases as in `Layer`.
        keys_at = at if key is query or layer.position is not None else None
        combined = with_hidden(layer.combined(mask), KeyValues(query, query), 0 if at is None else at)
        grid = Grid(query.shape[0], layer.num_heads, queries.length, keys.length, query.device, at, keys_at)
        if combined is not None:  # before anything is exchanged, and in every process alike
            combined.validate(grid)
        if layer.position is not None:
            require_one_length(queries.length, keys.length)
            layer = replace(layer, position=of_whole(layer.position, at, queries.length))
        # A ring merges partial results by their lse. Rows of weights need all keys at once.
        is_ring = self.method == "ring" and weights is None
        request = layer.request._replace(mask=combined, lse=is_ring, weights=weights)
        shared = SharedCall(self.group, self.rank, queries, keys, grid, request, environment)
        operands = layer.projected(query, key, value, self._positions(at, queries, query.device), environment)
        _require_kernel(operands, shared)
        return layer.projected_out(self._attend(operands, shared), environment, batched=batched)

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
        if shared.request.lse:
            return by_ring(*operands, shared), []
        q, k, _ = operands
        divides = heads_divide(q.shape[1], k.shape[1], self.world)
        uses_heads = shared.request.weights is None and self.method != "gather" and divides
        return (by_heads if uses_heads else by_gathering)(*operands, shared)

    def _positions(self, at: Positions | None, queries: Shards, device: torch.device) -> Positions:
        """The positions of this process's queries: an int where they count up."""
        if isinstance(at, Tensor):
            return queries.take(at, -1, self.rank)
        first, intervals = at or 0, queries.intervals[self.rank]
        if len(intervals) < 2:
            return first + (intervals[0].start if intervals else 0)
        return queries.positions(self.rank, device) + first

    def shared_cache(self, make: Callable[[int], KVCache], max_length: int) -> ShardedKVCache:
        return ShardedKVCache(make(-(-size("max_length", max_length) // self.world)), max_length, self.rank, self.world)


def _require_kernel(operands: Operands, shared: SharedCall) -> None:
    """Raise if a forced kernel refuses the shared call: in every process alike, and before an exchange."""
    kernel = shared.environment.kernel
    if kernel is not None:
        # Kernels refuse shapes, dtypes and masks, not values.
        request = shared.request_at(shared.start, shared.grid.num_heads)
        choose(valid_call(*of_all_sizes(operands, shared.queries, shared.keys), request, shared.environment), kernel)
