"""Batches as packed sequences: padding is removed before the projections and restored after them.

A key that is masked for every query of its item, and a fully masked query, change no output, so removing them is exact.
They are removed if this saves more arithmetic than it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_, mul
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._call.call import Call, build_call
from .._call.observers import changes_outputs, notify
from .._call.sequences import PackedSequences
from .._environment import Environment
from .._torch_private import any_foreign_global_hook
from ..masks._base import Mask
from ..masks._bound import BoundMask
from ..masks._combined import all_of
from ..masks._grid import Grid
from ..masks._lengths import Counts, QueryLengths
from ..masks._positional import Causal
from ..masks._structure import joined
from .tokens import RealTokens, find_tokens, sequences_between
from .unmodified import apply_linear, is_unmodified, takes_packed

#: Multiplications saved per batch item that pay for taking tokens out and putting them back.
_WORTH_UNPADDING = 1 << 23
#: Multiplications that take a GPU as long as taking a feature of a token out and putting it back.
_WORTH_OF_A_MOVE = 1 << 10
#: Multiplications of a query and of a key in the projections, and of a query with a key.
_Costs = tuple[int, int, int]


@dataclass(frozen=True)
class Unpadded:
    """The tokens of a padded batch as packed sequences.

    Args:
        queries, keys: the tokens.
        mask: of the batch.
        rest: the parts of the mask besides padding, which are rules about positions.
        sequences: the boundaries of the items among the tokens.
    """

    queries: RealTokens
    keys: RealTokens
    mask: Mask
    rest: Mask | None
    sequences: PackedSequences

    def tokens(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, length, E) → (T, E) each; one tensor stays one where it can."""
        k = self.keys.unpad(key)
        v = k if value is key else self.keys.unpad(value)
        same_tokens = query is key and (self.queries is self.keys or self.queries.indices is self.keys.indices is None)
        return k if same_tokens else self.queries.unpad(query), k, v

    def show(self, call: Call, output: Tensor) -> None:
        """Show observers the call of the padded batch and its output.

        Only to those that leave outputs as they are: `unpad` takes no tokens out under others.
        """
        queries, keys = self.queries.put_back, self.keys.put_back
        options: dict[str, Any] = {**call.options, "mask": self.mask, "sequences": None, "seed": None}
        notify(build_call(Call(queries(call.query), keys(call.key), keys(call.value), **options)), queries(output))

    def project_out(self, mixed: Tensor, out_proj: nn.Module, environment: Environment, *, batch_first: bool) -> Tensor:
        """(T, H·Dv) → (B, L, E), in memory (L, B, E) unless `batch_first`; ``out_proj(0)`` for padding."""
        if self.queries.indices is not None and is_unmodified(out_proj):
            # The output for zeros is the bias, which needs no GEMM.
            real, bias = apply_linear(out_proj, mixed, environment), cast("Tensor | None", out_proj.bias)
            filling = None if bias is None else bias.to(real.dtype)
            return self.queries.pad(real, filling, batch_first=batch_first)
        padded = self.queries.pad(mixed, batch_first=batch_first)
        if batch_first:
            return apply_linear(out_proj, padded, environment)
        return apply_linear(out_proj, padded.transpose(0, 1), environment).transpose(0, 1)


def unpad(
    bound: BoundMask,
    inputs: tuple[Tensor, Tensor, Tensor],
    heads: tuple[int, int, int],
    environment: Environment,
    *,
    parts: tuple[object, ...],
    side_by_side: bool,
    in_one_kernel: bool,
) -> Unpadded | None:
    """Find the padding of a batch in its mask, if leaving it out is faster.

    Args:
        bound: the mask of the call.
        inputs: query, key and value of the module, (B, length, features) each. Its output has the query's features.
        heads: H, Hkv and D of the module.
        environment: of the call.
        parts: what the module applies to its tokens, before the output projection; ``None`` for what it does not have.
        side_by_side: whether a position part needs queries and keys to be the same tokens.
        in_one_kernel: whether a CUDA device computes packed sequences of these queries and keys in one kernel.

    Returns:
        ``None`` if there is no padding, or if removing it would not be faster. ``None`` too if values must not be read,
        if the mask has other parts than padding and rules about positions, or if an observer changes outputs. ``None``
        if hooks, adapters or unknown modules on the way would receive packed tokens instead of a batch.
        Recorders do not count, because recomputation after they have left must give the same output.
    """
    grid = bound.grid
    on_cpu = grid.device.type == "cpu"
    if environment.tracing or environment.transformed or environment.dispatching:
        return None
    if not on_cpu and not (in_one_kernel and grid.device.type == "cuda"):
        return None
    batch, length, keys_length = grid.batch_size, grid.query_length, grid.key_length
    if (side_by_side and length != keys_length) or (environment.observed and changes_outputs()):
        return None
    query, key, value = inputs
    num_heads, num_kv_heads, head_dim = heads
    features = query.shape[-1]
    of_key = num_kv_heads * head_dim * (key.shape[-1] + (features if value is query else value.shape[-1]))
    costs: _Costs = 2 * num_heads * head_dim * features, of_key, 2 * num_heads * head_dim
    cost_of_item = sum(map(mul, costs, (length, keys_length, length * keys_length)))
    worth = _WORTH_UNPADDING if on_cpu else length * features * _WORTH_OF_A_MOVE
    if 0 in (batch, length, keys_length) or cost_of_item < worth:
        return None
    if environment.module_hooks and any_foreign_global_hook():
        return None
    # Before its values are read, so that a mask of other sizes is refused as it is everywhere.
    bound.validate()
    find = _find if on_cpu else _find_on_a_gpu
    unpadded = find(bound, costs, batch * (cost_of_item - worth), side_by_side)
    # Asked last, because most calls have no padding.
    return unpadded if unpadded is not None and all(map(takes_packed, parts)) else None


def _find(bound: BoundMask, costs: _Costs, most: int, side_by_side: bool) -> Unpadded | None:
    """The real tokens of a batch on the CPU, by the values of its mask, if they cost at most that."""
    mask, grid = cast(Mask, bound.mask), bound.grid
    batch, length, keys_length = grid.batch_size, grid.query_length, grid.key_length
    real_queries, real_keys, rules = _real_tokens(bound)
    if rules is None or (real_queries is None and real_keys is None):
        return None
    if real_keys is not None and Causal in map(type, rules):
        # Queries before the first key are fully masked; without them left-padded items begin with a key each.
        after = torch.arange(length, device=real_keys.device) >= real_keys.int().argmax(1, keepdim=True)
        real_queries = after if real_queries is None else real_queries & after
    keys, queries = find_tokens(real_keys, batch, keys_length), find_tokens(real_queries, batch, length)
    real = sum(queries.counts), sum(keys.counts), sum(map(mul, queries.counts, keys.counts))
    if sum(map(mul, costs, real)) > most:
        return None
    if rules and not (keys.contiguous and queries.contiguous and _begin_alike(queries, keys)):
        return None
    queries = _unless_equal(queries, keys)
    if side_by_side and queries is not keys:
        return None
    return Unpadded(queries, keys, mask, all_of([*rules]), sequences_between(queries, keys, grid.device))


def _find_on_a_gpu(bound: BoundMask, costs: _Costs, most: int, side_by_side: bool) -> Unpadded | None:
    """The real tokens of a batch, if the lengths of its items lie on the CPU, so that nothing waits for the device."""
    mask, grid = cast(Mask, bound.mask), bound.grid
    of_queries: list[Counts] = []
    of_keys: list[Counts] = []
    rules: list[Mask] = []
    for part in mask.parts():
        if isinstance(part, Counts):
            (of_queries if isinstance(part, QueryLengths) else of_keys).append(part)
        elif part.holds_for_runs:
            rules.append(part)
        else:
            return None
    queries = _known_counts(of_queries, grid.batch_size, grid.query_length)
    keys = _known_counts(of_keys, grid.batch_size, grid.key_length)
    if queries is None or keys is None or not (any(queries) and any(keys)):
        return None
    real = sum(queries), sum(keys), sum(map(mul, queries, keys))
    if sum(map(mul, costs, real)) > most:
        return None
    same = grid.query_length == grid.key_length and queries == keys
    # The kernel aligns rules at the last tokens of an item, which are beside each other if there are as many of both.
    if (rules or side_by_side) and not same:
        return None

    def make() -> tuple[RealTokens, RealTokens, PackedSequences]:
        real_keys = _first_tokens(of_keys, keys, grid.key_length, grid)
        real_queries = real_keys if same else _first_tokens(of_queries, queries, grid.query_length, grid)
        return real_queries, real_keys, sequences_between(real_queries, real_keys, grid.device)

    real_queries, real_keys, sequences = bound.form("tokens", make)
    return Unpadded(real_queries, real_keys, mask, all_of([*rules]), sequences)


def _known_counts(parts: list[Counts], batch: int, length: int) -> list[int] | None:
    """How many first tokens of each item are real; ``None`` if only the device has the numbers."""
    counts = [length] * batch
    for part in parts:
        known = part.known(batch)
        if known is None:
            return None
        counts = [*map(min, counts, known)]
    return counts


def _first_tokens(parts: list[Counts], counts: list[int], length: int, grid: Grid) -> RealTokens:
    """The tokens that these parts show, with the device's copy of their numbers."""
    if not parts:
        return find_tokens(None, len(counts), length)
    lengths = reduce(torch.minimum, [part.on(grid) for part in parts])
    real = torch.arange(length, device=grid.device) < lengths[:, None]
    return find_tokens(real, len(counts), length, counts)


def _begin_alike(queries: RealTokens, keys: RealTokens) -> bool:
    """Whether positions start alike among an item's queries and keys."""
    return all(
        first == start or not (count and keyed)
        for first, start, count, keyed in zip(queries.starts, keys.starts, queries.counts, keys.counts, strict=True)
    )


def _real_tokens(bound: BoundMask) -> tuple[Tensor | None, Tensor | None, list[Mask] | None]:
    """Queries and keys that are not padding by the bool masks, (1 or B, length) each; and the other parts.

    ``None`` instead of the other parts, unless all of them mean the same for a run of tokens as for the whole item.
    """
    real_queries: Tensor | None = None
    real_keys: Tensor | None = None
    rules: list[Mask] = []
    for part in bound.parts:
        real, rule = part.structure.real_tokens(part.grid), cast(Mask, part.mask)
        if real is None:
            if not rule.holds_for_runs:
                return None, None, None
            rules.append(rule)
        else:
            real_queries = joined(real_queries, real[0], and_)
            real_keys = joined(real_keys, real[1], and_)
    return real_queries, real_keys, rules


def _unless_equal(queries: RealTokens, keys: RealTokens) -> RealTokens:
    """The keys' tokens where the queries' are the same, so that both are taken once."""
    if queries.indices is None or keys.indices is None or queries.shape != keys.shape:
        return queries
    return keys if torch.equal(queries.indices, keys.indices) else queries
