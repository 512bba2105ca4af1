"""Every statistic a second time, in float64 from the whole (B, H, L, S) tensors: what the blocks are compared with.

Nothing of Clearhead's is used here. Which keys a query sees arrives as a bool tensor that the caller made by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .exact import Exact, exact_attention

#: Every statistic but ``rows``, whose result depends on what is asked for, and ``output``, in the inputs' dtype.
EVERY = (
    "entropy",
    "received",
    "max_logit",
    "raw_max_logit",
    "confidence",
    "top_k",
    "extremes",
    "sink",
    "distance",
    "offset",
    "map",
    "head_average",
    "output_norm",
)

#: (rtol, atol) per statistic, for float32 results; what is not named here has those of ``weights``.
TOLERANCES = {
    "entropy": (0.0, 1e-5),
    "normalized_entropy": (0.0, 1e-5),
    "received": (1e-5, 1e-6),
    "received_mean": (1e-5, 1e-6),
    "max_logit": (1e-5, 1e-5),
    "raw_max_logit": (1e-5, 1e-5),
    "extremes": (1e-5, 1e-5),
    "distance": (1e-5, 1e-5),
    "output": (1e-5, 1e-5),
    "output_norm": (1e-5, 1e-5),
    "weights": (0.0, 1e-6),
}


@dataclass(frozen=True)
class Oracle:
    """One call, whole.

    Args:
        query: (B, H, L, D), any dtype.
        key: (B, Hkv, S, D).
        visible: bool (B, H, L, S).
        value: (B, Hkv, S, Dv).
        bias: added to the scores, broadcasts to (B, H, L, S).
        counted: bool (B, L), queries that column statistics count; ``None`` for all.
        query_positions, key_positions: (B, L) and (B, S); ``None`` for 0, 1, 2, …
    """

    query: Tensor
    key: Tensor
    visible: Tensor
    value: Tensor | None = None
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    counted: Tensor | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None

    @cached_property
    def exact(self) -> Exact:
        return self._exact(bias=self.bias, scale=self.scale, softcap=self.softcap, sinks=self.sinks)

    @torch.no_grad()
    def _exact(self, **options: Any) -> Exact:
        value = self.key if self.value is None else self.value
        return exact_attention(self.query, self.key, value, self.visible, **options)

    @property
    def p(self) -> Tensor:
        """The weights (B, H, L, S)."""
        return self.exact.weights

    @property
    def counts(self) -> Tensor:
        """Counted queries as bool (B, 1, L, 1)."""
        if self.counted is None:
            batch, _, length, _ = self.visible.shape
            return torch.ones(batch, 1, length, 1, dtype=torch.bool)
        return self.counted[:, None, :, None].bool()

    def entropy(self) -> Tensor:
        return -torch.xlogy(self.p, self.p).sum(-1)

    def normalized_entropy(self) -> Tensor:
        keys = self.visible.sum(-1)
        return torch.where(keys > 1, self.entropy() / keys.clamp(min=2).double().log(), 0.0)

    def received(self) -> Tensor:
        return (self.p * self.counts).sum(2)

    def received_mean(self) -> Tensor:
        viewers = (self.visible & self.counts).sum(2)
        return torch.where(viewers > 0, self.received() / viewers, 0.0)

    def max_logit(self) -> Tensor:
        return self._largest(self.exact.scores)

    def raw_max_logit(self) -> Tensor:
        return self._largest(self._exact(scale=self.scale).scores)

    def _largest(self, scores: Tensor) -> Tensor:
        scores = torch.where(self.counts, scores, -torch.inf).flatten(2)
        return torch.cat([scores, scores.new_full((*scores.shape[:2], 1), -torch.inf)], -1).amax(-1)

    def confidence(self) -> Tensor:
        return torch.cat([self.p, torch.zeros(*self.p.shape[:3], 1, dtype=torch.float64)], -1).amax(-1)

    def extremes(self) -> Tensor:
        return torch.stack([self._ends(torch.Tensor.amax, -torch.inf), self._ends(torch.Tensor.amin, torch.inf)], -1)

    def _ends(self, reduce: Callable[[Tensor, int], Tensor], hidden: float) -> Tensor:
        scores = torch.where(self.visible, self.exact.scores, hidden)
        return reduce(torch.cat([scores, scores.new_full((*scores.shape[:3], 1), hidden)], -1), -1)

    def sink(self, keys: int) -> Tensor:
        """Mass on the first keys that any query of the item sees."""
        seen = self.visible.any(2)  # (B, H, S)
        result = torch.zeros(self.p.shape[:3], dtype=torch.float64)
        for item in range(seen.shape[0]):
            for head in range(seen.shape[1]):
                first = seen[item, head].nonzero().flatten()[:keys]
                result[item, head] = self.p[item, head][:, first].sum(-1)
        return result

    def distance(self) -> Tensor:
        queries, keys = self._positions()
        return (self.p * (queries[:, None, :, None] - keys[:, None, None, :]).abs()).sum(-1)

    def offset(self, offsets: tuple[int, ...]) -> Tensor:
        queries, keys = self._positions()
        columns: list[Tensor] = []
        for offset in offsets:
            there = keys[:, None, None, :] == queries[:, None, :, None] + offset
            there = there & self.visible & self.counts
            sums, number = (self.p * there).sum((2, 3)), there.sum((2, 3))
            columns.append(torch.where(number > 0, sums / number.clamp(min=1), 0.0))
        return torch.stack(columns, -1)

    def map(self, size: int, pooling: str) -> Tensor:
        pool = Tensor.sum if pooling == "mass" else Tensor.amax
        pooled = _pool(_pool(self.p * self.counts, size, pool).mT, size, pool).mT  # (B, H, rows, columns)
        if pooling == "max":
            return pooled
        return pooled / _pool(self.counts.double().mT, size, Tensor.sum).mT.clamp(min=1)

    def head_average(self) -> Tensor:
        return self.p.mean(1)

    def output(self) -> Tensor:
        if self.value is None:
            raise AssertionError("this oracle was given no values")
        return self.exact.output

    def output_norm(self) -> Tensor:
        return torch.linalg.vector_norm(self.output(), dim=-1)

    def hidden_queries(self) -> Tensor:
        return (~self.visible.any(-1)).sum(-1)

    def _positions(self) -> tuple[Tensor, Tensor]:
        batch, _, length, count = self.visible.shape
        queries = torch.arange(length) if self.query_positions is None else self.query_positions
        keys = torch.arange(count) if self.key_positions is None else self.key_positions
        return queries.expand(batch, length), keys.expand(batch, count)


def _pool(x: Tensor, size: int, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The last axis in `size` tiles as even as possible, each reduced to one number."""
    count = x.shape[-1]
    tiles = min(size, count)
    tile = torch.arange(count) * tiles // max(1, count)
    pooled = x.new_zeros(*x.shape[:-1], tiles)
    for number in range(tiles):
        pooled[..., number] = reduce(x[..., tile == number], -1)
    return pooled


def compare(found: object, oracle: Oracle, *, exact: float | None = None) -> None:
    """Assert that an `AttentionStatistics` holds what the oracle says, for every statistic it has.

    Args:
        found: the statistics; its ``options`` say how they were asked for.
        oracle: the same call.
        exact: one absolute tolerance for everything, instead of those of float32.
    """
    options = found.options
    arguments = {"sink": (options.sink_keys,), "offset": (options.offsets,)}
    arguments["map"] = (options.map_size, options.map_pooling)
    for name in found.names:
        if name in ("sees", "rows"):
            continue
        if name == "top_k":
            _compare_top_k(found, oracle, exact)
            continue
        if name == "extreme_keys":
            _compare_extreme_keys(found, oracle, exact)
            continue
        expected = getattr(oracle, name)(*arguments.get(name, ()))
        actual = getattr(found, name)
        assert actual.shape == expected.shape, f"{name}: {tuple(actual.shape)}, not {tuple(expected.shape)}"
        rtol, atol = (0.0, exact) if exact is not None else TOLERANCES.get(name, TOLERANCES["weights"])
        torch.testing.assert_close(
            actual.double(), expected.double(), rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert found.hidden_queries.tolist() == oracle.hidden_queries().tolist()


def _compare_extreme_keys(found: object, oracle: Oracle, exact: float | None) -> None:
    """The named keys have the scores of the oracle; of scores that round alike, any may be named."""
    keys, sees = found.extreme_keys, oracle.visible.any(-1)
    assert torch.equal(keys >= 0, sees[..., None].expand_as(keys))
    if oracle.visible.shape[-1]:
        named = keys.clamp(min=0)
        assert bool(oracle.visible.gather(-1, named)[sees].all()), "only visible keys are named"
        scores = oracle.exact.scores.gather(-1, named)[sees]
        rtol, atol = TOLERANCES["extremes"] if exact is None else (0.0, exact)
        torch.testing.assert_close(scores, oracle.extremes()[sees], rtol=rtol, atol=atol)


def _compare_top_k(found: object, oracle: Oracle, exact: float | None) -> None:
    indices, weights = found.top_k
    p = oracle.p
    count = min(found.options.top_k, p.shape[-1])
    assert indices.shape == weights.shape == (*p.shape[:3], count)
    atol = TOLERANCES["weights"][1] if exact is None else exact
    torch.testing.assert_close(
        weights.double(), p.topk(count, -1).values, rtol=0, atol=atol, msg=lambda m: f"top_k {m}"
    )
    there = indices >= 0
    assert torch.equal(there.sum(-1), oracle.visible.sum(-1).clamp(max=count)), "−1 where a query sees fewer keys"
    assert not weights[~there].any()
    if count:
        there_p = p.gather(-1, indices.clamp(min=0)).masked_fill(~there, 0)
        torch.testing.assert_close(weights.double(), there_p, rtol=0, atol=atol, msg=lambda m: f"top_k indices {m}")
        assert bool(oracle.visible.gather(-1, indices.clamp(min=0))[there].all()), "only visible keys are named"
        apart = torch.where(there, indices, -1 - torch.arange(count))
        assert all(len(set(row)) == count for row in apart.flatten(0, -2).tolist()), "no key is named twice"
