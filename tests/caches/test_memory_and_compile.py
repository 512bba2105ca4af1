"""A step copies nothing of the past, and compiles once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from clearhead import masks
from clearhead.caches import Cache, EvictingKVCache, KVCache, SlidingKVCache
from tests.support.compiling import compiled_steps

from .decoding import DIM, EMBED, KV_HEADS, close, module, whole


@pytest.mark.parametrize("make", [KVCache, SlidingKVCache, EvictingKVCache])
def test_keys_stay_in_their_memory(make: Callable[..., Cache]) -> None:
    cache, addresses = make(2, KV_HEADS, 23 if make is KVCache else 4, DIM), set[int]()
    for _ in range(23):
        returned = cache.update(*(torch.randn(2, KV_HEADS, 1, DIM) for _ in range(2)))
        assert make is KVCache or returned.key.shape[2] <= 5
        addresses |= {returned.key.data_ptr(), returned.value.data_ptr()}
    assert len(addresses) == 2


def test_a_compiled_step_recompiles_once_at_most() -> None:
    attend, x = module(rotary=False, dtype=torch.float64), torch.randn(2, 15, EMBED, dtype=torch.float64)
    cache = KVCache(2, KV_HEADS, 40, DIM, dtype=torch.float64)
    found, counts = compiled_steps(lambda token: attend(token, mask=masks.causal(), cache=cache), x)
    close(found, whole(attend, x, "kv"))
    assert counts[0] == 1
    assert counts[1] <= 2
    assert counts[-1] == counts[1]


@pytest.mark.slow
def test_the_compiler_makes_code_of_a_step() -> None:
    """The same through Inductor, with what it generates for this processor."""
    torch._dynamo.reset()
    attend = module(rotary=False, dtype=torch.float32)
    cache = attend.make_cache(2, 20)
    x, causal = torch.randn(2, 9, EMBED), masks.causal()
    step = torch.compile(lambda token: attend(token, mask=causal, cache=cache), fullgraph=True)
    with torch.no_grad():
        found = [step(x[:, [n]]) for n in range(9)]
    close(torch.cat(found, 1), whole(attend, x, "kv"))
