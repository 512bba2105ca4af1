"""Totals over queries: final where one process holds all queries, merged where each process holds some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from .._call.call import Call


class Totals(Protocol):
    """Turns totals over the queries of one process into totals over all queries.

    The methods here are those of a process that holds all queries and keys.
    """

    def rows(self, length: int, device: torch.device) -> Tensor:
        """The numbers of the queries that the process holds, (l,), out of L."""
        return torch.arange(length, device=device)

    def summed(self, total: Tensor) -> Tensor:
        """The sum over all processes, on every process."""
        return total

    def maximum(self, total: Tensor) -> Tensor:
        """The elementwise maximum over all processes, on every process."""
        return total

    def of_keys(self, total: Tensor) -> Tensor:
        """Sums per key (…, B, H, S), added over all processes and cut to the keys of this one, (…, B, H, s)."""
        return total


@final
class _OneProcess(Totals):
    """The process holds all queries and keys."""


ONE_PROCESS: Totals = _OneProcess()


class Computed(NamedTuple):
    """Results of statistics by name, and which queries see a key, bool (B, H, L)."""

    tensors: dict[str, Any]
    sees: Tensor


@dataclass(slots=True, kw_only=True)
class PartialCall(Call):
    """A call that is distributed over processes, as its observers receive it.

    Query, key and value are those of this process. Everything else, `grid` included, describes the complete call.

    Args:
        totals: over the queries of all processes.
        results: computes the results of this process's queries or keys, as `results_of`.
    """

    totals: Totals
    results: Callable[..., Computed]
