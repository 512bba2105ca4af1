"""`AttentionStatistics`: the statistics of one call, as attributes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from .._checks import shown
from ..errors import ArgumentError, UnknownNameError
from .arguments import whole_numbers
from .definitions import BY_MAXIMUM, PER_QUERY, SHAPES, STATISTICS
from .statistic import Options
from .totals import Computed, Totals
from .vectors import TopK


class AttentionStatistics:
    """The statistics of one attention call, as attributes of their names.

    Four more are always present. ``hidden_queries`` (B, H) is the number of fully masked queries. ``counted`` (B, L)
    marks the counted queries. ``heads`` lists the heads of the results. ``batch_size, num_heads, num_kv_heads,
    query_length, key_length`` are the sizes of the call.

    If the sequence is split over processes, per-query statistics and ``hidden_queries`` cover the L queries of this
    process. ``received`` covers its keys. All others cover the full call.

    Example:
        >>> import torch, clearhead
        >>> query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
        >>> stats = clearhead.attention_statistics(query, key, statistics=("entropy", "top_k"), top_k=3)
        >>> stats.entropy.shape, stats.top_k.indices.shape
        (torch.Size([2, 4, 5]), torch.Size([2, 4, 5, 3]))
    """

    batch_size: int
    query_length: int
    num_heads: int
    num_kv_heads: int
    key_length: int
    heads: tuple[int, ...]
    #: How many query heads each head of the results is the mean of.
    averaged: int
    options: Options
    results: dict[str, Any]
    _counted: Tensor | None
    #: If processes share the call, sums over their counted queries, (H,) each, and ``seeing``, how many see a key.
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
        cls, computed: Computed, sizes: tuple[int, int, int], counted: Tensor | None, options: Options
    ) -> AttentionStatistics:
        """The statistics of a call with `sizes` H, Hkv and S. Without `counted` all queries count."""
        statistics = cls.__new__(cls)
        statistics.batch_size, head_count, statistics.query_length = computed.sees.shape
        statistics.num_heads, statistics.num_kv_heads, statistics.key_length = sizes
        statistics.heads = tuple(range(head_count))
        statistics.averaged = statistics.num_heads // head_count
        statistics.results = {**computed.tensors, "sees": computed.sees}
        statistics._counted, statistics.options, statistics.totals = counted, options, None
        return statistics

    # The two below are computed when they are asked for, because each operator costs time on a GPU.

    @property
    def counted(self) -> Tensor:
        """The counted queries, bool (B, L)."""
        if self._counted is None:
            shape = self.batch_size, self.query_length
            self._counted = torch.ones(shape, dtype=torch.bool, device=self.results["sees"].device)
        return self._counted

    @property
    def hidden_queries(self) -> Tensor:
        """The number of fully masked queries, int64 (B, H)."""
        return (~self.results["sees"]).sum(-1)

    @property
    def is_part(self) -> bool:
        """Whether other processes hold other queries of the call."""
        return self.totals is not None

    @property
    def head_count(self) -> int:
        """The number of heads in the results."""
        return len(self.heads)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all results."""
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
        """Sum of a per-query statistic over the counted queries that see a key, and their number: (H,) each.

        If processes share the call, both cover the queries of all processes.
        """
        if not isinstance(name, str) or name not in self.results:
            known = ", ".join(self.results)
            raise UnknownNameError("name", expected=f"one of {known}", got=shown(name))
        if self.totals is not None and name in self.totals:
            return self.totals[name], self.totals["seeing"]
        return self._sum(name), self._seeing.sum((0, 2))

    @property
    def sees_any(self) -> Tensor:
        """Whether any counted query sees a key, on any process; bool ()."""
        if self.totals is None or "seeing" in self.totals:
            return (self._seeing if self.totals is None else self.totals["seeing"]).any()
        # Without totals of a per-query statistic, there is a largest logit, of all processes.
        largest = next(tensor for name, tensor in self.results.items() if name in BY_MAXIMUM)
        return (largest > float("-inf")).any()

    def head_numbers(self) -> dict[str, Tensor]:
        """Numbers per batch item and head (B, H), by their labels in summaries, of the statistics that have them."""
        return {
            label: torch.atleast_3d(self.results[name])[..., place]
            for name, kind in STATISTICS.items()
            if name in self.results and name not in PER_QUERY
            for place, label in enumerate(kind.labels(self.options))
        }

    def with_totals(self, totals: Totals) -> AttentionStatistics:
        """The same statistics with totals of the per-query ones over all processes."""
        statistics, names = copy(self), [name for name in self.results if name in PER_QUERY]
        statistics.totals = {}
        if names:
            # One exchange for all of them.
            sums = torch.stack([*(self._sum(name).double() for name in names), self._seeing.sum((0, 2)).double()])
            statistics.totals = dict(zip((*names, "seeing"), totals.summed(sums), strict=True))
        return statistics

    @property
    def _seeing(self) -> Tensor:
        sees: Tensor = self.results["sees"]  # (B, H, L)
        return sees if self._counted is None else sees & self._counted[:, None]

    def _sum(self, name: str) -> Tensor:
        return (self.results[name] * self._seeing).sum((0, 2))  # (H,)

    def with_heads(self, heads: Sequence[int]) -> AttentionStatistics:
        """The same statistics for some of the heads. Negative numbers count from the end."""
        present = self.head_count
        heads = whole_numbers("heads", heads)
        if not heads:
            raise ArgumentError("heads", expected="at least one head", got="none")
        if not all(-present <= head < present for head in heads):
            raise ArgumentError("heads", expected=f"numbers in 0 … {present - 1}", got=str(list(heads)))
        chosen = copy(self)
        chosen.heads = tuple(head % present for head in heads)
        chosen.results = {
            name: _select_heads(tensor, chosen.heads) if "H" in SHAPES[name] else tensor
            for name, tensor in self.results.items()
        }
        if self.totals is not None:
            chosen.totals = {
                name: torch.stack([total[head] for head in chosen.heads]) for name, total in self.totals.items()
            }
        return chosen

    def like(self, results: dict[str, Any], counted: Tensor, key_length: int) -> AttentionStatistics:
        """Other results for the same heads, with other queries and keys."""
        statistics = copy(self)
        statistics.results, statistics._counted, statistics.key_length = results, counted, key_length
        statistics.batch_size, statistics.query_length = counted.shape
        return statistics

    def __repr__(self) -> str:
        sizes = f"B={self.batch_size}, H={self.num_heads}, L={self.query_length}, S={self.key_length}"
        return f"AttentionStatistics({', '.join(self.results)}; {sizes})"


def _select_heads(tensor: Any, heads: Sequence[int]) -> Any:
    if isinstance(tensor, TopK):
        return TopK(*(_select_heads(each, heads) for each in tensor))
    # Views, because a tensor of indices would be copied to the device.
    return torch.stack([tensor[:, head] for head in heads], 1)
