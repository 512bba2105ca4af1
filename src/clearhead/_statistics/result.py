"""What comes back: the statistics of one call, as attributes of their names."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from .._call.spec import AttentionCall
from .._checks import shown
from ..errors import ArgumentError, UnknownNameError
from .arguments import Per, whole_numbers
from .definitions import STATISTICS, Options, TopK


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
            raise UnknownNameError("name", expected=f"one of {known}", got=shown(name))
        values = self.results[name]
        seeing = self.results["sees"] & self.counted[:, None]  # (B, H, L)
        return (values * seeing).sum((0, 2)), seeing.sum((0, 2))

    def with_heads(self, heads: Sequence[int]) -> AttentionStatistics:
        """The same statistics for some of the heads."""
        present = self.head_count
        heads = whole_numbers("heads", heads)
        if not heads:
            raise ArgumentError("heads", expected="at least one head", got="none")
        if not all(-present <= head < present for head in heads):
            raise ArgumentError("heads", expected=f"numbers in 0 … {present - 1}", got=str(list(heads)))
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


def _select_heads(tensor: Any, index: Tensor) -> Any:
    if isinstance(tensor, TopK):
        return TopK(tensor.indices.index_select(1, index), tensor.weights.index_select(1, index))
    return tensor.index_select(1, index)
