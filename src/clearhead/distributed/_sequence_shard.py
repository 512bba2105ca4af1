"""How an attention module is called that holds one shard of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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
from ._agreement import Gathered, agree_in_turn, not_announced, not_pickled, require_device, require_equal
from ._arguments import WHERE, Arguments, facts_of, read_arguments
from ._cached import ShardedKVCache
from ._decode import decode
from ._layout import Layout, Shards
from ._methods import Chunk, Operands, Whole, by_gathering, by_heads, heads_divide, like_whole
from ._ring import by_ring
from ._sequence import require_shards, shards_of
from ._statistics import shared_call

_SAME = "All processes of the mesh make the same call, each with its part of the sequence."
_NUMBER = "number of the module"
_IN_ORDER = "Each attention is numbered when it is split: split and call modules in one order in every process."

#: Facts in which the processes may differ: the lengths of their shards, and the seeds that they draw.
_MAY_DIFFER = ("query", "key", "seed")


@dataclass(frozen=True)
class LocalSequence:
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

        read = self._require_one_call
        gathered, arguments, shards = agree_in_turn(WHERE, self.agreements, self.device, find, read)
        layer = layer_of(module, arguments.query, environment)
        if arguments.cache is not None:
            return decode(layer, arguments, arguments.cache, shards, self.group, environment)
        if layer.request.dropout_p:
            seed = torch.tensor(gathered[0]["seed"], device=arguments.query.device)
            heads = layer.request.offset or Offset(module.num_heads)
            layer = replace(layer, request=layer.request._replace(seed=seed, offset=heads))
        queries, keys = shards
        return self._compute(layer, arguments, queries, keys, environment)

    def _require_one_call(self, gathered: Gathered, arguments: Arguments) -> tuple[Gathered, Arguments, list[Shards]]:
        """Raise unless all processes make one call.

        Returns:
            The facts, the arguments, and the shards of queries and keys as far as these are split.
        """
        require_equal(WHERE, gathered, (_NUMBER,), _IN_ORDER)
        require_equal(WHERE, gathered, [name for name in gathered[0] if name not in _MAY_DIFFER], _SAME)
        cache = arguments.cache
        split = ["query", "key"] if cache is None else ["key"] if isinstance(cache, CrossKVCache) else []
        whole = [name for name in ("query", "key") if name not in split]
        require_equal(WHERE, gathered, whole, "With a cache every process is given all new tokens.")
        return gathered, arguments, [shards_of(WHERE, gathered, name, self.layout) for name in split]

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
        travels = self.method == "ring" and weights is None
        request = layer.request._replace(mask=combined, lse=travels, weights=weights)
        whole = Whole(self.group, self.rank, queries, keys, grid, request, environment)
        operands = layer.projected(query, key, value, self._positions(at, queries, query.device), environment)
        return layer.projected_out(self._attend(operands, whole), environment, batched=batched)

    def _attend(self, operands: Operands, whole: Whole) -> Results:
        """Exchange and attend, and show the call to observers."""
        _require_kernel(operands, whole)
        if not whole.environment.observed:
            return self._exchanged(operands, whole)[0]
        whole = replace(whole, environment=whole.environment._replace(observed=False))
        with computing():
            results, chunks = self._exchanged(operands, whole)
            with torch.no_grad(), autocast_off(operands[0]):
                notify(shared_call(operands, whole, chunks, results.lse), results.output)
        return results

    def _exchanged(self, operands: Operands, whole: Whole) -> tuple[Results, list[Chunk]]:
        """The results, and the chunks that they were computed from, if keys did not travel around."""
        if whole.request.lse:
            return by_ring(*operands, whole), []
        q, k, _ = operands
        divides = heads_divide(q.shape[1], k.shape[1], self.world)
        uses_heads = whole.request.weights is None and self.method != "gather" and divides
        return (by_heads if uses_heads else by_gathering)(*operands, whole)

    def _positions(self, at: Positions | None, queries: Shards, device: torch.device) -> Positions:
        """The positions of this process's queries: an int where they count up."""
        if isinstance(at, Tensor):
            return queries.take(at, -1, self.rank)
        first, runs = at or 0, queries.runs(self.rank)
        if len(runs) < 2:
            return first + (runs[0].start if runs else 0)
        return queries.positions(self.rank, device) + first

    def shared_cache(self, make: Callable[[int], KVCache], max_length: int) -> ShardedKVCache:
        return ShardedKVCache(make(-(-size("max_length", max_length) // self.world)), max_length, self.rank, self.world)

    def __deepcopy__(self, memo: object) -> LocalSequence:
        return self

    def __reduce__(self) -> str:
        raise not_pickled(WHERE)


def _require_kernel(operands: Operands, whole: Whole) -> None:
    """Raise if a forced kernel refuses the call of the whole: in every process alike, and before an exchange."""
    kernel = whole.environment.kernel
    if kernel is None:
        return
    # Kernels refuse shapes, dtypes and masks, not values.
    like = like_whole(operands, whole.queries, whole.keys)
    choose(valid_call(*like, whole.request_at(whole.start, whole.grid.num_heads), whole.environment), kernel)
