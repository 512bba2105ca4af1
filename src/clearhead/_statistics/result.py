"""What comes back: the statistics of one call, as attributes of their names."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import shown
from ..errors import ArgumentError, UnknownNameError
from .arguments import Per, whole_numbers
from .definitions import LARGEST, PER_QUERY, STATISTICS, shape_of
from .statistic import Options
from .totals import Totals
from .vectors import TopK


class Sizes(NamedTuple):
    """H, Hkv and S of a call."""

    num_heads: int
    num_kv_heads: int
    key_length: int


class AttentionStatistics:
    """The statistics of one attention call, as attributes of their names.

    Besides those asked for there are always ``hidden_queries`` (B, H), how many queries see no key; ``counted``
    (B, L), the queries that column statistics count; and the sizes ``batch_size, num_heads, num_kv_heads,
    query_length, key_length``.

    Of a call whose sequence is split over processes, what has a number for each query, and ``hidden_queries``, is of
    the L queries that this process holds; ``received`` is of the keys that it holds; all else is of the whole call.

    Example:
        >>> import torch, clearhead
        >>> query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
        >>> found = clearhead.attention_statistics(query, key, statistics=("entropy", "top_k"), top_k=3)
        >>> found.entropy.shape, found.top_k.indices.shape
        (torch.Size([2, 4, 5]), torch.Size([2, 4, 5, 3]))
    """

    batch_size: int
    query_length: int
    num_heads: int
    num_kv_heads: int
    key_length: int
    #: Which heads the results hold.
    heads: tuple[int, ...]
    counted: Tensor
    options: Options
    results: dict[str, Any]
    #: Of a part, sums over the counted queries of all processes, (H,) each, and ``seeing``, how many see a key.
    totals: dict[str, Tensor] | None

    def __init__(self, *_: object, **__: object) -> None:
        raise ArgumentError(
            "AttentionStatistics(...)",
            expected="statistics of an attention call",
            got="a call of the class",
            fix="Compute them with clearhead.attention_statistics(query, key, ...), or record a model.",
        )

    @classmethod
    def computed(
        cls, sizes: Sizes, counted: Tensor, results: dict[str, Any], options: Options, per: Per
    ) -> AttentionStatistics:
        """The statistics that were computed of a call."""
        found = cls.__new__(cls)
        found.batch_size, found.query_length = counted.shape
        found.num_heads, found.num_kv_heads, found.key_length = sizes
        found.heads = tuple(range(sizes.num_kv_heads if per == "kv_head" else sizes.num_heads))
        found.counted, found.options, found.results, found.totals = counted, options, results, None
        return found

    @property
    def is_part(self) -> bool:
        """Whether other processes hold other queries of the call."""
        return self.totals is not None

    @property
    def head_count(self) -> int:
        """How many heads the results hold."""
        return len(self.heads)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors there are."""
        return tuple(self.results)

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling look names up before there are results.
        if name.startswith("_") or "results" not in vars(self):
            raise AttributeError(name)
        if name in self.results:
            return self.results[name]
        *others, last = STATISTICS
        raise AttributeError(
            f"{name}: not among the statistics that were asked for ({', '.join(self.results)}). "
            f"Ask for it with statistics=({name!r}, ...); known are {', '.join(others)} and {last}."
        )

    def head_sums(self, name: str) -> tuple[Tensor, Tensor]:
        """Sum of a statistic per query over the counted queries that see a key, and their number: (H,) each.

        Of a part, over those of all processes.
        """
        if not isinstance(name, str) or name not in self.results:
            known = ", ".join(self.results)
            raise UnknownNameError("name", expected=f"one of {known}", got=shown(name))
        if self.totals is not None and name in self.totals:
            return self.totals[name], self.totals["seeing"]
        return self._sum(name), self._seeing.sum((0, 2))

    @property
    def sees_any(self) -> bool:
        """Whether any counted query sees a key; of a part, of all processes, of results that say so."""
        if self.totals is None or "seeing" in self.totals:
            return bool((self._seeing if self.totals is None else self.totals["seeing"]).any())
        # Nothing per query was asked for, but then one of these was.
        largest = next(result for name, result in self.results.items() if name in LARGEST)
        return bool((largest > float("-inf")).any())

    def head_numbers(self) -> dict[str, Tensor]:
        """One number of each batch item and head (B, H), by what summaries call it, of statistics that have such."""
        return {
            label: torch.atleast_3d(self.results[name])[..., place]
            for name, kind in STATISTICS.items()
            if name in self.results and name not in PER_QUERY
            for place, label in enumerate(kind.labels(self.options))
        }

    def with_totals(self, totals: Totals) -> AttentionStatistics:
        """Of a part: the same with totals over the queries of all processes, of statistics of each query."""
        found, names = copy(self), [name for name in self.results if name in PER_QUERY]
        found.totals = {}
        if names:
            # One exchange for all of them.
            own = torch.stack([*(self._sum(name).double() for name in names), self._seeing.sum((0, 2)).double()])
            found.totals = dict(zip((*names, "seeing"), totals.summed(own), strict=True))
        return found

    @property
    def _seeing(self) -> Tensor:
        return self.results["sees"] & self.counted[:, None]  # (B, H, L)

    def _sum(self, name: str) -> Tensor:
        return (self.results[name] * self._seeing).sum((0, 2))  # (H,)

    def with_heads(self, heads: Sequence[int]) -> AttentionStatistics:
        """The same statistics for some of the heads."""
        present = self.head_count
        heads = whole_numbers("heads", heads)
        if not heads:
            raise ArgumentError("heads", expected="at least one head", got="none")
        if not all(-present <= head < present for head in heads):
            raise ArgumentError("heads", expected=f"numbers in 0 … {present - 1}", got=str(list(heads)))
        # Numbers from the end, as Python's.
        places = torch.tensor([head % present for head in heads], device=self.counted.device)
        results = {
            name: _select_heads(tensor, places) if "H" in shape_of(name) else tensor
            for name, tensor in self.results.items()
        }
        chosen = self.like(results, self.counted, self.key_length)
        chosen.heads = tuple(places.tolist())
        if self.totals is not None:
            chosen.totals = {name: total.index_select(0, places) for name, total in self.totals.items()}
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


def _select_heads(tensor: Any, index: Tensor) -> Any:
    if isinstance(tensor, TopK):
        return TopK(tensor.indices.index_select(1, index), tensor.weights.index_select(1, index))
    return tensor.index_select(1, index)
