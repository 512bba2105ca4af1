"""Layers and stacks that write step by step: the same as all at once, whatever is inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.caches import CrossKVCache, KVCache
from clearhead.errors import ArgumentError, CacheError, CheckpointError, ClearheadError, DTypeError, ShapeError
from clearhead.positions import ALiBi, RelativeBias, Rotary
from clearhead.transformer import Decoder, DecoderCache, DecoderLayer, Encoder, EncoderLayer, FeedForward, SwiGLU
from clearhead.transformer import load_transformer as load
from tests.support.closeness import require_near
from tests.support.compiling import compiled_steps

B, L, S, E, H, KV_HEADS, DIM, LAYERS = 2, 11, 7, 13, 6, 3, 4, 3
F64 = torch.float64
causal = masks.causal()


def attention(**options: Any) -> clearhead.MultiHeadAttention:
    return clearhead.MultiHeadAttention(E, H, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=F64, **options)


def rms_norm(size: int) -> nn.RMSNorm:
    return nn.RMSNorm(size, dtype=F64)


def encoder_layer(**options: Any) -> EncoderLayer:
    attend = attention(position=Rotary(DIM), k_norm=rms_norm(DIM))
    return EncoderLayer(E, attend, SwiGLU(E, 17, dtype=F64), norm=rms_norm, **options)


def decoder_layer(**options: Any) -> DecoderLayer:
    parts = attention(position=Rotary(DIM)), attention(), SwiGLU(E, 17, dtype=F64)
    return DecoderLayer(E, *parts, norm=rms_norm, **options)


def encoder() -> Encoder:
    return Encoder((encoder_layer(norm_first=True) for _ in range(LAYERS)), norm=rms_norm(E)).eval()


def decoder() -> Decoder:
    return Decoder((decoder_layer(norm_first=True) for _ in range(LAYERS)), norm=rms_norm(E)).eval()


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=F64)


chunks = pytest.mark.parametrize("sizes", [[1] * L, [5, 1, 1, 1, 3], [L]], ids=["steps", "mixed", "whole"])


@chunks
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@torch.no_grad()
def test_a_decoder_layer_needs_the_memory_once(norm_first: bool, sizes: list[int]) -> None:
    layer, x, memory = decoder_layer(norm_first=norm_first).eval(), normal(B, L, E), normal(B, S, E)
    memory_mask = masks.lengths(torch.tensor([S, 4]))
    cache, calls = layer.make_cache(B, L), list[int]()
    layer.cross_attention.k_proj.register_forward_hook(lambda *_: calls.append(1))
    result = [
        layer(part, None if n % 3 else memory, mask=causal, memory_mask=memory_mask, cache=cache)
        for n, part in enumerate(x.split(sizes, 1))  # some later calls bring the memory again
    ]
    assert len(calls) == 1
    require_near(torch.cat(result, 1), layer(x, memory, mask=causal, memory_mask=memory_mask), 1e-13)
    assert (cache.length, cache.cross_attention.length) == (L, S)


@torch.no_grad()
def test_beams_are_reordered_in_every_layer() -> None:
    """Two sources, whose rows become two beams each and then change places."""
    stack, memory, history = decoder(), normal(B, S, E), normal(B, 3, E)
    caches = stack.make_cache(B, L)
    stack(history, memory, mask=causal, cache=caches)
    for order in ([0, 0, 1, 1], [1, 0, 3, 3], [0, 0, 2, 3]):
        for cache in caches:
            cache.reorder(torch.tensor(order))
        history, memory = history[order], memory[order]
        new = normal(4, 1, E)
        result = stack(new, None, mask=causal, cache=caches)
        history = torch.cat((history, new), 1)
        require_near(result, stack(history, memory, mask=causal)[:, -1:], 1e-13)


@torch.no_grad()
def test_rejected_tokens_are_cropped_and_the_memory_stays() -> None:
    stack, memory, x = decoder(), normal(B, S, E), normal(B, L, E)
    caches = stack.make_cache(B, L)
    stack(x[:, :5], memory, mask=causal, cache=caches)
    stack(normal(B, 4, E), None, mask=causal, cache=caches)
    for cache in caches:
        cache.crop(5)
    require_near(stack(x[:, 5:], None, mask=causal, cache=caches), stack(x, memory, mask=causal)[:, 5:], 1e-13)
    for cache in caches:
        cache.reset()
        assert (cache.length, cache.cross_attention.length) == (0, 0)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@torch.no_grad()
def test_left_padding_by_positions(kind: str) -> None:
    stack, memory = (encoder(), None) if kind == "encoder" else (decoder(), normal(B, S, E))
    x, padding = normal(B, L, E), 4
    positions = torch.arange(L).repeat(B, 1)
    positions[1] = (positions[1] - padding).clamp(min=-1)
    source = () if memory is None else (memory,)
    later = () if memory is None else (None,)
    alone = stack(x[1:, padding:], *(part[1:] for part in source), mask=causal)
    together = stack(x, *source, mask=causal, positions=positions)
    require_near(together[1:, padding:], alone, 1e-13)
    caches = stack.make_cache(B, L)
    prompt = stack(x[:, :6], *source, mask=causal, positions=positions[:, :6], cache=caches)
    steps = [
        stack(x[:, [n]], *later, mask=causal, cache=caches) for n in range(6, L)
    ]  # each row goes on from its own end
    require_near(torch.cat((prompt, *steps), 1)[1:, padding:], alone, 1e-13)


@torch.no_grad()
def test_weights_of_a_step_are_those_of_the_whole() -> None:
    stack, x, memory = decoder(), normal(B, L, E), normal(B, S, E)
    caches = stack.make_cache(B, L)
    stack(x[:, :-1], memory, mask=causal, cache=caches)
    _, weights = stack(x[:, -1:], None, mask=causal, cache=caches, need_weights=True)
    _, expected = stack(x, memory, mask=causal, need_weights=True)
    for result, whole in zip(weights, expected, strict=True):
        torch.testing.assert_close(result.self_attention, whole.self_attention[:, -1:])
        torch.testing.assert_close(result.cross_attention, whole.cross_attention[:, -1:])


def test_parts_hear_of_positions_and_caches_only_when_given() -> None:
    heard: list[dict[str, object]] = []

    class Listens(nn.Module):
        def forward(self, query: Tensor, memory: Tensor | None = None, **options: object) -> Tensor:
            heard.append(options)
            return query

    layer = Encoder([EncoderLayer(E, Listens(), nn.Identity())])
    x, cache = torch.randn(B, L, E), CrossKVCache()
    layer(x)
    layer(x, positions=3, cache=[cache])
    assert heard == [{"mask": None}, {"mask": None, "positions": 3, "cache": cache}]
    heard.clear()
    decoder = Decoder([DecoderLayer(E, Listens(), Listens(), nn.Identity())])
    decoder(x, x)
    decoder(x, x, positions=3, cache=[DecoderCache(cache, cache)])
    assert heard == [{"mask": None}] * 2 + [
        {"mask": None, "positions": 3, "cache": cache},
        {"mask": None, "cache": cache},
    ]


def test_swiglu_is_its_formula() -> None:
    part, x = SwiGLU(5, 7, bias=True, dtype=F64), normal(2, 3, 5)
    gate, up = (x @ linear.weight.T + linear.bias for linear in (part.gate_proj, part.up_proj))
    expected = (gate / (1 + torch.exp(-gate)) * up) @ part.down_proj.weight.T + part.down_proj.bias
    require_near(part(x), expected, 1e-13)
    assert [name for name, _ in SwiGLU(5, 7).named_parameters()] == [
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
    ]


BARE, MIXED = EncoderLayer(E, nn.Identity(), nn.Identity()), Encoder([encoder_layer(), nn.Identity()])
LAYER, STACK, X, MEMORY = decoder_layer().eval(), decoder(), normal(B, L, E), normal(B, S, E)
KV = KVCache(B, KV_HEADS, L, DIM)


def load_appended_keys() -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, 1)
    layer.self_attn = nn.MultiheadAttention(E, 1, add_bias_kv=True)
    return load(layer)


def decode(cache: Any) -> Tensor:
    return STACK(X, MEMORY, cache=cache)


REFUSED: list[tuple[Callable[[], Any], type[ClearheadError], str]] = [
    (lambda: encoder_layer()(X[..., 1:]), ShapeError, r"x: expected \(B, length, 13\), or .*got \(2, 11, 12\)"),
    (
        lambda: EncoderLayer(E, "words", nn.Identity()),
        DTypeError,
        "self_attention: expected a torch.nn.Module, got str",
    ),
    (lambda: Encoder([]), ArgumentError, "layers: expected at least one layer, got none"),
    (lambda: load(nn.Linear(2, 2)), DTypeError, "module: expected one of nn.TransformerEnc.*got Linear.*checkpoints"),
    (load_appended_keys, CheckpointError, ".*clearhead.nn.MultiheadAttention"),
    (lambda: LAYER(X), ArgumentError, "memory: expected the encoder's output.*got None, and no cache that holds it"),
    (lambda: LAYER(X, cache=LAYER.make_cache(B, L)), ArgumentError, "memory: .*The first call needs it"),
    (lambda: LAYER(X, MEMORY, cache=KV), DTypeError, "cache: expected a DecoderCache.*got KVCache.*make_cache"),
    (lambda: decode(LAYER.make_cache(B, L)), DTypeError, "cache: expected a list of .*per layer, got DecoderCache"),
    (lambda: decode(KV), DTypeError, "cache: expected a list of caches, one per layer, got KVCache"),
    (lambda: decode([LAYER.make_cache(B, L)]), ArgumentError, r"cache: expected one per layer, 3, got 1\."),
    (lambda: decode([LAYER.make_cache(B, L)] * LAYERS), ArgumentError, "cache: .*for every layer, got one cache twice"),
    (
        lambda: decode(STACK.make_cache(B, 5)),
        CacheError,
        "cache: .* at most max_length = 5 tokens, got 0 held and 11 mo",
    ),
    (
        lambda: decode(STACK.make_cache(3, L)),
        ShapeError,
        r"key: expected the cache's \(B, Hkv, L, D\) = \(3, 3, L, 4\)",
    ),
    (lambda: BARE.make_cache(B, L), DTypeError, "self_attention: expected an attention with make_cache.*got Identity"),
    (lambda: MIXED.make_cache(B, L), DTypeError, r"layers\[1\]: expected a layer with make_c.*got Identity.*per layer"),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
@torch.no_grad()
def test_what_does_not_fit(call: Callable[[], Any], error: type[ClearheadError], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        call()


# Layers and stacks take any attention, position, mask, norm, feed-forward part and cache that Clearhead has.


WINDOW = 5


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
    return randomised(Encoder(layers, norm=nn.LayerNorm(E)).to(F64))


def randomised(module: Any) -> Any:
    """Biases, sinks and norms start as constants; other values show that they count."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module.eval()


@attentions
@torch.no_grad()
def test_a_stack_of_any_attention_writes_step_by_step(attention: Callable[[], nn.Module]) -> None:
    model, x = stack(attention), normal(B, L, E)
    caches = model.make_cache(B, L)
    require_near(
        torch.cat([model(part, mask=causal, cache=caches) for part in x.split([4] + [1] * (L - 4), 1)], 1),
        model(x, mask=causal),
        1e-13,
    )


@attentions
def test_every_parameter_of_every_part_learns(attention: Callable[[], nn.Module]) -> None:
    model = stack(attention).train()
    model(normal(B, L, E), mask=causal).square().sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()] == []


@torch.no_grad()
def test_jagged_rows_are_what_each_is_alone() -> None:
    model, rows = stack(ATTENTIONS["rotary"]), [normal(length, E) for length in (3, 7, 1)]
    result = model(torch.nested.nested_tensor(rows, layout=torch.jagged), mask=causal)
    for one, row in zip(result.unbind(), rows, strict=True):
        require_near(one, model(row, mask=causal), 1e-13)


@torch.no_grad()
def test_a_step_of_a_stack_compiles_without_breaks_and_once_more_at_most() -> None:
    x, memory = normal(B, L, E), normal(B, S, E)
    parts = [(grouped(position=Rotary(DIM)), grouped(), SwiGLU(E, 17)) for _ in range(2)]
    model = randomised(Decoder(DecoderLayer(E, *layer) for layer in parts).to(F64))
    caches = model.make_cache(B, L)
    output, counts = compiled_steps(
        lambda token: model(token, None, mask=causal, cache=caches),
        x,
        lambda token: model(token, memory, mask=causal, cache=caches),
    )
    require_near(output, model(x, memory, mask=causal), 1e-13)
    assert counts[0] == 1
    assert counts[1] == counts[-1] <= 2
