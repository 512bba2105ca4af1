"""What a type checker sees of a call of a module is what the call returns. Pyright reads this file, too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, assert_type, cast, get_overloads, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.transformer import Decoder, DecoderLayer, DecoderWeights, Encoder, EncoderLayer, FeedForward, SwiGLU

E, H, L, S = 12, 3, 5, 7


def tokens(length: int = L) -> Tensor:
    return torch.randn(2, length, E)


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention(need_weights: bool) -> None:
    attend, x, memory = clearhead.MultiHeadAttention(E, H), tokens(), tokens(S)
    assert assert_type(attend(x), Tensor).shape == x.shape
    output, weights = assert_type(attend(x, memory, need_weights=True), tuple[Tensor, Tensor])
    assert (output.shape, weights.shape) == (x.shape, (2, L, S))
    found = assert_type(attend(x, need_weights=need_weights), Tensor | tuple[Tensor, Tensor])
    assert isinstance(found, tuple) == need_weights


def test_latent_attention_and_the_drop_in() -> None:
    x = tokens()
    latent = clearhead.MultiHeadLatentAttention(
        E, H, kv_lora_rank=7, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5, mask=clearhead.masks.causal()
    )
    assert assert_type(latent(x), Tensor).shape == x.shape
    assert len(assert_type(latent(x, need_weights=True), tuple[Tensor, Tensor])) == 2
    drop_in = clearhead.nn.MultiheadAttention(E, H, batch_first=True)
    output, weights = assert_type(drop_in(x, x, x, need_weights=False), tuple[Tensor, Tensor | None])
    assert output.shape == x.shape
    assert weights is None


def encoder_layer() -> EncoderLayer:
    return EncoderLayer(E, clearhead.MultiHeadAttention(E, H), FeedForward(E, 2 * E))


def decoder_layer() -> DecoderLayer:
    attentions = (clearhead.MultiHeadAttention(E, H) for _ in range(2))
    return DecoderLayer(E, *attentions, feed_forward=SwiGLU(E, 2 * E))


def test_layers_and_stacks() -> None:
    x, memory = tokens(), tokens(S)
    layer, encoder = encoder_layer(), Encoder([encoder_layer()])
    assert assert_type(layer(x), Tensor).shape == x.shape
    assert assert_type(layer(x, need_weights=True), tuple[Tensor, Tensor])[1].shape == (2, L, L)
    assert assert_type(encoder(x, need_weights=True), tuple[Tensor, list[Tensor]])[1][0].shape == (2, L, L)
    layer, decoder = decoder_layer(), Decoder([decoder_layer()])
    assert assert_type(layer(x, memory), Tensor).shape == x.shape
    _, weights = assert_type(layer(x, memory, need_weights=True), tuple[Tensor, DecoderWeights])
    assert assert_type(weights.cross_attention, Tensor).shape == (2, L, S)
    assert len(assert_type(decoder(x, memory, need_weights=True), tuple[Tensor, list[DecoderWeights]])[1]) == 1


def test_parts() -> None:
    x, q = tokens(), torch.randn(2, H, L, 4)
    assert assert_type(clearhead.nn.Linear(E, 5)(x), Tensor).shape == (2, L, 5)
    assert assert_type(FeedForward(E, 5)(x), Tensor).shape == assert_type(SwiGLU(E, 5)(x), Tensor).shape == x.shape
    rotated = assert_type(clearhead.positions.Rotary(4)(q, q, 0), tuple[Tensor, Tensor])
    assert [each.shape for each in rotated] == [q.shape, q.shape]


def test_the_calls_of_a_record() -> None:
    attend = clearhead.MultiHeadAttention(E, H)
    with clearhead.record(attend) as rec:
        attend(tokens())
    (name, calls), *_ = rec.items()
    assert [found.num_heads for found in rec.values()] == [calls.num_heads] == [H]
    assert assert_type(name, str) == ""


def typed_modules() -> list[type[nn.Module]]:
    """Every public module."""
    names = clearhead, clearhead.nn, clearhead.positions, clearhead.transformer
    found = {getattr(module, name) for module in names for name in module.__all__}
    modules = [each for each in found if inspect.isclass(each) and issubclass(each, nn.Module)]
    return sorted((each for each in modules if each.forward is not nn.Module.forward), key=lambda each: each.__name__)


@pytest.mark.parametrize("module", typed_modules())
def test_a_typed_call_has_the_parameters_of_forward(module: type[nn.Module]) -> None:
    typed = get_type_hints(module)["__call__"]
    protocol = getattr(typed, "__origin__", typed)
    name = SimpleNamespace(__module__=protocol.__module__, __qualname__=f"{protocol.__qualname__}.__call__")
    variants: list[Callable[..., Any]] = [*get_overloads(cast(Any, name))] or [protocol.__call__]
    forward = inspect.signature(module.forward).parameters
    for variant in variants:
        parameters = inspect.signature(variant).parameters
        assert list(parameters) == list(forward)
        for name in parameters.keys() - {"need_weights"}:  # whose value tells the overloads apart
            expected, found = forward[name], parameters[name]
            assert (found.kind, found.default) == (expected.kind, expected.default), name
