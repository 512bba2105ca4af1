"""What a cache refuses, and what it leaves alone when it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import MultiHeadAttention, masks
from clearhead.caches import (
    Cache,
    CrossKVCache,
    EvictingKVCache,
    KVCache,
    RandomEviction,
    SinksAndRecent,
    SlidingKVCache,
)
from clearhead.errors import ArgumentError, CacheError, DeviceError, DTypeError, MaskTypeError, ShapeError

B, HEADS, DIM = 2, 3, 5


def tokens(count: int, batch: int = B, heads: int = HEADS, dim: int = DIM, **options: Any) -> Tensor:
    return torch.randn(batch, heads, count, dim, **options)


def test_a_full_cache_takes_nothing() -> None:
    cache = KVCache(B, HEADS, 7, DIM)
    x = tokens(5)
    cache.update(x, x)
    with pytest.raises(CacheError, match="at most max_length = 7 tokens, got 5 held and 3 more, 8") as error:
        cache.update(tokens(3), tokens(3))
    assert "Nothing was written" in str(error.value)
    assert torch.equal(cache.key, x)
    assert cache.update(tokens(2), tokens(2)).key.shape[2] == 7


def test_a_full_cache_of_rows_that_differ() -> None:
    cache = KVCache(B, HEADS, 7, DIM)
    cache.update(tokens(6), tokens(6))
    cache.crop(torch.tensor([6, 2]))
    cache.update(tokens(1), tokens(1))
    with pytest.raises(CacheError, match="7 held and 1 more, 8"):
        cache.update(tokens(1), tokens(1))


CACHES: dict[str, Cache] = {
    "kv": KVCache(B, HEADS, 7, DIM),
    "sliding": SlidingKVCache(B, HEADS, 7, DIM),
    "evicting": EvictingKVCache(B, HEADS, 7, DIM),
}
WRONG = {
    "batch size": (tokens(1, batch=3), ShapeError, r"key: expected the cache's \(B, Hkv, L, D\) = \(2, 3, L, 5\)"),
    "heads": (tokens(1, heads=6), ShapeError, r"got \(2, 6, 1, 5\)"),
    "head dim": (tokens(1, dim=4), ShapeError, r"got \(2, 3, 1, 4\)"),
    "no batch": (tokens(1)[0], ShapeError, r"got \(3, 1, 5\)"),
    "dtype": (tokens(1, dtype=torch.float64), DTypeError, r"the cache's dtype torch.float32, got torch.float64"),
    "device": (tokens(1, device="meta"), DeviceError, r"the cache's device cpu, got meta"),
    "gradients": (tokens(1).requires_grad_(), CacheError, r"tensors without gradients.*torch.no_grad"),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=list(CACHES))
@pytest.mark.parametrize("case", WRONG)
def test_tensors_of_another_cache(cache: Cache, case: str) -> None:
    given, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        cache.update(given, given)
    assert cache.length == 0


def test_the_module_says_so_too() -> None:
    attend = MultiHeadAttention(12, 3)
    with torch.no_grad(), pytest.raises(ShapeError, match="make_cache"):
        attend(torch.randn(2, 1, 12), cache=attend.make_cache(batch_size=3, max_length=7))
    with pytest.raises(CacheError, match="no_grad"):
        attend(torch.randn(2, 1, 12), cache=CrossKVCache())
    filled = CrossKVCache()
    with torch.no_grad():
        attend(torch.randn(2, 1, 12), torch.randn(2, 4, 12), cache=filled)
    with pytest.raises(ShapeError, match="equal batch sizes"):
        attend(torch.randn(3, 1, 12), cache=filled)


def test_what_is_no_cache() -> None:
    attend, x = MultiHeadAttention(12, 3), torch.randn(2, 1, 12)
    for given, name in ((3, "int"), (KVCache, "KVCache")):
        with pytest.raises(DTypeError, match=f"cache: expected a cache of clearhead.caches, got {name}.*make_cache"):
            attend(x, cache=given)  # type: ignore[call-overload]


def test_a_memory_has_no_positions_beside_the_queries() -> None:
    """Else the first call would turn its queries, and later ones would not."""
    attend, x = MultiHeadAttention(12, 3, position=lambda q, k, positions: (q, k)), torch.randn(2, 4, 12)
    with (
        torch.no_grad(),
        pytest.raises(ArgumentError, match=r"cache: expected one of self-attention.*without position="),
    ):
        attend(x, x.clone(), cache=CrossKVCache())


@pytest.mark.parametrize("make", [KVCache, SlidingKVCache, EvictingKVCache])
def test_inference_mode(make: Any) -> None:
    cache, x = make(B, HEADS, 7, DIM), tokens(3)
    with torch.inference_mode():
        cache.update(x, x)
        cache.reorder(torch.tensor([1, 1]))
        within = make(B, HEADS, 7, DIM)
        within.update(x, x)
    assert torch.equal(cache.update(x, x).key[0, :, :3], x[1])
    with pytest.raises(CacheError, match=r"made outside torch.inference_mode\(\).*Make the cache before"):
        within.update(x, x)
    with pytest.raises(CacheError, match="got one that was made within"):
        within.reorder(torch.tensor([1, 0]))


BAD_SIZES = {
    "zero": ((0, 3, 7, 5), ArgumentError, "batch_size: expected an int ≥ 1, got 0"),
    "float": ((2, 3, 7.0, 5), DTypeError, "an int ≥ 1, got 7.0"),
    "negative": ((2, -3, 7, 5), ArgumentError, "num_kv_heads: expected an int ≥ 1, got -3"),
}


@pytest.mark.parametrize("make", [KVCache, SlidingKVCache, EvictingKVCache])
@pytest.mark.parametrize("case", BAD_SIZES)
def test_sizes(make: Any, case: str) -> None:
    sizes, kind, text = BAD_SIZES[case]
    with pytest.raises(kind, match=text):
        make(*sizes)


CROPS = {
    "longer": (6, ArgumentError, "length: expected 0 … 5, the tokens in the cache, got 6"),
    "negative": (-1, ArgumentError, "got -1"),
    "float": (2.0, DTypeError, "an int or an integer tensor"),
    "floats": (torch.ones(B), DTypeError, "got torch.float32"),
    "rows": (torch.ones(3).long(), ShapeError, r"one length per row, \(2,\), got \(3,\)"),
    "one longer": (torch.tensor([3, 6]), ArgumentError, "got 6"),
}


@pytest.mark.parametrize("make", [KVCache, SlidingKVCache, EvictingKVCache])
@pytest.mark.parametrize("case", CROPS)
def test_crops(make: Any, case: str) -> None:
    length, kind, text = CROPS[case]
    cache = make(B, HEADS, 7, DIM)
    cache.update(tokens(5), tokens(5))
    with pytest.raises(kind, match=text):
        cache.crop(length)
    assert cache.length == 5


def test_a_sliding_cache_cannot_go_back_to_what_it_forgot() -> None:
    cache = SlidingKVCache(B, HEADS, 4, DIM, max_crop=2)
    cache.update(tokens(11), tokens(11))
    with pytest.raises(CacheError, match=r"length: expected 8 … 11: .*got 7.*max_crop"):
        cache.crop(7)
    with pytest.raises(CacheError, match=r"leave each row the window before its end, got \[3\]"):
        cache.crop(torch.tensor([10, 3]))
    cache.crop(8)
    assert cache.length == 8


REORDERS = {
    "bools": (torch.tensor([True, False]), DTypeError, "indices: expected an int64 or int32 tensor"),
    "list": ([0, 1], DTypeError, "got list"),
    "shape": (torch.zeros(2, 1).long(), ShapeError, r"one row number per row, \(B,\), got \(2, 1\)"),
    "beyond": (torch.tensor([0, 2]), ArgumentError, "indices: expected 0 … 1, the rows of the cache, got 2"),
    "negative": (torch.tensor([-1, 0]), ArgumentError, "indices: expected 0 … 1, the rows of the cache, got -1"),
}


@pytest.mark.parametrize("make", [KVCache, SlidingKVCache, EvictingKVCache])
@pytest.mark.parametrize("case", REORDERS)
def test_reorderings(make: Any, case: str) -> None:
    indices, kind, text = REORDERS[case]
    with pytest.raises(kind, match=text):
        make(B, HEADS, 7, DIM).reorder(indices)


PLACES = {
    "too few": (torch.arange(2), ShapeError, r"positions: expected shape \(3,\) or \(2, 3\)"),
    "floats": (torch.arange(3.0), DTypeError, "positions: expected an int, or an integer tensor"),
    "negative": (-1, ArgumentError, "a first position ≥ 0, got -1"),
    "out of range": (torch.tensor([[0, 1, 2], [-2, -1, 0]]), ArgumentError, "positions ≥ 0, or −1 for padding, got -2"),
    "three dimensions": (torch.zeros(1, 1, 3).long(), ShapeError, r"shape \(n,\) or \(B, n\)"),
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("cached", [False, True])
def test_positions(case: str, cached: bool) -> None:
    given, kind, text = PLACES[case]
    attend = MultiHeadAttention(12, 3)
    with torch.no_grad(), pytest.raises(kind, match=text if cached or case != "too few" else "positions"):
        attend(torch.randn(2, 3, 12), positions=given, cache=attend.make_cache(2, 7) if cached else None)  # type: ignore[arg-type]


PARTS = {
    "position": ({"position": 3}, DTypeError, r"position: expected a callable \(q, k, positions\)"),
    "a mask as position": ({"position": masks.causal()}, MaskTypeError, "pass it as mask="),
    "norm": ({"k_norm": torch.relu}, DTypeError, r"k_norm: expected a torch.nn.Module"),
    "mask": ({"mask": torch.ones(3, 3).bool()}, MaskTypeError, "mask: expected a clearhead Mask, got Tensor"),
    "softcap": ({"softcap": 0.0}, ArgumentError, "softcap: expected a number > 0"),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_of_another_kind(case: str) -> None:
    given, kind, text = PARTS[case]
    with pytest.raises(kind, match=text):
        MultiHeadAttention(12, 3, **given)


def test_a_position_part_needs_keys_beside_queries() -> None:
    attend = MultiHeadAttention(12, 3, position=lambda q, k, positions: (q, k))
    with pytest.raises(ShapeError, match="key: expected the query's length 5"):
        attend(torch.randn(2, 5, 12), torch.randn(2, 7, 12))


def test_a_policy_that_is_none() -> None:
    with pytest.raises(DTypeError, match="policy: expected an EvictionPolicy, got str"):
        EvictingKVCache(B, HEADS, 7, DIM, policy="h2o")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="sinks: expected an int ≥ 0, got -1"):
        SinksAndRecent(-1)


@pytest.mark.parametrize("kind", [KVCache, SlidingKVCache, EvictingKVCache])
def test_a_cache_lies_on_its_device_in_its_dtype(kind: type[Cache]) -> None:
    options: dict[str, Any] = {"policy": SinksAndRecent()} if kind is EvictingKVCache else {}
    cache: Any = kind(B, HEADS, 7, DIM, value_head_dim=2, dtype=torch.bfloat16, device="meta", **options)
    found = cache.update(
        tokens(4, device="meta", dtype=torch.bfloat16), tokens(4, dim=2, device="meta", dtype=torch.bfloat16)
    )
    assert (found.key.device.type, found.key.dtype, found.key.shape[-1]) == ("meta", torch.bfloat16, DIM)
    assert (found.value.device.type, found.value.dtype, found.value.shape[-1]) == ("meta", torch.bfloat16, 2)


def test_rows_that_are_cropped_for_the_first_time_keep_their_positions() -> None:
    cache = KVCache(B, HEADS, 11, DIM)
    cache.update(tokens(6), tokens(6))
    cache.crop(torch.tensor([6, 2]))
    found = cache.update(tokens(1), tokens(1))
    assert found.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, -1, -1, -1, -1]]


def test_positions_may_jump_after_tokens_that_counted_up() -> None:
    cache = KVCache(B, HEADS, 11, DIM)
    cache.update(tokens(3), tokens(3))
    found = cache.update(tokens(2), tokens(2), positions=7)
    assert found.positions.tolist() == [[0, 1, 2, 7, 8]] * B


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_has_64_bits(seed: int) -> None:
    with pytest.raises(ArgumentError, match="an int of 64 bits"):
        RandomEviction(seed)
