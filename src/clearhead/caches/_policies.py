"""Eviction policies: the choice of the keys that stay in an evicting cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from .._checks import integer, is_probability, number, size


@dataclass(frozen=True)
class Held:
    """The keys in an evicting cache, one entry per slot.

    Args:
        positions: (B, Hkv, S) absolute positions; −1 in empty slots.
        received: (B, Hkv, S) the weight of each key so far, summed over queries and the group's query heads, Σ_i p_ij;
            zeros for a policy that does not need it.
        budget: the most keys that stay.

    Example:
        >>> import torch
        >>> Held(torch.arange(4).expand(1, 1, 4), torch.zeros(1, 1, 4), budget=3).newest.tolist()
        [[[False, False, False, True]]]
    """

    positions: Tensor
    received: Tensor
    budget: int

    @property
    def newest(self) -> Tensor:
        """Bool (B, Hkv, S): the last token of every batch item."""
        return (self.positions == self.positions.amax(-1, keepdim=True)) & (self.positions >= 0)

    def among_last(self, count: int) -> Tensor:
        """Bool (B, Hkv, S): the last `count` tokens in the cache."""
        integer("count", count, least=0)
        order = self.positions.argsort(-1, descending=True)
        return order.argsort(-1) < count  # the inverse permutation is each token's rank


class EvictionPolicy(ABC):
    """Ranks the keys in a cache. A full cache evicts the keys of lowest rank, but never the newest token.

    Example:
        >>> import torch
        >>> from clearhead.caches import EvictionPolicy
        >>> class EveryOther(EvictionPolicy):
        ...     def rank(self, held):
        ...         return (held.positions % 2 == 0).float()
        >>> held = Held(torch.arange(4).expand(1, 1, 4), torch.zeros(1, 1, 4), budget=3)
        >>> EveryOther().rank(held).tolist()
        [[[1.0, 0.0, 1.0, 0.0]]]
    """

    #: Whether the policy reads `Held.received`, which needs a second pass over each query's scores.
    needs_received: bool = False

    @abstractmethod
    def rank(self, held: Held) -> Tensor:
        """One number per key, (B, Hkv, S). Keys with greater numbers stay longer."""


@final
class HeavyHitters(EvictionPolicy):
    """Keep the keys with the most weight so far, and the latest keys (H2O).

    (Zhang et al., "H2O: heavy-hitter oracle for efficient generative inference of large language models", 2023.)

    Args:
        recent: the share of the budget for the latest tokens. Default 0.5, as in the paper.

    Raises:
        ArgumentError: outside [0, 1].

    Example:
        >>> import torch
        >>> received = torch.tensor([[[0.9, 0.1, 0.5, 0.0]]])
        >>> held = Held(torch.arange(4).expand(1, 1, 4), received, budget=2)
        >>> HeavyHitters().rank(held).topk(2).indices.sort().values.tolist()
        [[[0, 3]]]
    """

    needs_received: bool = True

    def __init__(self, recent: float = 0.5) -> None:
        self.recent: float = number("recent", recent, "a share in [0, 1]", is_probability)

    def rank(self, held: Held) -> Tensor:
        return held.received.masked_fill(held.among_last(int(self.recent * held.budget)), float("inf"))

    def __repr__(self) -> str:
        return f"HeavyHitters(recent={self.recent})"


@final
class SinksAndRecent(EvictionPolicy):
    """Keep the first tokens, which are attention sinks, and the latest tokens (StreamingLLM).

    (Xiao et al., "Efficient streaming language models with attention sinks", 2023.) Positions stay absolute; the paper
    renumbers the tokens in the cache.

    Args:
        sinks: the number of first tokens that stay. Default 4, as in the paper.

    Raises:
        ArgumentError, DTypeError: unless an int ≥ 0.

    Example:
        >>> import torch
        >>> held = Held(torch.arange(5).expand(1, 1, 5), torch.zeros(1, 1, 5), budget=3)
        >>> SinksAndRecent(sinks=1).rank(held).topk(3).indices.sort().values.tolist()
        [[[0, 3, 4]]]
    """

    def __init__(self, sinks: int = 4) -> None:
        self.sinks: int = size("sinks", sinks, 0)

    def rank(self, held: Held) -> Tensor:
        first = (held.positions >= 0) & (held.positions < self.sinks)
        return held.positions.double().masked_fill(first, float("inf"))

    def __repr__(self) -> str:
        return f"SinksAndRecent(sinks={self.sinks})"


@final
class RandomEviction(EvictionPolicy):
    """Keep random keys: a baseline that other policies should beat.

    Args:
        seed: of the policy's generator. Default 0.

    Example:
        >>> import torch
        >>> held = Held(torch.arange(5).expand(1, 1, 5), torch.zeros(1, 1, 5), budget=3)
        >>> RandomEviction(3).rank(held).shape
        torch.Size([1, 1, 5])
    """

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(
            integer("seed", seed, least=-(2**63), most=2**64 - 1, expected="an int of 64 bits")
        )

    def rank(self, held: Held) -> Tensor:
        return torch.rand(held.positions.shape, generator=self._generator).to(held.positions.device)

    def __repr__(self) -> str:
        return "RandomEviction()"
