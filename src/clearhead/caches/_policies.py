"""Which keys an evicting cache keeps; write your own by subclassing `EvictionPolicy`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from .._checks import integer, is_probability, number, size


@dataclass(frozen=True)
class Held:
    """The keys that an evicting cache holds, one entry per slot.

    Args:
        positions: (B, Hkv, S) absolute positions; −1 where nothing stands.
        received: (B, Hkv, S) the weight each key has received so far, summed over queries and the group's query heads,
            Σ_i p_ij; zeros for a policy that does not need it.
        budget: how many keys may stay.

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
        """Bool (B, Hkv, S): the last token of every row."""
        return (self.positions == self.positions.amax(-1, keepdim=True)) & (self.positions >= 0)

    def among_last(self, count: int) -> Tensor:
        """Bool (B, Hkv, S): the `count` last tokens that are held."""
        integer("count", count, least=0)
        order = self.positions.argsort(-1, descending=True)
        return order.argsort(-1) < count  # the inverse permutation holds each token's rank


class EvictionPolicy(ABC):
    """Ranks the keys in a cache; the lowest are evicted when it is full. The newest token stays whatever its rank.

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

    #: Whether `Held.received` is to be kept; it costs a second pass over each query's scores.
    needs_received: bool = False

    @abstractmethod
    def rank(self, held: Held) -> Tensor:
        """One number per key, (B, Hkv, S); the larger, the longer it stays."""


@final
class HeavyHitters(EvictionPolicy):
    """Keep the keys that received the most weight so far, and the latest ones (H2O).

    (Zhang et al., "H2O: heavy-hitter oracle for efficient generative inference of large language models", 2023.)

    Args:
        recent: which share of the budget the latest tokens have. Default 0.5, as in the paper.

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
        self.recent = number("recent", recent, "a share in [0, 1]", is_probability)

    def rank(self, held: Held) -> Tensor:
        return held.received.masked_fill(held.among_last(int(self.recent * held.budget)), float("inf"))

    def __repr__(self) -> str:
        return f"HeavyHitters(recent={self.recent})"


@final
class SinksAndRecent(EvictionPolicy):
    """Keep the first tokens, which serve as attention sinks, and the latest ones (StreamingLLM).

    (Xiao et al., "Efficient streaming language models with attention sinks", 2023.) Positions stay absolute; the paper
    numbers the kept tokens anew.

    Args:
        sinks: how many of the first tokens stay. Default 4, as in the paper.

    Raises:
        ArgumentError, DTypeError: unless an int ≥ 0.

    Example:
        >>> import torch
        >>> held = Held(torch.arange(5).expand(1, 1, 5), torch.zeros(1, 1, 5), budget=3)
        >>> SinksAndRecent(sinks=1).rank(held).topk(3).indices.sort().values.tolist()
        [[[0, 3, 4]]]
    """

    def __init__(self, sinks: int = 4) -> None:
        self.sinks = size("sinks", sinks, 0)

    def rank(self, held: Held) -> Tensor:
        first = (held.positions >= 0) & (held.positions < self.sinks)
        return held.positions.double().masked_fill(first, float("inf"))

    def __repr__(self) -> str:
        return f"SinksAndRecent(sinks={self.sinks})"


@final
class RandomEviction(EvictionPolicy):
    """Keep random keys: a baseline that other policies should beat.

    Args:
        seed: of its own generator. Default 0.

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
