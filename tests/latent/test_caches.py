"""Latent attention step by step; generated histories of every cache are in `tests/caches/test_histories.py`."""

from __future__ import annotations

import pytest
import torch

from clearhead.caches import (
    EvictingKVCache,
    EvictionPolicy,
)
from tests.caches.test_policies import Seen
from tests.support.closeness import require_near
from tests.support.compiling import compiled_steps

from .by_hand import CAUSAL, FEW, RANK, ROPE, B, L, by_hand, fed, module, tokens


def test_a_cache_holds_latents_alone_and_steps_copy_nothing() -> None:
    attend, x = module(dtype=torch.float32), tokens(dtype=torch.float32)
    cache = attend.make_cache(B, L)
    assert attend.cache_head_dim == RANK + ROPE
    places = set[int]()
    with torch.no_grad():
        for n in range(L):
            attend(x[:, [n]], mask=CAUSAL, cache=cache)
            places.add(cache.key.data_ptr())
    assert (cache.key.shape, cache.key.dtype) == ((B, 1, L, RANK + ROPE), torch.float32)
    assert cache.value.numel() == 0
    assert len(places) == 1


def test_weights_with_a_cache() -> None:
    attend, x = module(), tokens()
    _, expected = by_hand(attend, x, CAUSAL)
    for size in (1, FEW + 1):
        cache = attend.make_cache(B, L)
        with torch.no_grad():
            attend(x[:, :-size], mask=CAUSAL, cache=cache)
            _, result = attend(x[:, -size:], mask=CAUSAL, cache=cache, need_weights=True, average_attn_weights=False)
        require_near(result, expected[:, :, -size:], 1e-13)


def evicting(budget: int, policy: EvictionPolicy) -> EvictingKVCache:
    return EvictingKVCache(B, 1, budget, RANK + ROPE, value_head_dim=0, policy=policy, dtype=torch.float64)


@pytest.mark.parametrize("sizes", [[L], [1] * L, [4, FEW + 2]], ids=str)
def test_policies_hear_what_every_key_received(sizes: list[int]) -> None:
    attend, x, policy = module(), tokens(), Seen()
    fed(attend, x, evicting(L - 1, policy), sizes)
    _, weights = by_hand(attend, x, CAUSAL)
    torch.testing.assert_close(policy.shown[-1].received.double(), weights.sum((1, 2))[:, None], rtol=0, atol=1e-5)


def test_positions_may_start_anywhere() -> None:
    attend, x = module(), tokens()
    far = attend(x, mask=CAUSAL, positions=1000)
    torch.testing.assert_close(far, attend(x, mask=CAUSAL), rtol=0, atol=1e-10)  # only differences count
    cache = attend.make_cache(B, L)
    with torch.no_grad():
        attend(x[:, :3], mask=CAUSAL, positions=torch.arange(1000, 1003), cache=cache)
        require_near(attend(x[:, 3:], mask=CAUSAL, cache=cache), far[:, 3:], 1e-13)


def test_a_step_is_compiled_twice_at_most() -> None:
    attend, x = module(), tokens()
    cache = attend.make_cache(B, L + 1)
    result, counts = compiled_steps(lambda token: attend(token, mask=CAUSAL, cache=cache), x)
    require_near(result, attend(x, mask=CAUSAL), 1e-13)
    assert counts[1] <= 2
    assert counts[-1] == counts[1]
