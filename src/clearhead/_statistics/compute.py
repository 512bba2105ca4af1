"""`attention_statistics`: what one attention call attends to, without its (B, H, L, S) tensor."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from .._attention import autocast_off, cast_for_autocast
from .._call.spec import AttentionCall, build_call
from .._checks import INTEGERS, LARGEST, choice, items, shown, strided, with_values
from .._environment import is_tracing
from .._weights import Queries, row_numbers
from ..errors import ArgumentError, DTypeError, ShapeError, UnknownNameError, explain_problem, shape_text
from ..kernels._blocks import exact_dtype, score_blocks
from ..kernels._native_statistics import native_weights
from ..masks._base import Mask
from .definitions import STATISTICS, Options, Statistic, TopK
from .native import native_results
from .rows import Rows

__all__ = [
    "AttentionStatistics",
    "attention_statistics",
    "compute_statistics",
    "make_options",
    "query_marks",
    "require_names",
    "whole_numbers",
]

Per = Literal["query_head", "kv_head"]
DEFAULT = ("entropy", "received", "max_logit", "top_k")
_UNAVERAGED = ("top_k", "output", "rows")


class AttentionStatistics:
    """The statistics of one attention call, as attributes of their names.

    Besides those asked for there are always ``hidden_queries`` (B, H), how many queries see no key; ``counted``
    (B, L), the queries that column statistics count; and the sizes ``batch_size, num_heads, num_kv_heads,
    query_length, key_length``.

    Example:
        >>> import torch, clearhead
        >>> query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
        >>> found = clearhead.attention_statistics(query, key, statistics=("entropy", "top_k"), top_k=3)
        >>> found.entropy.shape, found.top_k.indices.shape
        (torch.Size([2, 4, 5]), torch.Size([2, 4, 5, 3]))
    """

    def __init__(
        self, call: AttentionCall, counted: Tensor, results: dict[str, Any], options: Options, per: Per
    ) -> None:
        self.batch_size, self.num_heads, self.query_length, self.key_length = (
            call.grid.batch_size,
            call.grid.num_heads,
            call.grid.query_length,
            call.grid.key_length,
        )
        self.num_kv_heads = call.key.shape[1]
        #: Which heads the results hold.
        self.heads = tuple(range(self.num_kv_heads if per == "kv_head" else self.num_heads))
        self.counted = counted
        self.options = options
        self.results = results

    @property
    def head_count(self) -> int:
        """How many heads the results hold."""
        return len(self.heads)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors there are."""
        return tuple(self.results)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "results" not in vars(self):
            raise AttributeError(name)
        if name in self.results:
            return self.results[name]
        raise AttributeError(
            f"{name}: not among the statistics that were asked for ({', '.join(self.results)}). "
            f"Ask for it with statistics=({name!r}, ...); known are {', '.join(STATISTICS)} and rows."
        )

    def head_sums(self, name: str) -> tuple[Tensor, Tensor]:
        """Sum of a statistic per query over the counted queries that see a key, and their number: (H,) each."""
        if not isinstance(name, str) or name not in self.results:
            known = ", ".join(self.results)
            raise UnknownNameError(explain_problem("name", expected=f"one of {known}", got=shown(name)))
        values = self.results[name]
        seeing = self.results["sees"] & self.counted[:, None]  # (B, H, L)
        return (values * seeing).sum((0, 2)), seeing.sum((0, 2))

    def with_heads(self, heads: Sequence[int]) -> AttentionStatistics:
        """The same statistics for some of the heads."""
        present = self.head_count
        heads = whole_numbers("heads", heads)
        if not heads:
            raise ArgumentError(explain_problem("heads", expected="at least one head", got="none"))
        if not all(-present <= head < present for head in heads):
            raise ArgumentError(
                explain_problem("heads", expected=f"numbers in 0 … {present - 1}", got=str(list(heads)))
            )
        places = torch.tensor([head % present for head in heads], device=self.counted.device)
        results = {
            name: tensor if name == "head_average" else _select_heads(tensor, places)
            for name, tensor in self.results.items()
        }
        chosen = self.like(results, self.counted, self.key_length)
        chosen.heads = tuple(places.tolist())
        return chosen

    def like(self, results: dict[str, Any], counted: Tensor, key_length: int) -> AttentionStatistics:
        """Other results of the same kind of call."""
        other = copy(self)
        other.results = results
        other.counted = counted
        other.batch_size, other.query_length = counted.shape
        other.key_length = key_length
        return other

    def __repr__(self) -> str:
        sizes = f"B={self.batch_size}, H={self.num_heads}, L={self.query_length}, S={self.key_length}"
        return f"AttentionStatistics({', '.join(self.results)}; {sizes})"


def attention_statistics(
    query: Tensor,
    key: Tensor,
    mask: Mask | Tensor | None = None,
    *,
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
    """Fold the weights of one call, block by block, into the statistics asked for. Gradients are not recorded.

    The weights p are those of `attention` before dropout, from scores in float32 (float64 for float64 inputs). Peak
    memory is that of a block and of the results.

    Args:
        query: (B, H, L, D), or (H, L, D) without a batch.
        key: (B, Hkv, S, D).
        mask, scale, softcap, sinks, query_positions, key_positions: as for `attention`.
        value: (B, Hkv, S, Dv), for ``output`` and ``output_norm``.
        statistics: any of

            * ``entropy`` −Σ_j p ln p in nats (B, H, L), and ``normalized_entropy``, divided by ln(visible keys)
            * ``received`` Σ_i p (B, H, S), and ``received_mean``, per query that sees the key
            * ``max_logit`` the largest score (B, H), signed
            * ``confidence`` max_j p (B, H, L)
            * ``top_k`` the largest weights of each query, ``.indices`` and ``.weights`` (B, H, L, k)
            * ``sink`` the mass on the first `sink_keys` visible keys (B, H, L)
            * ``distance`` Σ_j p |i − j| (B, H, L)
            * ``offset`` the mean weight at each of `offsets` (B, H, number of offsets)
            * ``map`` the weights pooled to `map_size` × `map_size` tiles (B, H, R, R)
            * ``head_average`` the mean over heads (B, L, S)
            * ``rows`` the weights of the queries in `queries` (B, H, n, S)
            * ``output`` Σ_j p v, what `attention` gives without dropout, in the inputs' dtype (B, H, L, Dv); on the CPU
              it comes from the same pass, which costs less than two
            * ``output_norm`` ‖Σ_j p v‖ (B, H, L)
        query_mask: bool or 0/1 (B, L); queries marked 0 (padding) are left out of ``received``, ``max_logit``,
            ``offset`` and ``map``. Default: all count.
        queries: which queries ``rows`` means; default all.
        top_k, map_size, map_pooling, sink_keys, offsets: see above; `map_pooling` is ``"mass"`` or ``"max"``.
        per: ``"kv_head"`` averages over the query heads of each key/value head; name the statistics then, because the
            default ones include ``top_k``, which has no average. Default ``"query_head"``.

    Returns:
        An `AttentionStatistics`.

    Raises:
        ArgumentError: for an unknown statistic or option; ``output`` or ``output_norm`` without `value`.
        ShapeError, DTypeError: as `attention`.

    Example:
        >>> import torch, clearhead
        >>> x = torch.zeros(1, 1, 4, 8)
        >>> found = clearhead.attention_statistics(x, x, clearhead.masks.causal(), statistics=("entropy",))
        >>> found.entropy.exp().round().tolist()  # a uniform query sees e^entropy keys
        [[[1.0, 2.0, 3.0, 4.0]]]
    """
    names = require_names(statistics, value is not None)
    options = make_options(top_k, map_size, map_pooling, sink_keys, offsets)
    query, key, *values = cast_for_autocast(query, key, *(() if value is None else (value,)))
    with torch.no_grad(), autocast_off(query):
        call = build_call(
            query,
            key,
            values[0] if values else None,
            mask,
            scale=scale,
            dropout_p=0.0,
            softcap=softcap,
            sinks=sinks,
            query_positions=query_positions,
            key_positions=key_positions,
            return_lse=False,
        )
        return compute_statistics(call, names, options, counted_queries(query_mask, call), queries, per)


def compute_statistics(
    call: AttentionCall,
    names: Sequence[str],
    options: Options,
    counted: Tensor | None,
    queries: Queries | None = None,
    per: Per = "query_head",
) -> AttentionStatistics:
    """Statistics of a validated call; `counted` is (B, L) bool or ``None`` for all."""
    require_per(per, names)
    with torch.no_grad(), autocast_off(call.query):
        results = native_results(call, names, options, counted)
        left = [name for name in names if name not in results and name != "rows"]
        if left or "sees" not in results:
            results |= _results_by_blocks(call, left, options, counted)
        if "rows" in names:
            results["rows"] = exact_weights(call, row_numbers(queries, call.grid.query_length, "queries"))
    sees = results.pop("sees")
    if per == "kv_head":
        _reduce_heads(results, names, call)
        sees = sees.unflatten(1, (call.key.shape[1], call.group)).any(2)
    results["hidden_queries"] = (~sees).sum(-1)
    results["sees"] = sees
    if counted is None:
        counted = torch.ones(call.grid.batch_size, call.grid.query_length, dtype=torch.bool, device=call.query.device)
    return AttentionStatistics(call, counted, results, options, per)


def _results_by_blocks(
    call: AttentionCall, names: Sequence[str], options: Options, counted: Tensor | None
) -> dict[str, Any]:
    """Results of some statistics and ``sees`` (B, H, L), folded block by block."""
    column = None if counted is None else counted[:, None, :, None]
    gathered: list[Statistic] = [STATISTICS[name](call, options, column) for name in names]
    shape = (call.grid.batch_size, call.grid.num_heads, call.grid.query_length)
    sees = torch.zeros(shape, dtype=torch.bool, device=call.query.device)
    for block, place, query, key in score_blocks(call, dtype=exact_dtype(call)):
        part = None if column is None else column[block.batch, :, place]
        block_rows = Rows(call, block, place, query, key, part)
        sees[block.batch, block.heads, place] = (block_rows.largest > float("-inf")).squeeze(-1)
        for statistic in gathered:
            statistic.add(block_rows)
    results = {name: tensor for statistic in gathered for name, tensor in statistic.result().items()}
    return {**results, "sees": sees}


def exact_weights(call: AttentionCall, rows: Tensor | None) -> Tensor:
    """Weights of chosen rows, (B, H, n, S), without gradients, from scores in `exact_dtype`."""
    count = call.grid.query_length if rows is None else len(rows)
    shape = (call.grid.batch_size, call.grid.num_heads, count, call.grid.key_length)
    chosen = None if rows is None else rows.to(call.query.device)
    with torch.no_grad(), autocast_off(call.query):
        native = None if exact_dtype(call) != torch.float32 or is_tracing() else native_weights(call, chosen, False)
        if native is not None:
            return native
        result = call.query.new_zeros(shape, dtype=call.compute_dtype)
        for block, place, query, key in score_blocks(call, chosen, exact_dtype(call)):
            part = Rows(call, block, place, query, key, None)
            result[block.batch, block.heads, place, part.columns] = part.weights
    return result


def require_names(statistics: Sequence[str], has_value: bool) -> tuple[str, ...]:
    """Check the names of statistics.

    Raises:
        ArgumentError: for an unknown one, or one that needs values where there are none.
    """
    known = (*STATISTICS, "rows")
    expected = f"names among {', '.join(known)}"
    names = (statistics,) if isinstance(statistics, str) else tuple(items("statistics", statistics, expected))
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ArgumentError(explain_problem("statistics", expected=expected, got=shown(name)))
    for name in ("output", "output_norm"):
        if name in names and not has_value:
            raise ArgumentError(
                explain_problem("statistics", expected=f"value= for {name!r}", got="no value", fix="Pass value=.")
            )
    return tuple(dict.fromkeys(names))


def make_options(
    top_k: int, map_size: int, map_pooling: Literal["mass", "max"], sink_keys: int, offsets: Sequence[int]
) -> Options:
    """Check the options.

    Raises:
        ArgumentError: for a number that is not positive or an unknown pooling.
    """
    for name, number in (("top_k", top_k), ("map_size", map_size), ("sink_keys", sink_keys)):
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= LARGEST:
            raise ArgumentError(explain_problem(name, expected="an int ≥ 1", got=shown(number)))
    choice("map_pooling", map_pooling, ("mass", "max"))
    return Options(top_k, map_size, map_pooling, sink_keys, whole_numbers("offsets", offsets))


def whole_numbers(name: str, numbers: Sequence[int]) -> tuple[int, ...]:
    """Check a list of numbers.

    Raises:
        ArgumentError: if it is something else.
    """
    expected = "a list of whole numbers"
    try:
        whole = tuple(index(number) for number in items(name, numbers, expected))
    except (TypeError, RuntimeError):  # tensors on meta have no numbers
        raise ArgumentError(explain_problem(name, expected=expected, got=shown(numbers))) from None
    if not all(-LARGEST <= number <= LARGEST for number in whole):
        raise ArgumentError(explain_problem(name, expected=f"{expected} of at most {LARGEST}", got=shown(numbers)))
    return whole


def require_per(per: Per, names: Sequence[str]) -> None:
    """Raise unless every statistic has the average over heads that `per` asks for.

    Raises:
        ArgumentError: for another word, or ``top_k``, ``output`` and ``rows``, which have no average.
    """
    choice("per", per, ("query_head", "kv_head"))
    unaveraged = [name for name in names if name in _UNAVERAGED]
    verb = "have" if len(unaveraged) > 1 else "has"
    if per == "kv_head" and unaveraged:
        raise ArgumentError(
            explain_problem(
                "per",
                expected=f"'query_head' for {' and '.join(unaveraged)}, which {verb} no average over heads",
                got="'kv_head'",
                fix=f"Write statistics={tuple(name for name in names if name not in unaveraged)}.",
            )
        )


def counted_queries(query_mask: Tensor | None, call: AttentionCall) -> Tensor | None:
    """Check a `query_mask` against a call: bool (B, L), or ``None``.

    Raises:
        DTypeError, ShapeError: if it does not fit.
    """
    if query_mask is None:
        return None
    expected = (call.grid.batch_size, call.grid.query_length)
    query_mask = query_marks(query_mask)
    if tuple(query_mask.shape) != expected:
        raise ShapeError(
            explain_problem("query_mask", expected=f"(B, L) = {expected}", got=shape_text(query_mask.shape))
        )
    return query_mask.to(device=call.query.device, dtype=torch.bool)


def query_marks(query_mask: object) -> Tensor:
    """A bool or 0/1 tensor, of any shape.

    Raises:
        DTypeError: for anything else.
    """
    expected = "a bool or 0/1 tensor (B, L)"
    marks = with_values("query_mask", strided("query_mask", query_mask, expected))
    if marks.dtype != torch.bool and marks.dtype not in INTEGERS:
        raise DTypeError(explain_problem("query_mask", expected=expected, got=str(marks.dtype)))
    return marks


def _reduce_heads(results: dict[str, Any], names: Sequence[str], call: AttentionCall) -> None:
    for statistic in names:
        for name in STATISTICS[statistic].per_head:
            results[name] = results[name].unflatten(1, (call.key.shape[1], call.group)).mean(2)


def _select_heads(tensor: Any, index: Tensor) -> Any:
    if isinstance(tensor, TopK):
        return TopK(tensor.indices.index_select(1, index), tensor.weights.index_select(1, index))
    return tensor.index_select(1, index)
