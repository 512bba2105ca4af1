"""Batches as packed sequences: padding is removed before the projections and restored after them.

A key that is masked for every query of its item, and a fully masked query, change no output, so removing them is exact.
They are removed if this saves more arithmetic than it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from ..masks._positional import Causal
from ..masks._structure import Structure, joined, met
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
        counts: how many first queries, and first keys, of each item are real; ``None`` if they need not be the first.
        queries, keys: bool (1 or B, length), the real ones; ``None`` for all. Of keys these are the real ones besides
            those beyond `stop`.
        stop: one past the last real key of each item, integers (1 or B, 1), or ``None``.
        rules: the parts that hide no padding. They mean the same for a run of tokens as for the whole item.
    """

    counts: tuple[list[int] | None, list[int] | None]
    queries: Tensor | None
    keys: Tensor | None
    stop: Tensor | None
    rules: list[Mask]


def _find(bound: BoundMask, costs: Costs, most: int, side_by_side: bool) -> Unpadded | None:
    """The real tokens of a batch, if they cost at most that. On a GPU only by lengths that lie on the CPU."""
    grid, padding = bound.grid, bound.once("padding", lambda: _padding_of(bound))
    if padding is None:
        return None
    rules, (of_queries, of_keys), same = padding.rules, padding.counts, False
    if of_queries is not None and of_keys is not None:
        same = grid.query_length == grid.key_length and of_queries == of_keys
        if _cost(costs, of_queries, of_keys) > most:
            return None
        # A GPU's kernel aligns rules at the last tokens of an item, which are beside each other if there are as many
        # of both. It takes no empty tensors.
        fits_gpu = (same or not (rules or side_by_side)) and any(of_queries) and any(of_keys)
        if grid.device.type != "cpu" and not fits_gpu:
            return None
    queries, keys, sequences = bound.once("tokens", lambda: _tokens(padding, same, grid))
    if (of_queries is None or of_keys is None) and _cost(costs, queries.counts, keys.counts) > most:
        return None
    if rules and not (keys.contiguous and queries.contiguous and _begin_alike(queries, keys)):
        return None
    if side_by_side and queries is not keys:
        return None
    return Unpadded(queries, keys, bound, all_of([*rules]), sequences)


def _padding_of(bound: BoundMask) -> _Padding | None:
    """The padding; ``None`` if there is none, or if a part of the mask is neither padding nor a rule."""
    grid, rules, others = bound.grid, list[Mask](), list[Structure]()
    for part in bound.parts:
        mask = cast(Mask, part.mask)
        if mask.is_relative:
            rules.append(mask)
        else:
            others.append(part.structure)
    hiding, on_cpu = others[0] if len(others) == 1 else met(others), grid.device.type == "cpu"
    rows, queries, keys = hiding.rows, hiding.queries, _real_keys(hiding)
    # Bands and tensors hide some keys from some queries.
    if not hiding.exact or hiding.band is not None or hiding.tensors or (keys is None and hiding.biases):
        return None
    if rows is not None and (rows.first is not None or rows.stop.shape[1] != 1):
        return None
    of_queries, of_keys = [grid.query_length] * grid.batch_size, [grid.key_length] * grid.batch_size
    of_queries = of_queries if queries is None else _at_most(of_queries, hiding.query_counts)
    of_keys = of_keys if rows is None else _at_most(of_keys, rows.stop if on_cpu else rows.known)
    if keys is not None:
        of_keys = None
        if Causal in map(type, rules):
            # Queries before the first key are fully masked; without them left-padded items begin with a key each.
            first = keys.int().argmax(1, keepdim=True)
            queries = joined(queries, torch.arange(grid.query_length, device=keys.device) >= first, and_)
            of_queries = None
    if queries is keys is rows is None or not (on_cpu or (of_queries is not None and of_keys is not None)):
        return None
    return _Padding((of_queries, of_keys), queries, keys, None if rows is None else rows.stop, rules)


def _real_keys(hiding: Structure) -> Tensor | None:
    """The keys that are marked and have no bias of −∞, bool (1 or B, S); ``None`` for all, and for other biases."""
    keys = hiding.keys
    for bias in hiding.biases:
        # A bias of 0 and −∞ for each key is padding, unless it requires grad. An accelerator would be waited for.
        if bias.requires_grad or not bias.is_cpu or not (bias.shape[1] == bias.shape[2] == 1 and bias.shape[3] != 1):
            return None
        is_zero = bias[:, 0, 0] == 0  # (1 or B, S)
        if not bool((is_zero | (bias[:, 0, 0] == float("-inf"))).all()):
            return None
        keys = joined(is_zero, keys, and_)
    return keys


def _at_most(lengths: list[int], counts: Tensor | None) -> list[int] | None:
    """How many first tokens of each item are real, of so many in all; ``None`` if that is not known."""
    return None if counts is None else [*map(min, lengths, counts.flatten().expand(len(lengths)).tolist())]


def _cost(costs: Costs, queries: list[int], keys: list[int]) -> int:
    """The multiplications of so many queries and keys of each item."""
    return sum(map(mul, costs, (sum(queries), sum(keys), sum(map(mul, queries, keys)))))


def _tokens(padding: _Padding, same: bool, grid: Grid) -> tuple[RealTokens, RealTokens, PackedSequences]:
    """The real queries and keys, one object where they are the same, and the sequences between them."""
    real, (of_queries, of_keys) = padding.keys, padding.counts
    if padding.stop is not None:
        real = joined(torch.arange(grid.key_length, device=grid.device) < padding.stop, real, and_)
    keys = find_tokens(real, grid.batch_size, grid.key_length, of_keys)
    queries = keys if same else find_tokens(padding.queries, grid.batch_size, grid.query_length, of_queries)
    queries = _unless_equal(queries, keys)
    return queries, keys, sequences_between(queries, keys, grid.device)


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
