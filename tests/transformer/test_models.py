"""Whole models of transformers, built from Clearhead's layers: every number, in one pass, padded and step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import checkpoints, masks

pytest.importorskip("transformers", reason="the models to compare with are transformers'")
from tests.checkpoints import architectures
from tests.checkpoints.architectures import PROMPT, VOCABULARY, B, L, assert_close, marks, positions_of

S = 13
causal = masks.causal()


def rms_norm(like: nn.Module) -> nn.RMSNorm:
    """PyTorch's norm with the weight and epsilon of one of transformers'."""
    norm = nn.RMSNorm(like.weight.shape[0], eps=like.variance_epsilon)
    norm.load_state_dict(like.state_dict())
    return norm


def norms(*likes: nn.Module) -> Any:
    """What a layer makes its norms with: copies of these, in order."""
    made = iter([rms_norm(like) for like in likes])
    return lambda _: next(made)


def decoder_only(theirs: Any) -> clearhead.Encoder:
    """Llama, Mistral or Qwen3: they differ in their attention alone."""

    def layer(own: Any, attention: nn.Module) -> clearhead.EncoderLayer:
        feed_forward = clearhead.SwiGLU(size, own.mlp.gate_proj.out_features)
        feed_forward.load_state_dict(own.mlp.state_dict())
        parts = norms(own.input_layernorm, own.post_attention_layernorm)
        return clearhead.EncoderLayer(size, attention, feed_forward, norm=parts, norm_first=True)

    size, attentions = theirs.config.hidden_size, checkpoints.layers_from_transformers(theirs)
    return clearhead.Encoder(map(layer, theirs.layers, attentions), norm=rms_norm(theirs.norm)).eval()


@pytest.fixture(name="pair", params=["llama", "mistral", "qwen3"])
def _pair(request: pytest.FixtureRequest) -> tuple[Any, clearhead.Encoder]:
    theirs = architectures.CASES[request.param].model()
    return theirs, decoder_only(theirs)


@torch.no_grad()
def test_a_decoder_only_model_in_one_pass(pair: tuple[Any, clearhead.Encoder]) -> None:
    theirs, ours = pair
    tokens = torch.randint(VOCABULARY, (B, L))
    expected = theirs(input_ids=tokens, use_cache=False).last_hidden_state
    assert_close(ours(theirs.embed_tokens(tokens), mask=causal), expected)


@torch.no_grad()
def test_a_decoder_only_model_step_by_step(pair: tuple[Any, clearhead.Encoder]) -> None:
    theirs, ours = pair
    tokens = torch.randint(VOCABULARY, (B, L))
    x, caches = theirs.embed_tokens(tokens), ours.make_cache(B, L)
    found = [ours(part, mask=causal, cache=caches) for part in x.split([PROMPT] + [1] * (L - PROMPT), 1)]
    assert_close(torch.cat(found, 1), theirs(input_ids=tokens, use_cache=False).last_hidden_state)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_padded_batch(pair: tuple[Any, clearhead.Encoder], side: str) -> None:
    theirs, ours = pair
    tokens, attention_mask = torch.randint(VOCABULARY, (B, L)), marks(side)
    positions = positions_of(attention_mask)
    expected = theirs(
        input_ids=tokens, attention_mask=attention_mask, position_ids=positions.clamp(min=0), use_cache=False
    ).last_hidden_state
    found = ours(theirs.embed_tokens(tokens), mask=causal, positions=positions)
    real = attention_mask.bool()
    assert_close(found[real], expected[real])


def feed_forward(own: Any) -> clearhead.FeedForward:
    found = clearhead.FeedForward(own.wi.in_features, own.wi.out_features, bias=False)
    found.linear1.load_state_dict(own.wi.state_dict())
    found.linear2.load_state_dict(own.wo.state_dict())
    return found


def t5(theirs: Any) -> tuple[clearhead.Encoder, clearhead.Decoder]:
    size = theirs.config.d_model
    own, written, cross = (
        checkpoints.layers_from_transformers(theirs, part=part) for part in ("encoder", "decoder", "cross")
    )
    encoder = [
        clearhead.EncoderLayer(
            size,
            attention,
            feed_forward(last.DenseReluDense),
            norm=norms(first.layer_norm, last.layer_norm),
            norm_first=True,
        )
        for (first, last), attention in zip((block.layer for block in theirs.encoder.block), own, strict=True)
    ]
    decoder = [
        clearhead.DecoderLayer(
            size,
            *attentions,
            feed_forward(layers[2].DenseReluDense),
            norm=norms(*(one.layer_norm for one in layers)),
            norm_first=True,
        )
        for layers, *attentions in zip((block.layer for block in theirs.decoder.block), written, cross, strict=True)
    ]
    return (
        clearhead.Encoder(encoder, norm=rms_norm(theirs.encoder.final_layer_norm)).eval(),
        clearhead.Decoder(decoder, norm=rms_norm(theirs.decoder.final_layer_norm)).eval(),
    )


@torch.no_grad()
def test_t5_reads_and_writes() -> None:
    theirs = architectures.t5()
    encoder, decoder = t5(theirs)
    source, target = torch.randint(VOCABULARY, (B, S)), torch.randint(VOCABULARY, (B, L))
    visible = torch.arange(S) < torch.tensor([S, 7, 5])[:, None]
    expected = theirs(input_ids=source, attention_mask=visible.long(), decoder_input_ids=target, use_cache=False)
    padding = masks.keep(keys=visible)
    memory = encoder(theirs.shared(source), mask=padding)
    assert_close(memory[visible], expected.encoder_last_hidden_state[visible])
    x = theirs.shared(target)
    assert_close(decoder(x, memory, mask=causal, memory_mask=padding), expected.last_hidden_state)
    caches, found = decoder.make_cache(B, L), list[Tensor]()
    for n, part in enumerate(x.split([PROMPT] + [1] * (L - PROMPT), 1)):
        found.append(decoder(part, None if n else memory, mask=causal, memory_mask=padding, cache=caches))
    assert_close(torch.cat(found, 1), expected.last_hidden_state)
