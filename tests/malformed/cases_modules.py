"""Modules: making them and calling them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import clearhead
from clearhead import caches, masks, positions
from clearhead.transformer import Decoder, DecoderCache, DecoderLayer, Encoder, EncoderLayer, FeedForward, SwiGLU
from tests.malformed.calls import Call, case

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


def _latent_attention() -> Any:
    return _seeded(lambda: clearhead.MultiHeadLatentAttention(E, H, **_latent()))


def _torch_attention(**options: Any) -> Any:
    return _seeded(lambda: clearhead.nn.MultiheadAttention(E, H, **options))


def _latent() -> dict[str, Any]:
    sizes = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "q_lora_rank": 5}
    return {**sizes, "position": positions.Rotary(2), "q_norm": nn.LayerNorm(5), "kv_norm": nn.LayerNorm(6)}


def _qkv() -> dict[str, Tensor]:
    return {"query": _x(), "key": _x(S), "value": _x(S)}


@case("MultiHeadAttention", weight=8)
def _() -> Call:
    sizes = {"embed_dim": E, "num_heads": H, "num_kv_heads": 3, "head_dim": 4, "qdim": 5, "kdim": 6, "vdim": 7}
    parts = {"position": positions.Rotary(4), "q_norm": nn.LayerNorm(4), "k_norm": None, "mask": masks.causal()}
    parts["gate"] = "head"
    return Call(clearhead.MultiHeadAttention, **sizes, **parts, scale=0.5, dropout=0.1, dtype=torch.float32)


case("MultiHeadAttention.forward", weight=16)(lambda: Call(_attention(), **_qkv(), mask=masks.causal()))
case("MultiHeadAttention.forward, itself", weight=8)(lambda: Call(_attention(), query=_x()))


@case("MultiHeadAttention.forward, with weights", weight=8)
def _() -> Call:
    given = {"need_weights": True, "average_attn_weights": False, "mask": torch.rand(L, S) < 0.5}
    return Call(_attention(), **_qkv(), **given)


@case("MultiHeadAttention.forward, with parts", weight=8)
def _() -> Call:
    module = _attention(position=positions.Rotary(4), q_norm=nn.LayerNorm(4), mask=masks.sliding_window(2, 2))
    mask = masks.lengths(torch.tensor([3, 5]))
    return Call(module, query=_x(), positions=torch.arange(L), mask=mask)


@case("MultiHeadAttention.forward, with positions of axes", weight=6)
def _() -> Call:
    module = _attention(position=positions.Rotary(4, axes=[0, 1]), gate="elementwise")
    return Call(module, query=_x(), positions=torch.arange(L).expand(2, B, L), mask=masks.causal())


NAMED_CACHE: dict[str, Any] = dict.fromkeys(("query", "key", "value", "positions"), "cache")


@case("MultiHeadAttention.forward, with a cache", weight=8, **NAMED_CACHE)
def _() -> Call:
    module = _attention().requires_grad_(False)
    cache = module.make_cache(B, 8)
    module(_x(4), cache=cache)
    return Call(module, query=_x(2), mask=masks.causal(), positions=4, cache=cache)


case("MultiHeadAttention.make_cache")(lambda: Call(_attention().make_cache, batch_size=2, max_length=5))
case("MultiHeadLatentAttention", weight=6)(
    lambda: Call(clearhead.MultiHeadLatentAttention, embed_dim=E, num_heads=H, **_latent(), dropout=0.1)
)
case("MultiHeadLatentAttention.forward", weight=8)(
    lambda: Call(_latent_attention(), query=_x(), key=_x(), value=None, mask=masks.causal(), positions=3)
)
case("MultiHeadLatentAttention.make_cache")(lambda: Call(_latent_attention().make_cache, batch_size=2, max_length=5))
case("Linear")(lambda: Call(clearhead.nn.Linear, in_features=3, out_features=5, bias=True, dtype=torch.float32))
case("Linear.forward")(lambda: Call(_seeded(lambda: clearhead.nn.Linear(E, 5)), input=_x()))

FEED_FORWARD: dict[str, Any] = {"embed_dim": E, "hidden_dim": 8, "bias": True, "device": "cpu"}
case("FeedForward")(lambda: Call(FeedForward, **FEED_FORWARD, activation=torch.relu, dropout=0.1, dtype=torch.float32))
case("FeedForward.forward")(lambda: Call(_seeded(lambda: FeedForward(E, 8)), x=_x()))
case("SwiGLU")(lambda: Call(SwiGLU, **FEED_FORWARD))
case("SwiGLU.forward")(lambda: Call(_seeded(lambda: SwiGLU(E, 8)), x=_x()))


def _encoder_layer() -> Any:
    return EncoderLayer(E, clearhead.MultiHeadAttention(E, H), FeedForward(E, 8))


def _decoder_layer() -> Any:
    attention, cross = clearhead.MultiHeadAttention(E, H), clearhead.MultiHeadAttention(E, H)
    return DecoderLayer(E, attention, cross, FeedForward(E, 8))


def _encoder() -> Any:
    return _seeded(lambda: Encoder([_encoder_layer(), _encoder_layer()]))


@case("EncoderLayer")
def _() -> Call:
    parts = {"self_attention": clearhead.MultiHeadAttention(E, H), "feed_forward": FeedForward(E, 8)}
    return Call(EncoderLayer, embed_dim=E, **parts, norm=nn.RMSNorm, norm_first=True, dropout=0.1)


@case("DecoderLayer")
def _() -> Call:
    parts = {name: clearhead.MultiHeadAttention(E, H) for name in ("self_attention", "cross_attention")}
    options = {"norm": nn.LayerNorm, "norm_first": True, "dropout": 0.1}
    return Call(DecoderLayer, embed_dim=E, **parts, feed_forward=FeedForward(E, 8), **options)


MEMORY: dict[str, Any] = {"x": "query", "memory": ("key", "value"), "memory_mask": "mask"}


@case("EncoderLayer.forward", weight=8, x="query")
def _() -> Call:
    given = {"mask": masks.causal(), "positions": 2, "need_weights": True, "average_attn_weights": False}
    return Call(_seeded(_encoder_layer), x=_x(), **given)


@case("DecoderLayer.forward", weight=8, **MEMORY)
def _() -> Call:
    given = {"mask": masks.causal(), "memory_mask": masks.prefix(3), "positions": None, "need_weights": True}
    return Call(_seeded(_decoder_layer), x=_x(), memory=_x(S), **given)


case("Encoder")(lambda: Call(Encoder, layers=[_encoder_layer(), _encoder_layer()], norm=nn.LayerNorm(E)))
case("Decoder")(lambda: Call(Decoder, layers=[_decoder_layer()], norm=nn.LayerNorm(E)))
case("Encoder.forward", weight=6, x="query")(
    lambda: Call(_encoder(), x=_x(), mask=masks.causal(), positions=0, need_weights=True)
)


@case("Decoder.forward", weight=6, **MEMORY)
def _() -> Call:
    module = _seeded(lambda: Decoder([_decoder_layer()]))
    return Call(module, x=_x(), memory=_x(S), mask=masks.causal(), memory_mask=None)


@case("Encoder.forward, with caches", x=("query", "cache"), positions="cache")
def _() -> Call:
    module = _encoder().requires_grad_(False)
    written = module.make_cache(B, 8)
    module(_x(4), cache=written)
    return Call(module, x=_x(2), mask=masks.causal(), cache=written, positions=4)


def _both() -> Any:
    return DecoderCache(caches.KVCache(B, H, 8, 4), caches.CrossKVCache())


case("Encoder.make_cache")(lambda: Call(Encoder([_encoder_layer()]).make_cache, batch_size=2, max_length=4))
case("Decoder.make_cache")(lambda: Call(Decoder([_decoder_layer()]).make_cache, batch_size=2, max_length=4))
case("DecoderCache.reorder", weight=2)(lambda: Call(_both().reorder, indices=torch.tensor([1, 0])))
case("DecoderCache.crop", weight=2)(lambda: Call(_both().crop, length=0))


@case("nn.MultiheadAttention", weight=6)
def _() -> Call:
    given = {"embed_dim": E, "num_heads": H, "dropout": 0.1, "bias": True, "add_bias_kv": True, "add_zero_attn": True}
    return Call(clearhead.nn.MultiheadAttention, **given, kdim=5, vdim=6, batch_first=True, device="cpu")


@case("nn.MultiheadAttention.forward", weight=16)
def _() -> Call:
    module = _torch_attention(batch_first=True)
    given = {"key_padding_mask": torch.rand(B, S) < 0.2, "attn_mask": torch.rand(L, S) < 0.2, "is_causal": True}
    return Call(module, **_qkv(), **given, need_weights=True, average_attn_weights=False)


@case("nn.MultiheadAttention.forward, itself", weight=8)
def _() -> Call:
    x = _x()
    return Call(_torch_attention(batch_first=True), query=x, key=x, value=x, need_weights=False, is_causal=True)


@case("nn.MultiheadAttention.forward, padded", weight=8)
def _() -> Call:
    x = _x().transpose(0, 1)
    given = {"key_padding_mask": torch.tensor([[False] * 5, [False, False, True, True, True]]), "need_weights": False}
    return Call(_torch_attention(add_bias_kv=True), query=x, key=x, value=x, **given)
