"""Batches as packed sequences: padding is removed before the projections and restored after them.

A key that is masked for every query of its item, and a fully masked query, change no output, so removing them is exact.
They are removed if this saves more arithmetic than it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_, mul
from typing import Any, NamedTuple, cast

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
Costs = tuple[int, int, int]


@dataclass(frozen=True)
class Unpadded:
    """The tokens of a padded batch as packed sequences.

    Args:
        queries, keys: the tokens.
        bound: the mask of the batch.
        rest: the parts of the mask besides padding, which are rules about positions.
        sequences: the boundaries of the items among the tokens.
    """

    queries: RealTokens
    keys: RealTokens
    bound: BoundMask
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
        options: dict[str, Any] = {**call.options, "mask": self.bound.mask, "sequences": None, "seed": None}
        operands = queries(call.query), keys(call.key), keys(call.value)
        padded = Call(*operands, **options)
        padded.bound_ = self.bound
        notify(build_call(padded), queries(output))

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
    costs: Costs,
    most: int,
    environment: Environment,
    *,
    parts: tuple[object, ...],
    side_by_side: bool,
    in_one_kernel: bool,
) -> Unpadded | None:
    """Find the padding of a batch in its mask, if leaving it out is faster.

    Args:
        bound: the mask of the call.
        costs, most: see `costs_of`.
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
    if 0 in (batch, length, keys_length):
        return None
    if environment.module_hooks and any_foreign_global_hook():
        return None
    # Before its values are read, so that a mask of other sizes is refused as it is everywhere.
    bound.validate()
    unpadded = _find(bound, costs, batch * most, side_by_side)
    # Asked last, because most calls have no padding.
    return unpadded if unpadded is not None and all(map(takes_packed, parts)) else None


def costs_of(inputs: tuple[Tensor, Tensor, Tensor], heads: tuple[int, int, int]) -> tuple[Costs, int]:
    """The multiplications of a query, of a key and of a pair, and how many an item may have for `unpad` to pay.

    Args:
        inputs: query, key and value of the module, (B, length, features) each. Its output has the query's features.
        heads: H, Hkv and D of the module.

    Returns:
        The second number is negative where every item is so small that padding is not removed.
    """
    query, key, value = inputs
    num_heads, num_kv_heads, head_dim = heads
    (length, features), keys_length = query.shape[-2:], key.shape[-2]
    of_key = num_kv_heads * head_dim * (key.shape[-1] + (features if value is query else value.shape[-1]))
    costs: Costs = 2 * num_heads * head_dim * features, of_key, 2 * num_heads * head_dim
    cost_of_item = sum(map(mul, costs, (length, keys_length, length * keys_length)))
    return costs, cost_of_item - (_WORTH_UNPADDING if query.is_cpu else length * features * _WORTH_OF_A_MOVE)


class _Padding(NamedTuple):
    """The padding of a batch by its mask.

    Args:
        of_queries, of_keys: of these, the first tokens of each item are real.
        queries, keys: bool (1 or B, length), the real ones by the other parts of the mask; ``None`` for all.
        rules: the parts that hide no padding. They mean the same for a run of tokens as for the whole item.
    """

    of_queries: list[Counts]
    of_keys: list[Counts]
    queries: Tensor | None
    keys: Tensor | None
    rules: list[Mask]


def _find(bound: BoundMask, costs: Costs, most: int, side_by_side: bool) -> Unpadded | None:
    """The real tokens of a batch, if they cost at most that. On a GPU only by lengths that lie on the CPU."""
    grid, padding = bound.grid, bound.form("padding", lambda: _padding_of(bound))
    if padding is None:
        return None
    rules, by_lengths = padding.rules, padding.queries is None and padding.keys is None
    counts = [
        _known_counts(parts, grid.batch_size, length)
        for parts, length in ((padding.of_queries, grid.query_length), (padding.of_keys, grid.key_length))
    ]
    same = by_lengths and grid.query_length == grid.key_length and counts[0] == counts[1]
    if by_lengths and _cost(costs, *counts) > most:
        return None
    # A GPU's kernel aligns rules at the last tokens of an item, which are beside each other if there are as many of
    # both. It takes no empty tensors.
    fits_gpu = same or not (rules or side_by_side)
    if grid.device.type != "cpu" and not (fits_gpu and all(map(any, counts))):
        return None
    queries, keys, sequences = bound.form("tokens", lambda: _tokens(padding, counts, same, grid))
    if not by_lengths and _cost(costs, queries.counts, keys.counts) > most:
        return None
    if rules and not (keys.contiguous and queries.contiguous and _begin_alike(queries, keys)):
        return None
    if side_by_side and queries is not keys:
        return None
    return Unpadded(queries, keys, bound, all_of([*rules]), sequences)


def _padding_of(bound: BoundMask) -> _Padding | None:
    """The padding; ``None`` if there is none, or if a part of the mask is neither padding nor a rule."""
    padding, on_cpu = _Padding([], [], None, None, []), bound.grid.device.type == "cpu"
    queries, keys = None, None
    for part in bound.parts:
        mask = cast(Mask, part.mask)
        if isinstance(mask, Counts) and mask.known(bound.grid.batch_size) is not None:
            (padding.of_queries if isinstance(mask, QueryLengths) else padding.of_keys).append(mask)
        elif mask.is_relative:
            padding.rules.append(mask)
        elif not on_cpu or part.real_tokens is None:
            return None
        else:
            queries, keys = joined(queries, part.real_tokens[0], and_), joined(keys, part.real_tokens[1], and_)
    if keys is not None and Causal in map(type, padding.rules):
        # Queries before the first key are fully masked; without them left-padded items begin with a key each.
        rows = torch.arange(bound.grid.query_length, device=keys.device)
        queries = joined(queries, rows >= keys.int().argmax(1, keepdim=True), and_)
    is_padding = padding.of_queries or padding.of_keys or queries is not None or keys is not None
    return padding._replace(queries=queries, keys=keys) if is_padding else None


def _cost(costs: Costs, queries: list[int], keys: list[int]) -> int:
    """The multiplications of so many queries and keys of each item."""
    return sum(map(mul, costs, (sum(queries), sum(keys), sum(map(mul, queries, keys)))))


def _tokens(
    padding: _Padding, counts: list[list[int]], same: bool, grid: Grid
) -> tuple[RealTokens, RealTokens, PackedSequences]:
    """The real queries and keys, one object where they are the same, and the sequences between them."""
    keys = _real(padding.of_keys, padding.keys, counts[1], grid.key_length, grid)
    queries = keys if same else _real(padding.of_queries, padding.queries, counts[0], grid.query_length, grid)
    queries = _unless_equal(queries, keys)
    return queries, keys, sequences_between(queries, keys, grid.device)


def _known_counts(parts: list[Counts], batch: int, length: int) -> list[int]:
    """How many first tokens of each item are real."""
    counts = [length] * batch
    for part in parts:
        counts = [*map(min, counts, cast("list[int]", part.known(batch)))]
    return counts


def _real(parts: list[Counts], marks: Tensor | None, counts: list[int], length: int, grid: Grid) -> RealTokens:
    """The first tokens of each item, as many as `counts` says, and of these the marked ones."""
    if not parts:
        return find_tokens(marks, grid.batch_size, length)
    lengths = reduce(torch.minimum, [part.on(grid) for part in parts])
    first = torch.arange(length, device=grid.device) < lengths[:, None]
    if marks is None:
        return find_tokens(first, grid.batch_size, length, counts)
    return find_tokens(first & marks, grid.batch_size, length)


def _begin_alike(queries: RealTokens, keys: RealTokens) -> bool:
    """Whether positions start alike among an item's queries and keys."""
    return all(
        first == start or not (count and keyed)
        for first, start, count, keyed in zip(queries.starts, keys.starts, queries.counts, keys.counts, strict=True)
    )


def _unless_equal(queries: RealTokens, keys: RealTokens) -> RealTokens:
    """The keys' tokens where the queries' are the same, so that both are taken once."""
    if queries is keys or queries.indices is None or keys.indices is None or queries.shape != keys.shape:
        return queries
    if not keys.indices.is_cpu:  # they would be waited for
        return queries
    return keys if torch.equal(queries.indices, keys.indices) else queries
