"""Step-by-step decoding equals one full causal pass, for every cache and padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from clearhead import masks
from clearhead.caches import Cache, CrossKVCache, EvictingKVCache, KVCache, SlidingKVCache
from tests.support.closeness import require_near

from .decoding import CACHES, DIM, EMBED, KV_HEADS, B, fed, make_cache, module, rule, whole


@pytest.mark.parametrize("kind", CACHES)
def test_right_padding_at_no_position_can_be_cropped_away(kind: str) -> None:
    attend, cache = module(), make_cache(kind)
    x, lengths = torch.randn(B, 23, EMBED, dtype=torch.float64), torch.tensor([23, 2, 13])
    columns = torch.arange(23).expand(B, -1)
    with torch.no_grad():
        attend(x, mask=masks.causal(), positions=columns.masked_fill(columns >= lengths[:, None], -1), cache=cache)
    cache.crop(lengths)
    more = torch.randn(B, 7, EMBED, dtype=torch.float64)
    found = fed(attend, more, cache, [1, 5, 1])
    for row, n in enumerate(lengths.tolist()):
        require_near(found[[row]], whole(attend, torch.cat((x[[row], :n], more[[row]]), 1), kind)[:, n:], 1e-13)


def test_left_padding_said_by_a_tensor_mask() -> None:
    """Columns of a `KVCache` line up with what was fed."""
    attend, cache = module(rotary=False), make_cache("kv", 2)
    x = torch.randn(2, 6, EMBED, dtype=torch.float64)
    real = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 5), (5, 6)):
            mask = masks.causal() & masks.keep(keys=real[:, :stop])
            found.append(attend(x[:, start:stop], mask=mask, cache=cache))
    require_near(torch.cat(found, 1)[[1], 2:], whole(attend, x[[1], 2:], "kv"), 1e-13)


@pytest.mark.parametrize("kind", CACHES)
def test_weights_count_what_the_cache_holds(kind: str) -> None:
    attend, cache = module(), make_cache(kind)
    x = torch.randn(B, 4, EMBED, dtype=torch.float64)
    with torch.no_grad():
        _, expected = attend(x, mask=rule(kind), need_weights=True)
        attend(x[:, :3], mask=masks.causal(), cache=cache)
        _, weights = attend(x[:, 3:], mask=masks.causal(), cache=cache, need_weights=True)
    require_near(weights, expected[:, 3:], 1e-13)


def test_memory_is_projected_once() -> None:
    attend, cache = module(rotary=False), CrossKVCache()
    x, memory = torch.randn(B, 5, EMBED, dtype=torch.float64), torch.randn(B, 7, EMBED, dtype=torch.float64)
    mask = masks.lengths(torch.tensor([7, 4, 1]))
    calls: list[int] = []
    attend.k_proj.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        expected = attend(x, memory, mask=mask)
        found = [attend(x[:, [n]], memory if n == 0 else None, mask=mask, cache=cache) for n in range(5)]
    assert len(calls) == 2
    require_near(torch.cat(found, 1), expected, 1e-13)
    cache.reorder(torch.tensor([1, 1, 0]))
    with torch.no_grad():
        require_near(attend(x, cache=cache), attend(x, memory[[1, 1, 0]]), 1e-13)


def test_a_cache_made_under_autocast_takes_its_keys() -> None:
    attend, x = module(dtype=torch.float32), torch.randn(B, 6, EMBED)
    attend.k_norm = None  # PyTorch's warns under autocast
    with torch.autocast("cpu", torch.bfloat16):
        cache = attend.make_cache(B, 6)
        assert cache.key.dtype == torch.bfloat16
        found, expected = fed(attend, x, cache, [4, 1, 1]), whole(attend, x, "kv")
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-6 * float(expected.abs().max()))
    assert attend.make_cache(B, 6).key.dtype == torch.float32


def test_no_batch_is_a_batch_of_one() -> None:
    attend, cache = module(), make_cache("kv", 1)
    x = torch.randn(6, EMBED, dtype=torch.float64)
    with torch.no_grad():
        found = torch.cat([attend(x[[n]], mask=masks.causal(), cache=cache) for n in range(6)])
        require_near(found, attend(x, mask=masks.causal()), 1e-13)


# A step copies nothing of the past, and compiles.


@pytest.mark.parametrize("make", [KVCache, SlidingKVCache, EvictingKVCache])
def test_keys_stay_in_their_memory(make: Callable[..., Cache]) -> None:
    cache, addresses = make(2, KV_HEADS, 23 if make is KVCache else 4, DIM), set[int]()
    for _ in range(23):
        returned = cache.update(*(torch.randn(2, KV_HEADS, 1, DIM) for _ in range(2)))
        assert make is KVCache or returned.key.shape[2] <= 5
        addresses |= {returned.key.data_ptr(), returned.value.data_ptr()}
    assert len(addresses) == 2


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
    require_near(torch.cat(found, 1), whole(attend, x, "kv"), least=0)
