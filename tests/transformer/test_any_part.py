"""Layers and stacks take any attention, position, mask, norm, feed-forward part and cache that Clearhead has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import clearhead
from clearhead import masks
from clearhead.caches import Cache, EvictingKVCache, SinksAndRecent, SlidingKVCache
from clearhead.positions import ALiBi, RelativeBias, Rotary
from clearhead.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, SwiGLU
from tests.caches.decoding import close
from tests.support.compiling import compiled_steps

from .test_caches import normal

B, L, S, E, H, KV_HEADS, DIM, WINDOW = 2, 11, 7, 13, 6, 3, 4, 5
F64 = torch.float64
causal = masks.causal()


def grouped(**options: Any) -> nn.Module:
    return clearhead.MultiHeadAttention(E, H, num_kv_heads=KV_HEADS, head_dim=DIM, **options)


def latent() -> nn.Module:
    return clearhead.MultiHeadLatentAttention(
        E, H, kv_lora_rank=5, q_lora_rank=7, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4, position=Rotary(2)
    )


ATTENTIONS: dict[str, Callable[[], nn.Module]] = {
    "rotary": lambda: grouped(position=Rotary(DIM)),
    "a share of rotary, interleaved": lambda: grouped(position=Rotary(DIM, fraction=0.5, interleaved=True)),
    "ALiBi": lambda: grouped(mask=ALiBi(H)),
    "relative bias": lambda: grouped(mask=RelativeBias(H, num_buckets=6, max_distance=9, bidirectional=False)),
    "window": lambda: grouped(position=Rotary(DIM), mask=masks.sliding_window(WINDOW - 1, 0)),
    "norms": lambda: grouped(position=Rotary(DIM), q_norm=nn.RMSNorm(DIM), k_norm=nn.RMSNorm(DIM)),
    "soft-cap and sinks": lambda: grouped(position=Rotary(DIM), softcap=1.3, sinks=True),
    "latent": latent,
}
attentions = pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)


def stack(attention: Callable[[], nn.Module]) -> Encoder:
    layers = [
        EncoderLayer(E, attention(), SwiGLU(E, 17), norm=nn.RMSNorm, norm_first=True),
        EncoderLayer(E, attention(), FeedForward(E, 17, activation=nn.GELU())),
    ]
    return randomised(Encoder(layers, norm=nn.LayerNorm(E)))


def randomised(module: Any) -> Any:
    """Biases, sinks and norms start as constants; other values show that they count."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module.to(F64).eval()


@attentions
@torch.no_grad()
def test_a_stack_of_any_attention_writes_step_by_step(attention: Callable[[], nn.Module]) -> None:
    model, x = stack(attention), normal(B, L, E)
    caches = model.make_cache(B, L)
    close(
        torch.cat([model(part, mask=causal, cache=caches) for part in x.split([4] + [1] * (L - 4), 1)], 1),
        model(x, mask=causal),
    )


@attentions
def test_every_parameter_of_every_part_learns(attention: Callable[[], nn.Module]) -> None:
    model = stack(attention).train()
    model(normal(B, L, E), mask=causal).square().sum().backward()
    assert [name for name, own in model.named_parameters() if own.grad is None or not own.grad.any()] == []


CACHES: dict[str, Callable[[], Cache]] = {
    "sliding": lambda: SlidingKVCache(B, KV_HEADS, WINDOW, DIM, dtype=F64),
    "evicting, with room": lambda: EvictingKVCache(B, KV_HEADS, L, DIM, dtype=F64),
    "evicting, the latest": lambda: EvictingKVCache(B, KV_HEADS, WINDOW, DIM, policy=SinksAndRecent(0), dtype=F64),
}


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@torch.no_grad()
def test_a_stack_takes_any_cache(cache: Callable[[], Cache]) -> None:
    model, x = stack(ATTENTIONS["window"]), normal(B, L, E)
    caches = [cache(), cache()]
    close(torch.cat([model(x[:, [n]], mask=causal, cache=caches) for n in range(L)], 1), model(x, mask=causal))


@torch.no_grad()
def test_jagged_rows_are_what_each_is_alone() -> None:
    model, rows = stack(ATTENTIONS["rotary"]), [normal(length, E) for length in (3, 7, 1)]
    result = model(torch.nested.nested_tensor(rows, layout=torch.jagged), mask=causal)
    for one, row in zip(result.unbind(), rows, strict=True):
        close(one, model(row, mask=causal))


@torch.no_grad()
def test_a_step_of_a_stack_compiles_without_breaks_and_once_more_at_most() -> None:
    x, memory = normal(B, L, E), normal(B, S, E)
    parts = [(grouped(position=Rotary(DIM)), grouped(), SwiGLU(E, 17)) for _ in range(2)]
    model = randomised(Decoder(DecoderLayer(E, *layer) for layer in parts))
    caches = model.make_cache(B, L)
    output, counts = compiled_steps(
        lambda token: model(token, None, mask=causal, cache=caches),
        x,
        lambda token: model(token, memory, mask=causal, cache=caches),
    )
    close(output, model(x, memory, mask=causal))
    assert counts[0] == 1
    assert counts[1] == counts[-1] <= 2
