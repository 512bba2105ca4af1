"""Blocks, records and caches after a refused call; arguments of every callable are in `tests/malformed`."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import caches, masks
from clearhead.errors import ClearheadError
from clearhead.positions import Rotary
from clearhead.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward
from tests.malformed import cases  # noqa: F401  (registers them)
from tests.support.budgets import in_turn
from tests.support.snapshots import snapshot, surroundings

X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    """Two modules of ours, each called once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (clearhead.MultiHeadAttention(12, 3) for _ in range(2))

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return self.two(self.one(x, mask=masks.causal()), mask=mask)


WRONG = masks.keep(torch.ones(3, 3))
Block = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]
BLOCKS: dict[str, Block] = {
    "record": lambda model: clearhead.record(model),
    "record, kept": lambda model: clearhead.record(model, keep="queries_keys"),
    "record of a head that is not there": lambda model: clearhead.record(model, heads=[5]),
    "record of other marks": lambda model: clearhead.record(model, query_mask=torch.ones(7, 7)),
    "intervene": lambda model: clearhead.intervene(model, {("one", 0): 0.0, ("two", 1): "mean"}),
    "intervene in a head that is not there": lambda model: clearhead.intervene(model, {("one", 7): 0.0}),
    "intervene with a patch that does not fit": lambda model: clearhead.intervene(model, {("two", 0): torch.ones(7)}),
    "use_kernel": lambda model: clearhead.use_kernel("reference"),
    "check_values": lambda model: clearhead.check_values(),
    "use_linear": lambda model: clearhead.use_linear("pytorch"),
    "monitor": lambda model: clearhead.monitor(model, 1, to=lambda step, values: None),
}


@in_turn(
    {"block": BLOCKS, "outer": [None, "use_kernel", "record", "intervene", "monitor"]}, {"training": [False, True]}
)
def test_a_block_in_which_a_call_is_refused(block: str, outer: str | None, training: bool) -> None:
    """Caught inside, or outside, the block; then the model gives what it gave, with nothing attached to it."""
    model = Model().train(training)
    expected, held, around = model(X), snapshot(model), surroundings()
    for caught_inside in (False, True):
        with contextlib.suppress(ClearheadError), contextlib.ExitStack() as stack:
            if outer is not None:
                stack.enter_context(BLOCKS[outer](model))
            stack.enter_context(BLOCKS[block](model))
            for mask in (WRONG, "not a mask"):
                with contextlib.suppress(ClearheadError) if caught_inside else contextlib.nullcontext():
                    model(X, mask)
            model(X)
        assert snapshot(model) == held
        assert surroundings() == around
        assert torch.equal(model(X), expected)


def test_a_record_counts_calls_after_a_refused_one_as_before() -> None:
    model = Model().eval()
    with clearhead.record(model, ("rows",)) as rec:
        model(X)
        with pytest.raises(ClearheadError):
            model(X, WRONG)
        model(X)
    # The first module had computed its call before the second refused its own.
    assert [len(rec[name]) for name in rec] == [3, 2]
    assert torch.equal(rec["one"][0].rows, rec["one"][2].rows)
    assert torch.equal(rec["two"][0].rows, rec["two"][1].rows)


# Caches after a refused call: they hold what they held, and the next call gives what it gives without the refusal.


B, H, KV, E, D = 2, 6, 3, 24, 4
HELD, NEW = 4, 2


def attention(**options: Any) -> clearhead.MultiHeadAttention:
    return clearhead.MultiHeadAttention(E, H, num_kv_heads=KV, **options).eval().requires_grad_(False)


def latent() -> clearhead.MultiHeadLatentAttention:
    sizes = {"kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 3}
    module = clearhead.MultiHeadLatentAttention(E, H, **sizes, position=Rotary(2))
    return module.eval().requires_grad_(False)


#: Each for B, Hkv, D and the other options of its constructor.
CACHES: dict[str, Callable[..., caches.Cache]] = {
    "all": lambda *sizes, **more: caches.KVCache(*sizes[:2], 11, sizes[2], **more),
    "sliding": lambda *sizes, **more: caches.SlidingKVCache(*sizes[:2], 3, sizes[2], max_crop=2, **more),
    "heavy hitters": lambda *sizes, **more: caches.EvictingKVCache(
        *sizes[:2], 5, sizes[2], policy=caches.HeavyHitters(), **more
    ),
    "sinks and recent": lambda *sizes, **more: caches.EvictingKVCache(
        *sizes[:2], 3, sizes[2], policy=caches.SinksAndRecent(1), **more
    ),
    "by lot": lambda *sizes, **more: caches.EvictingKVCache(
        *sizes[:2], 3, sizes[2], policy=caches.RandomEviction(2), **more
    ),
}


class Refusing(nn.Module):
    """A norm that refuses what it is given, as a part of the user's own may with an error of ours."""

    def forward(self, x: Tensor) -> Tensor:
        raise ClearheadError("x: expected something else, got this")


def _intervened(module: nn.Module, x: Tensor, **given: Any) -> None:
    with clearhead.intervene(module, {("", H): 0.0}):
        module(x, **given)


def _recorded(module: nn.Module, x: Tensor, **given: Any) -> None:
    with clearhead.record(module, query_mask=torch.ones(B, NEW + 1, dtype=torch.bool)):
        module(x, **given)


def _heads(module: nn.Module, x: Tensor, **given: Any) -> None:
    with clearhead.record(module, heads=[H]):
        module(x, **given)


CAUSAL = masks.causal()
Wrong = Callable[..., object]
#: Calls that are refused whatever the cache, before and after it has taken new keys.
WRONG_CALLS: dict[str, Wrong] = {
    "features": lambda module, x, **given: module(x[..., :5], **given),
    "batch": lambda module, x, **given: module(x[:1], **given),
    "positions": lambda module, x, **given: module(x, positions=torch.arange(5), **given),
    "position below -1": lambda module, x, **given: module(x, positions=torch.tensor([-2, 3]), **given),
    "positions and a wrong mask": lambda module, x, **given: module(
        x, positions=torch.tensor([[-1, 4], [4, 5]]), **{**given, "mask": masks.keep(torch.ones(3, 3))}
    ),
    "mask": lambda module, x, **given: module(x, **{**given, "mask": masks.keep(torch.ones(3, 3))}),
    "float mask": lambda module, x, **given: module(x, **{**given, "mask": torch.zeros(NEW, HELD + NEW)}),
    "lengths": lambda module, x, **given: module(x, **{**given, "mask": masks.lengths(torch.tensor([3, 90]))}),
    "prepared mask": lambda module, x, **given: module(x, **{**given, "mask": CAUSAL.prepare(7, 7)}),
    "weights": lambda module, x, **given: module(x, need_weights="yes", **given),
    "a head that is not there": _intervened,
    "marks of other sizes": _recorded,
    "heads that are not there": _heads,
}


def made(kind: str, form: str) -> tuple[nn.Module, caches.Cache]:
    module: Any
    if form == "latent":
        module = latent()
        return module, CACHES[kind](B, 1, module.cache_head_dim, value_head_dim=0)
    options = {"plain": {}, "rotary": {"position": Rotary(D)}, "softcap": {"softcap": 2.0}}[form]
    return attention(**options), CACHES[kind](B, KV, D)


@in_turn({"wrong": WRONG_CALLS, "kind": CACHES}, {"form": ["plain", "rotary", "latent"]})
def test_a_cache_after_a_refused_call(form: str, kind: str, wrong: str) -> None:
    module, cache = made(kind, form)
    x = torch.randn(B, HELD + NEW + 1, E)
    for rows in ("alike", "apart"):
        module(x[:, :HELD], mask=CAUSAL, cache=cache)
        if rows == "apart":
            cache.crop(torch.tensor([HELD - 1, HELD]))
        before, module_before = snapshot(cache), snapshot(module)
        untouched = deepcopy(cache)
        try:
            WRONG_CALLS[wrong](module, x[:, HELD:-1], mask=CAUSAL, cache=cache)
        except ClearheadError:
            pass
        else:
            assert wrong in ("lengths", "prepared mask"), "not refused"
            return  # by a cache whose slots are not the tokens' places, only positions count
        assert snapshot(cache) == before, f"rows {rows}"
        assert snapshot(module) == module_before
        for start, stop in ((HELD, -1), (-1, None)):
            result, expected = (module(x[:, start:stop], mask=CAUSAL, cache=item) for item in (cache, untouched))
            assert torch.equal(result, expected)
        assert snapshot(cache) == snapshot(untouched)
        cache.reset()


def test_a_full_window_of_items_with_padding_after_a_refused_call() -> None:
    """Padding takes no slot: the next tokens of the items overwrite slots with other numbers."""
    module, x, positions = attention(), torch.randn(B, 10, E), torch.arange(7) - torch.tensor([[2], [0]])
    cache = caches.SlidingKVCache(B, KV, 3, D)
    module(x[:, :7], mask=CAUSAL, cache=cache, positions=positions.clamp(min=-1))
    before, untouched = snapshot(cache), deepcopy(cache)
    with pytest.raises(ClearheadError):
        WRONG_CALLS["mask"](module, x[:, 7:9], mask=CAUSAL, cache=cache)
    assert snapshot(cache) == before
    result, expected = (module(x[:, 9:], mask=CAUSAL, cache=item) for item in (cache, untouched))
    assert torch.equal(result, expected)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["none", "causal"])
def test_a_cache_after_a_forced_kernel_has_refused(kind: str, mask: Any) -> None:
    """Rules about positions cannot be refused, a kernel can still be."""
    module, cache = made(kind, "softcap")
    x = torch.randn(B, HELD + NEW, E)
    module(x[:, :HELD], mask=mask, cache=cache)
    before = snapshot(cache)
    with clearhead.use_kernel("sdpa"), pytest.raises(ClearheadError, match="soft-cap"):
        module(x[:, HELD:], mask=mask, cache=cache)
    assert snapshot(cache) == before
    assert cache.length == HELD


def encoder() -> Encoder:
    return Encoder([EncoderLayer(E, attention(), FeedForward(E, 7)) for _ in range(3)]).eval().requires_grad_(False)


def decoder() -> Decoder:
    layers = [DecoderLayer(E, attention(), attention(), FeedForward(E, 7)) for _ in range(3)]
    return Decoder(layers).eval().requires_grad_(False)


STACKS: dict[str, Callable[[], Any]] = {"encoder": encoder, "decoder": decoder}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("refusing", range(3))
def test_every_layers_cache_after_a_later_layer_has_refused(stack: str, kind: str, refusing: int) -> None:
    module, memory = STACKS[stack](), torch.randn(B, 5, E)
    held: Any = [CACHES[kind](B, KV, D) for _ in module.layers]
    if stack == "decoder":
        held = [caches_of(item) for item in held]
    inputs: dict[str, Any] = {"mask": CAUSAL, "cache": held} | ({"memory": memory} if stack == "decoder" else {})
    x = torch.randn(B, HELD + NEW, E)
    module(x[:, :HELD], **inputs)
    before, untouched = snapshot(held), deepcopy(held)
    part = module.layers[refusing].self_attention
    kept, part.out_proj = part.out_proj, Refusing()
    with pytest.raises(ClearheadError, match="something else"):
        module(x[:, HELD:], **inputs)
    part.out_proj = kept
    assert snapshot(held) == before
    assert torch.equal(module(x[:, HELD:], **inputs), module(x[:, HELD:], **{**inputs, "cache": untouched}))


def caches_of(cache: caches.Cache) -> Any:
    return clearhead.transformer.DecoderCache(cache, caches.CrossKVCache())


def test_a_first_call_that_is_refused_leaves_a_cross_cache_empty() -> None:
    module, cache = attention(), caches.CrossKVCache()
    x, memory = torch.randn(B, 3, E), torch.randn(B, 5, E)
    with pytest.raises(ClearheadError):
        module(x, memory, mask=masks.keep(torch.ones(7, 7)), cache=cache)
    assert cache.length == 0
    assert cache.get() is None
    with clearhead.use_kernel("reference"):
        assert torch.allclose(module(x, memory, cache=cache), module(x, memory), atol=1e-6)


OWN, LINEAR = clearhead.MultiHeadAttention(12, 3), clearhead.nn.Linear(12, 5)
DROP_IN = clearhead.nn.MultiheadAttention(12, 3, batch_first=True)
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "attention": lambda x: clearhead.attention(x, x[:, :3], x),
    "mask": lambda x: masks.keep(x),
    "module": lambda x: OWN(x, mask=x),
    "linear layer": lambda x: LINEAR(x[..., :5]),
    "drop-in function": lambda x: clearhead.nn.functional.scaled_dot_product_attention(x, x[..., :5], x),
    "drop-in module": lambda x: DROP_IN(x, x, x[..., :5]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_keeps_no_tensor(name: str) -> None:
    """Until the garbage collector runs, a cycle of the error and its frames would."""

    def refuse() -> weakref.ref[Tensor]:
        x = X.clone()
        with contextlib.suppress(ClearheadError):
            REFUSED[name](x)
            pytest.fail("it was not refused")
        return weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        assert refuse()() is None
    finally:
        gc.enable()
