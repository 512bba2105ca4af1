"""Modules: making them and calling them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import clearhead
from clearhead import caches, masks, positions
from clearhead.transformer import Decoder, DecoderCache, DecoderLayer, Encoder, EncoderLayer, FeedForward, SwiGLU
from tests.malformed.calls import Call, case, valid

E, H, B, L, S = 12, 3, 2, 5, 7


def _seeded(make: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make().eval()


def _x(length: int = L) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(B, length, E, generator=draw)


def _attention(**options: Any) -> Any:
    return _seeded(lambda: clearhead.MultiHeadAttention(E, H, **options))


def _forward(module: Any, arguments: dict[str, Any]) -> Call:
    return valid(module, after=lambda: module(**arguments), **arguments)  # `valid` copies the arguments


@case("MultiHeadAttention", weight=8)
def _() -> Call:
    sizes = {"embed_dim": E, "num_heads": H, "num_kv_heads": 3, "head_dim": 4, "qdim": 5, "kdim": 6, "vdim": 7}
    parts = {"position": positions.Rotary(4), "q_norm": nn.LayerNorm(4), "k_norm": None, "mask": masks.causal()}
    return valid(clearhead.MultiHeadAttention, **sizes, **parts, scale=0.5, dropout=0.1, dtype=torch.float32)


case("MultiHeadAttention.forward", weight=16)(
    lambda: _forward(_attention(), {"query": _x(), "key": _x(S), "value": _x(S), "mask": masks.causal()})
)
case("MultiHeadAttention.forward, itself", weight=8)(lambda: _forward(_attention(), {"query": _x()}))


@case("MultiHeadAttention.forward, with weights", weight=8)
def _() -> Call:
    given = {"need_weights": True, "average_attn_weights": False, "mask": torch.rand(L, S) < 0.5}
    return _forward(_attention(), {"query": _x(), "key": _x(S), "value": _x(S), **given})


@case("MultiHeadAttention.forward, with parts", weight=8)
def _() -> Call:
    module = _attention(position=positions.Rotary(4), q_norm=nn.LayerNorm(4), mask=masks.sliding_window(2, 2))
    return _forward(module, {"query": _x(), "positions": torch.arange(L), "mask": masks.lengths(torch.tensor([3, 5]))})


@case(
    "MultiHeadAttention.forward, with a cache", weight=8, query="cache", key="cache", value="cache", positions="cache"
)
def _() -> Call:
    module = _attention().requires_grad_(False)
    cache = module.make_cache(B, 8)
    module(_x(4), cache=cache)
    given = {"query": _x(2), "mask": masks.causal(), "positions": 4, "cache": cache}

    def after() -> Any:
        return module(_x(2), mask=masks.causal(), positions=4, cache=cache), cache.key, cache.length

    return valid(module, after=after, **given)


case("MultiHeadAttention.make_cache")(lambda: valid(_attention().make_cache, batch_size=2, max_length=5))
case("MultiHeadLatentAttention", weight=6)(
    lambda: valid(clearhead.MultiHeadLatentAttention, embed_dim=E, num_heads=H, **_latent(), dropout=0.1)
)


@case("MultiHeadLatentAttention.forward", weight=8)
def _() -> Call:
    module = _seeded(lambda: clearhead.MultiHeadLatentAttention(E, H, **_latent()))
    return _forward(module, {"query": _x(), "key": _x(), "value": None, "mask": masks.causal(), "positions": 3})


@case("MultiHeadLatentAttention.make_cache")
def _() -> Call:
    module = _seeded(lambda: clearhead.MultiHeadLatentAttention(E, H, **_latent()))
    return valid(module.make_cache, batch_size=2, max_length=5)


def _latent() -> dict[str, Any]:
    sizes = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "q_lora_rank": 5}
    return {**sizes, "position": positions.Rotary(2), "q_norm": nn.LayerNorm(5), "kv_norm": nn.LayerNorm(6)}


case("Linear")(lambda: valid(clearhead.nn.Linear, in_features=3, out_features=5, bias=True, dtype=torch.float32))
case("Linear.forward")(lambda: _forward(_seeded(lambda: clearhead.nn.Linear(E, 5)), {"input": _x()}))


@case("FeedForward")
def _() -> Call:
    given = {"embed_dim": E, "hidden_dim": 8, "activation": torch.relu, "dropout": 0.1, "bias": True}
    return valid(FeedForward, **given, device="cpu", dtype=torch.float32)


case("FeedForward.forward")(lambda: _forward(_seeded(lambda: FeedForward(E, 8)), {"x": _x()}))
case("SwiGLU")(lambda: valid(SwiGLU, embed_dim=E, hidden_dim=8, bias=True, device="cpu"))
case("SwiGLU.forward")(lambda: _forward(_seeded(lambda: SwiGLU(E, 8)), {"x": _x()}))


def _encoder_layer() -> Any:
    return EncoderLayer(E, clearhead.MultiHeadAttention(E, H), FeedForward(E, 8))


def _decoder_layer() -> Any:
    attention, cross = clearhead.MultiHeadAttention(E, H), clearhead.MultiHeadAttention(E, H)
    return DecoderLayer(E, attention, cross, FeedForward(E, 8))


@case("EncoderLayer")
def _() -> Call:
    parts = {"self_attention": clearhead.MultiHeadAttention(E, H), "feed_forward": FeedForward(E, 8)}
    return valid(EncoderLayer, embed_dim=E, **parts, norm=nn.RMSNorm, norm_first=True, dropout=0.1)


@case("DecoderLayer")
def _() -> Call:
    parts = {name: clearhead.MultiHeadAttention(E, H) for name in ("self_attention", "cross_attention")}
    given = {"embed_dim": E, **parts, "feed_forward": FeedForward(E, 8), "norm": nn.LayerNorm}
    return valid(DecoderLayer, **given, norm_first=True, dropout=0.1)


@case("EncoderLayer.forward", weight=8, x="query")
def _() -> Call:
    given = {"x": _x(), "mask": masks.causal(), "positions": 2, "need_weights": True, "average_attn_weights": False}
    return _forward(_seeded(_encoder_layer), given)


@case("DecoderLayer.forward", weight=8, x="query", memory=("key", "value"), memory_mask="mask")
def _() -> Call:
    given = {"x": _x(), "memory": _x(S), "mask": masks.causal(), "memory_mask": masks.prefix(3), "positions": None}
    return _forward(_seeded(_decoder_layer), {**given, "need_weights": True})


case("Encoder")(lambda: valid(Encoder, layers=[_encoder_layer(), _encoder_layer()], norm=nn.LayerNorm(E)))
case("Decoder")(lambda: valid(Decoder, layers=[_decoder_layer()], norm=nn.LayerNorm(E)))


@case("Encoder.forward", weight=6, x="query")
def _() -> Call:
    module = _seeded(lambda: Encoder([_encoder_layer(), _encoder_layer()]))
    return _forward(module, {"x": _x(), "mask": masks.causal(), "positions": 0, "need_weights": True})


@case("Decoder.forward", weight=6, x="query", memory=("key", "value"), memory_mask="mask")
def _() -> Call:
    module = _seeded(lambda: Decoder([_decoder_layer()]))
    return _forward(module, {"x": _x(), "memory": _x(S), "mask": masks.causal(), "memory_mask": None})


@case("Encoder.forward, with caches", x=("query", "cache"), positions="cache")
def _() -> Call:
    module = _seeded(lambda: Encoder([_encoder_layer(), _encoder_layer()])).requires_grad_(False)
    held = module.make_cache(B, 8)
    module(_x(4), cache=held)
    given = {"x": _x(2), "mask": masks.causal(), "cache": held, "positions": 4}
    return valid(
        module, after=lambda: (module(_x(2), mask=masks.causal(), cache=held), [c.length for c in held]), **given
    )


case("Encoder.make_cache")(lambda: valid(Encoder([_encoder_layer()]).make_cache, batch_size=2, max_length=4))
case("Decoder.make_cache")(lambda: valid(Decoder([_decoder_layer()]).make_cache, batch_size=2, max_length=4))
case("DecoderCache.reorder", weight=2)(lambda: valid(_both().reorder, indices=torch.tensor([1, 0])))
case("DecoderCache.crop", weight=2)(lambda: valid(_both().crop, length=0))


def _both() -> Any:
    return DecoderCache(caches.KVCache(B, H, 8, 4), caches.CrossKVCache())


@case("nn.MultiheadAttention", weight=6)
def _() -> Call:
    given = {"embed_dim": E, "num_heads": H, "dropout": 0.1, "bias": True, "add_bias_kv": True, "add_zero_attn": True}
    return valid(clearhead.nn.MultiheadAttention, **given, kdim=5, vdim=6, batch_first=True, device="cpu")


@case("nn.MultiheadAttention.forward", weight=16)
def _() -> Call:
    module = _seeded(lambda: clearhead.nn.MultiheadAttention(E, H, batch_first=True))
    return _forward(module, {"query": _x(), "key": _x(S), "value": _x(S), **_torch_masks()})


@case("nn.MultiheadAttention.forward, itself", weight=8)
def _() -> Call:
    module = _seeded(lambda: clearhead.nn.MultiheadAttention(E, H, batch_first=True))
    x = _x()
    return _forward(module, {"query": x, "key": x, "value": x, "need_weights": False, "is_causal": True})


@case("nn.MultiheadAttention.forward, padded", weight=8)
def _() -> Call:
    module = _seeded(lambda: clearhead.nn.MultiheadAttention(E, H, add_bias_kv=True))
    x = _x().transpose(0, 1)
    hidden = torch.tensor([[False] * 5, [False, False, True, True, True]])
    return _forward(module, {"query": x, "key": x, "value": x, "key_padding_mask": hidden, "need_weights": False})


def _torch_masks() -> dict[str, Any]:
    hidden = {"key_padding_mask": torch.rand(B, S) < 0.2, "attn_mask": torch.rand(L, S) < 0.2}
    return {**hidden, "need_weights": True, "average_attn_weights": False, "is_causal": True}
