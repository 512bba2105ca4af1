"""Layers and stacks: PyTorch's numbers from PyTorch's weights, parts injected, weights passed through."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.transformer import Decoder, DecoderLayer, EncoderLayer, FeedForward, load_transformer

from .test_caches import randomised

E, H, L, S, B = 12, 3, 5, 7, 2


def encoder_layer(**options: object) -> EncoderLayer:
    attention = clearhead.MultiHeadAttention(E, H)
    return EncoderLayer(E, attention, FeedForward(E, 4 * E), **options)


def decoder_layer(**options: object) -> DecoderLayer:
    attention = [clearhead.MultiHeadAttention(E, H) for _ in range(2)]
    return DecoderLayer(E, *attention, FeedForward(E, 4 * E), **options)


variants = pytest.mark.parametrize(
    "options",
    [
        {"layer_norm_eps": 1e-2},
        {"norm_first": True, "activation": nn.functional.silu, "bias": False},
        {"activation": "gelu"},
    ],
    ids=["post-norm ReLU, eps", "pre-norm SiLU no bias", "GELU"],
)
dtypes = pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
HIDDEN = torch.ones(L, L, dtype=torch.bool).triu(1)


@variants
@dtypes
@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_layer_equals_pytorchs(
    options: dict[str, object], dtype: torch.dtype, atol: float, batch_first: bool
) -> None:
    theirs = randomised(nn.TransformerEncoderLayer(E, H, 4 * E, batch_first=batch_first, dtype=dtype, **options))
    ours = load_transformer(theirs)
    x = torch.randn(B, L, E, dtype=dtype)
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[1, 3:] = True
    inputs = x if batch_first else x.transpose(0, 1)
    expected = theirs(inputs, src_mask=HIDDEN, src_key_padding_mask=padding)
    result = ours(x, mask=masks.causal() & masks.drop(keys=padding))
    torch.testing.assert_close(result, expected if batch_first else expected.transpose(0, 1), rtol=0, atol=atol)


@variants
@dtypes
def test_a_decoder_layer_equals_pytorchs(options: dict[str, object], dtype: torch.dtype, atol: float) -> None:
    theirs = randomised(nn.TransformerDecoderLayer(E, H, 4 * E, batch_first=True, dtype=dtype, **options))
    ours = load_transformer(theirs)
    x, memory = torch.randn(B, L, E, dtype=dtype), torch.randn(B, S, E, dtype=dtype)
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, 4:] = True
    expected = theirs(x, memory, tgt_mask=HIDDEN, memory_key_padding_mask=padding)
    result = ours(x, memory, mask=masks.causal(), memory_mask=masks.drop(keys=padding))
    torch.testing.assert_close(result, expected, rtol=0, atol=atol)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_stacks_equal_pytorchs() -> None:
    model = randomised(nn.Transformer(E, H, 2, 3, 4 * E, batch_first=True, dtype=torch.float64))
    encoder, decoder = (load_transformer(model.encoder), load_transformer(model.decoder))
    source, target = torch.randn(B, S, E, dtype=torch.float64), torch.randn(B, L, E, dtype=torch.float64)
    expected = model(source, target, tgt_mask=HIDDEN)
    torch.testing.assert_close(decoder(target, encoder(source), mask=masks.causal()), expected, rtol=0, atol=1e-10)


def test_loading_keeps_dropout_mode_and_copies_weights() -> None:
    theirs = nn.TransformerEncoderLayer(E, H, 4 * E, dropout=0.3, batch_first=True)
    ours = load_transformer(theirs)
    assert (ours.dropout.p, ours.feed_forward.dropout.p, ours.self_attention.dropout) == (0.3, 0.3, 0.3)
    assert ours.training
    assert not load_transformer(theirs.eval()).training
    before = theirs.linear1.weight.clone()
    with torch.no_grad():
        ours.feed_forward.linear1.weight.zero_()
    assert torch.equal(theirs.linear1.weight, before)


def test_weights_of_both_attentions_are_passed_through() -> None:
    x, memory = torch.randn(B, L, E), torch.randn(B, S, E)
    _, (own, cross) = decoder_layer()(x, memory, need_weights=True, average_attn_weights=False)
    assert (own.shape, cross.shape) == ((B, H, L, L), (B, H, L, S))
    _, pairs = Decoder(decoder_layer() for _ in range(2))(x, memory, need_weights=True)
    assert [tuple(pair.cross_attention.shape) for pair in pairs] == [(B, L, S)] * 2


def test_any_attention_norm_and_feed_forward_can_be_put_in() -> None:
    class Mean(nn.Module):
        def forward(
            self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, mask: object = None
        ) -> Tensor:
            return (query if key is None else key).mean(-2, keepdim=True).expand_as(query)

    norm = partial(nn.RMSNorm, eps=1e-6)
    layer = EncoderLayer(E, Mean(), nn.Linear(E, E), norm=norm, norm_first=True)
    assert isinstance(layer.norm1, nn.RMSNorm)
    x = torch.randn(B, L, E)
    y = x + layer.norm1(x).mean(-2, keepdim=True)
    torch.testing.assert_close(layer(x), y + layer.feed_forward(layer.norm2(y)))


def test_unbatched_inputs() -> None:
    layer, x = encoder_layer().eval(), torch.randn(L, E)
    torch.testing.assert_close(layer(x), layer(x[None])[0])


def test_dropout_acts_in_training_only() -> None:
    layer, x = encoder_layer(dropout=0.5), torch.randn(B, L, E)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
