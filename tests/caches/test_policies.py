"""Which keys stay in an evicting cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clearhead import masks
from clearhead.caches import EvictingKVCache, EvictionPolicy, HeavyHitters, Held, RandomEviction, SinksAndRecent
from tests.support.closeness import require_near

from .decoding import DIM, EMBED, HEADS, KV_HEADS, fed, module

B, BUDGET = 2, 6


def cached(policy: EvictionPolicy, budget: int = BUDGET) -> EvictingKVCache:
    return EvictingKVCache(B, KV_HEADS, budget, DIM, policy=policy, dtype=torch.float64)


@pytest.mark.parametrize("sizes", [[1] * 15, [15], [4, 9, 1, 1], [7, 8]], ids=str)
@pytest.mark.parametrize(
    "policy",
    [HeavyHitters(), SinksAndRecent(2), RandomEviction(3), RandomEviction(2**64 - 1), RandomEviction(-(2**63))],
    ids=repr,
)
def test_the_budget_is_kept_and_so_is_the_newest(policy: EvictionPolicy, sizes: list[int]) -> None:
    cache, x = cached(policy), torch.randn(B, 15, EMBED, dtype=torch.float64)
    fed(module(), x, cache, sizes)
    held = cache.positions
    assert held.shape == (B, KV_HEADS, BUDGET)
    assert (held == 14).any(-1).all()
    for row in held.flatten(0, 1):
        assert len(set(row.tolist())) == BUDGET
    if isinstance(policy, SinksAndRecent):
        assert held.sort(-1).values.tolist() == [[[0, 1, 11, 12, 13, 14]] * KV_HEADS] * B


class Seen(EvictionPolicy):
    """Keeps nothing in particular and remembers what it was shown."""

    needs_received = True

    def __init__(self) -> None:
        self.shown: list[Held] = []

    def rank(self, held: Held) -> Tensor:
        self.shown.append(Held(held.positions.clone(), held.received.clone(), held.budget))
        return held.positions.double()


def test_a_policy_of_ones_own_sees_what_keys_received_step_by_step() -> None:
    attend, policy = module(rotary=False), Seen()
    cache = cached(policy)
    x = torch.randn(B, BUDGET + 1, EMBED, dtype=torch.float64)
    fed(attend, x, cache, [1] * (BUDGET + 1))
    with torch.no_grad():
        _, weights = attend(x, mask=masks.causal(), need_weights=True, average_attn_weights=False)
    [held] = policy.shown
    assert held.budget == BUDGET
    received = weights.sum(2).unflatten(1, (KV_HEADS, -1)).sum(2)
    torch.testing.assert_close(held.received.double(), received, rtol=1e-5, atol=1e-6)


def test_what_is_left_is_attended_to_exactly() -> None:
    """The step after an eviction is attention to the keys that stayed, each head to its own."""
    attend, cache = module(), cached(HeavyHitters())
    x = torch.randn(B, 12, EMBED, dtype=torch.float64)
    fed(attend, x[:, :11], cache, [11])
    stayed = cache.positions.repeat_interleave(HEADS // KV_HEADS, 1)  # (B, H, S)
    visible = torch.ones(12, 12, dtype=torch.bool).tril().repeat(B, HEADS, 1, 1)
    visible[:, :, 11, :11] = False
    visible[:, :, 11].scatter_(2, stayed, True)
    with torch.no_grad():
        expected = attend(x, mask=masks.keep(visible))[:, 11:]
    require_near(fed(attend, x[:, 11:], cache, [1]), expected, 1e-13)


def test_a_window_looks_at_where_keys_stood() -> None:
    attend, cache = module(), cached(SinksAndRecent(2))
    attend.mask = masks.sliding_window(2, 0)
    x = torch.randn(B, 14, EMBED, dtype=torch.float64)
    found = fed(attend, x, cache, [9, *[1] * 5])
    with torch.no_grad():
        require_near(found, attend(x, mask=masks.causal()), 1e-13)
