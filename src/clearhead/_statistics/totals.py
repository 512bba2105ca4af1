"""Totals over queries: finished where one process holds all of them, merged where each holds some."""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor


class Totals(Protocol):
    """How totals over the queries of one process become those of all queries."""

    def rows(self, length: int, device: torch.device) -> Tensor:
        """Which of the L queries the process holds, (l,)."""
        ...

    def summed(self, total: Tensor) -> Tensor:
        """The sum over all processes, in every one of them."""
        ...

    def largest(self, total: Tensor) -> Tensor:
        """The largest over all processes, number by number, in every one of them."""
        ...

    def of_keys(self, total: Tensor) -> Tensor:
        """Of sums for each key (…, B, H, S), the sum over all processes for the keys (…, B, H, s) that are here."""
        ...


@final
class _OneProcess:
    def rows(self, length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device)

    def summed(self, total: Tensor) -> Tensor:
        return total

    def largest(self, total: Tensor) -> Tensor:
        return total

    def of_keys(self, total: Tensor) -> Tensor:
        return total


# Nothing to exchange, so every total is what it is.
#: All queries and keys are here.
ONE_PROCESS: Totals = _OneProcess()
