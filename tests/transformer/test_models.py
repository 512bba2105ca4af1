"""Whole models of transformers, built from Clearhead's layers: every number, in one pass, padded and step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from clearhead import checkpoints, masks
from clearhead.transformer import Encoder, EncoderLayer, SwiGLU

pytest.importorskip("transformers", reason="the models to compare with are transformers'")
from tests.checkpoints import architectures
from tests.checkpoints.architectures import PROMPT, VOCABULARY, B, L, assert_close, marks, positions_of

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


def decoder_only(theirs: Any) -> Encoder:
    """Llama, Mistral or Qwen3: they differ in their attention alone."""

    def layer(own: Any, attention: nn.Module) -> EncoderLayer:
        feed_forward = SwiGLU(size, own.mlp.gate_proj.out_features)
        feed_forward.load_state_dict(own.mlp.state_dict())
        parts = norms(own.input_layernorm, own.post_attention_layernorm)
        return EncoderLayer(size, attention, feed_forward, norm=parts, norm_first=True)

    size, attentions = theirs.config.hidden_size, checkpoints.layers_from_transformers(theirs)
    return Encoder(map(layer, theirs.layers, attentions), norm=rms_norm(theirs.norm)).eval()


@pytest.fixture(name="pair", params=["llama", "mistral", "qwen3"])
def _pair(request: pytest.FixtureRequest) -> tuple[Any, Encoder]:
    theirs = architectures.CASES[request.param].model()
    return theirs, decoder_only(theirs)


@torch.no_grad()
def test_a_decoder_only_model_step_by_step(pair: tuple[Any, Encoder]) -> None:
    theirs, ours = pair
    tokens = torch.randint(VOCABULARY, (B, L))
    x, caches = theirs.embed_tokens(tokens), ours.make_cache(B, L)
    result = [ours(part, mask=causal, cache=caches) for part in x.split([PROMPT] + [1] * (L - PROMPT), 1)]
    assert_close(torch.cat(result, 1), theirs(input_ids=tokens, use_cache=False).last_hidden_state)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_padded_batch(pair: tuple[Any, Encoder], side: str) -> None:
    theirs, ours = pair
    tokens, attention_mask = torch.randint(VOCABULARY, (B, L)), marks(side)
    positions = positions_of(attention_mask)
    expected = theirs(
        input_ids=tokens, attention_mask=attention_mask, position_ids=positions.clamp(min=0), use_cache=False
    ).last_hidden_state
    result = ours(theirs.embed_tokens(tokens), mask=causal, positions=positions)
    real = attention_mask.bool()
    assert_close(result[real], expected[real])
