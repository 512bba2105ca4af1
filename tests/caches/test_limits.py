"""What a cache refuses, and what it does not change when it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, ones

from clearhead import MultiHeadAttention, masks
from clearhead.caches import (
    CrossKVCache,
    EvictingKVCache,
    HeavyHitters,
    KVCache,
    RandomEviction,
    SinksAndRecent,
    SlidingKVCache,
)
from clearhead.errors import (
    ArgumentError,
    CacheError,
    ClearheadError,
    DeviceError,
    DTypeError,
    MaskTypeError,
    ShapeError,
)

B, HEADS, DIM = 2, 3, 5
Refused = tuple[Any, type[ClearheadError], str]
each_kind = pytest.mark.parametrize("kind", [KVCache, SlidingKVCache, EvictingKVCache])


def tokens(count: int, batch: int = B, heads: int = HEADS, dim: int = DIM, **options: Any) -> Tensor:
    return torch.randn(batch, heads, count, dim, **options)


def filled(kind: Any, count: int, room: int = 7, **options: Any) -> Any:
    cache = kind(B, HEADS, room, DIM, **options)
    cache.update(tokens(count), tokens(count))
    return cache


def require_refusal(call: Callable[[], object], error: type[ClearheadError], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_a_full_cache_takes_nothing() -> None:
    cache = filled(KVCache, 5)
    before = cache.key.clone()
    text = "at most max_length = 7 tokens, got 5 held and 3 more, 8. Make the cache larger, or use a SlidingKVCache. N"
    require_refusal(lambda: cache.update(tokens(3), tokens(3)), CacheError, text)
    assert torch.equal(cache.key, before)
    cache.update(tokens(1), tokens(1))
    cache.crop(torch.tensor([6, 2]))  # rows that differ: the longest one counts
    cache.update(tokens(1), tokens(1))
    require_refusal(lambda: cache.update(tokens(1), tokens(1)), CacheError, "7 held and 1 more, 8")


WRONG_TOKENS: dict[str, Refused] = {
    "batch": (tokens(1, batch=3), ShapeError, "key: expected the cache's (B, Hkv, L, D) = (2, 3, L, 5), got (3, 3"),
    "heads": (tokens(1, heads=6), ShapeError, "got (2, 6, 1, 5)"),
    "head dim": (tokens(1, dim=4), ShapeError, "got (2, 3, 1, 4)"),
    "no batch": (tokens(1)[0], ShapeError, "got (3, 1, 5)"),
    "dtype": (tokens(1).double(), DTypeError, "the cache's dtype torch.float32, got torch.float64. Make the cache"),
    "device": (tokens(1, device="meta"), DeviceError, "the cache's device cpu, got meta"),
    "gradients": (tokens(1).requires_grad_(), CacheError, "without gradients: a cache is written in place"),
}
WRONG_LENGTHS: dict[str, Refused] = {
    "longer": (6, ArgumentError, "length: expected 0 … 5, the tokens in the cache, got 6"),
    "negative": (-1, ArgumentError, "got -1"),
    "float": (2.0, DTypeError, "an int or an integer tensor"),
    "floats": (torch.ones(B), DTypeError, "got torch.float32"),
    "three items": (torch.ones(3).long(), ShapeError, "one length per row, (2,), got (3,)"),
    "one longer": (torch.tensor([3, 6]), ArgumentError, "got 6"),
}
WRONG_INDICES: dict[str, Refused] = {
    "bools": (torch.tensor([True, False]), DTypeError, "indices: expected an int64 or int32 tensor"),
    "list": ([0, 1], DTypeError, "got list"),
    "shape": (torch.zeros(2, 1).long(), ShapeError, "one row number per row, (B,), got (2, 1)"),
    "beyond": (torch.tensor([0, 2]), ArgumentError, "indices: expected 0 … 1, the rows of the cache, got 2"),
    "negative": (torch.tensor([-1, 0]), ArgumentError, "indices: expected 0 … 1, the rows of the cache, got -1"),
}
WRONG = {"update": WRONG_TOKENS, "crop": WRONG_LENGTHS, "reorder": WRONG_INDICES}


@each_kind
@pytest.mark.parametrize(("method", "name"), [(method, name) for method in WRONG for name in WRONG[method]])
def test_a_refused_call_changes_nothing(kind: Any, method: str, name: str) -> None:
    cache = filled(kind, 5)
    before = cache.key.clone()
    given, error, text = WRONG[method][name]
    arguments = (given, given) if method == "update" else (given,)
    require_refusal(lambda: getattr(cache, method)(*arguments), error, text)
    assert cache.length == 5
    assert torch.equal(cache.key, before)


def test_a_sliding_cache_cannot_go_back_to_overwritten_tokens() -> None:
    cache = filled(SlidingKVCache, 11, room=4, max_crop=2)
    require_refusal(lambda: cache.crop(7), CacheError, "length: expected 8 … 11: the window before what stays must")
    text = "lengths that leave each row the window before its end, got [3]. Make the cache with max_crop= as many"
    require_refusal(lambda: cache.crop(torch.tensor([10, 3])), CacheError, text)
    cache.crop(8)
    assert cache.length == 8


@each_kind
def test_inference_mode(kind: Any) -> None:
    cache, x = kind(B, HEADS, 7, DIM), tokens(3)
    with torch.inference_mode():
        cache.update(x, x)
        cache.reorder(torch.tensor([1, 1]))
        within = filled(kind, 3)
    assert torch.equal(cache.update(x, x).key[0, :, :3], x[1])
    text = "one that was made outside torch.inference_mode(), to be written outside of it, got one that was made within"
    require_refusal(lambda: within.update(x, x), CacheError, text)
    require_refusal(lambda: within.reorder(torch.tensor([1, 0])), CacheError, text)


def module(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(12, 3, **options)


def with_cache(cache: Any, *shapes: tuple[int, ...], **options: Any) -> Callable[[], object]:
    return lambda: module(**options)(*(torch.randn(shape) for shape in shapes), cache=cache)


def filled_memory() -> CrossKVCache:
    cache = CrossKVCache()
    cache.update(torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4))
    return cache


X = (2, 4, 12)


def unrotated(q: Tensor, k: Tensor, positions: object) -> tuple[Tensor, Tensor]:
    return q, k


IN_MODULES: dict[str, Refused] = {
    "other batch": (with_cache(module().make_cache(3, 7), (2, 1, 12)), ShapeError, "module.make_cache(...)"),
    "memory, batch": (with_cache(filled_memory(), (3, 1, 12)), ShapeError, "equal batch sizes"),
    "gradients": (with_cache(CrossKVCache(), X), CacheError, "kept keys would hold on to their graph, got a key"),
    "int": (with_cache(3, (2, 1, 12)), DTypeError, "cache: expected a cache of clearhead.caches, got int"),
    "class": (with_cache(KVCache, (2, 1, 12)), DTypeError, "expected a cache of clearhead.caches, got KVCache"),
    # Else the first call would rotate its queries, and later ones would not.
    "positions": (with_cache(CrossKVCache(), X, X, position=unrotated), ArgumentError, "one of self-attention"),
    "lengths": (lambda: module(position=unrotated)(ones(2, 5, 12), ones(2, 7, 12)), ShapeError, "query's length 5"),
    "position": (lambda: module(position=3), DTypeError, "position: expected a callable (q, k, positions)"),
    "mask as position": (lambda: module(position=masks.causal()), MaskTypeError, "pass it as mask="),
    "norm": (lambda: module(k_norm=torch.relu), DTypeError, "k_norm: expected a torch.nn.Module"),
    "mask": (lambda: module(mask=ones(3, 3).bool()), MaskTypeError, "mask: expected a clearhead Mask, got Tensor"),
    "softcap": (lambda: module(softcap=0.0), ArgumentError, "softcap: expected a number > 0"),
    "policy": (lambda: EvictingKVCache(B, HEADS, 7, DIM, policy="h2o"), DTypeError, "policy: expected an Ev"),
    "sinks": (lambda: SinksAndRecent(-1), ArgumentError, "sinks: expected an int ≥ 0, got -1"),
    "share below 0": (lambda: HeavyHitters(-0.1), ArgumentError, "recent: expected a share in [0, 1]"),
    "share above 1": (lambda: HeavyHitters(1.5), ArgumentError, "recent: expected a share in [0, 1]"),
    "seed of 65 bits": (lambda: RandomEviction(2**64), ArgumentError, "an int of 64 bits"),
    "seed below": (lambda: RandomEviction(-(2**63) - 1), ArgumentError, "an int of 64 bits"),
    **{
        f"{kind.__name__}, {name}": (lambda kind=kind, sizes=sizes: kind(*sizes), error, text)
        for kind in (KVCache, SlidingKVCache, EvictingKVCache)
        for name, sizes, error, text in (
            ("zero", (0, 3, 7, 5), ArgumentError, "batch_size: expected an int ≥ 1, got 0"),
            ("float", (2, 3, 7.0, 5), DTypeError, "an int ≥ 1, got 7.0"),
            ("negative", (2, -3, 7, 5), ArgumentError, "num_kv_heads: expected an int ≥ 1, got -3"),
        )
    },
}


@pytest.mark.parametrize("name", IN_MODULES)
def test_modules_and_caches_that_do_not_fit(name: str) -> None:
    with nullcontext() if name == "gradients" else torch.no_grad():
        require_refusal(*IN_MODULES[name])


WRONG_POSITIONS: dict[str, Refused] = {
    "too few": (torch.arange(2), ShapeError, "positions: expected shape (3,) or (2, 3)"),
    "floats": (torch.arange(3.0), DTypeError, "positions: expected an int, or an integer tensor"),
    "negative": (-1, ArgumentError, "a first position ≥ 0, got -1"),
    "out of range": (torch.tensor([[0, 1, 2], [-2, -1, 0]]), ArgumentError, "positions ≥ 0, or −1 for padding, got -2"),
    "three dimensions": (torch.zeros(1, 1, 3).long(), ShapeError, "shape (n,) or (B, n)"),
}


@pytest.mark.parametrize("name", WRONG_POSITIONS)
@pytest.mark.parametrize("cached", [False, True])
def test_positions(name: str, cached: bool) -> None:
    given, error, text = WRONG_POSITIONS[name]
    text = text if cached or name != "too few" else "positions"
    cache = module().make_cache(2, 7) if cached else None
    with torch.no_grad():
        require_refusal(lambda: module()(torch.randn(2, 3, 12), positions=given, cache=cache), error, text)


@each_kind
def test_a_cache_lies_on_its_device_in_its_dtype(kind: Any) -> None:
    options: dict[str, Any] = {"policy": SinksAndRecent()} if kind is EvictingKVCache else {}
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    cache = kind(B, HEADS, 7, DIM, value_head_dim=2, **place, **options)
    returned = cache.update(tokens(4, **place), tokens(4, dim=2, **place))
    for tensor, dim in ((returned.key, DIM), (returned.value, 2)):
        assert (tensor.device.type, tensor.dtype, tensor.shape[-1]) == ("meta", torch.bfloat16, dim)


def test_positions_of_rows_that_differ_and_of_tokens_that_jump() -> None:
    cache = filled(KVCache, 6, room=11)
    cache.crop(torch.tensor([6, 2]))
    assert cache.update(tokens(1), tokens(1)).positions.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, -1, -1, -1, -1]]
    cache = filled(KVCache, 3, room=11)
    assert cache.update(tokens(2), tokens(2), positions=7).positions.tolist() == [[0, 1, 2, 7, 8]] * B
