"""T5: from decoder to encoder, and the bias that all layers share; its stacks are among the other architectures."""

from __future__ import annotations

import pytest
import torch
import transformers

from clearhead import masks
from clearhead.caches import CrossKVCache
from clearhead.checkpoints import from_transformers, layers_from_transformers

from .architectures import assert_close, marks, t5, token_ids, watching

CROSS, LAYERS = "decoder.block.{layer}.layer.1.EncDecAttention", (0, 1, 2)


@torch.no_grad()
def test_from_decoder_to_encoder() -> None:
    """In one call, and step by step with the encoder's keys and values projected once."""
    model, kept = t5(), marks("left")
    keys = masks.keep(keys=kept)
    memory = model.encoder(input_ids=token_ids(), attention_mask=kept)
    with watching(model, CROSS, CROSS, LAYERS) as seen:
        model(encoder_outputs=memory, attention_mask=kept, decoder_input_ids=token_ids()[:, :13])
    words = memory.last_hidden_state
    for layer in LAYERS:
        ours, cache = from_transformers(model, layer, part="cross"), CrossKVCache()
        assert (ours.mask, ours.position) == (None, None)
        x, expected = seen.x[layer][0], seen.output[layer][0]
        assert_close(ours(x, words, mask=keys), expected)
        assert_close(torch.cat([ours(step, words, mask=keys, cache=cache) for step in x.split(7, 1)], 1), expected)


@pytest.mark.parametrize(("part", "count"), [("encoder", 2), ("decoder", 3)])
def test_all_layers_have_one_bias_together(part: str, count: int) -> None:
    model = t5()
    layers = layers_from_transformers(model, part=part)
    assert len(layers) == count
    bias = layers[0].mask
    assert all(layer.mask is bias for layer in layers)
    theirs = getattr(model, part).block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert torch.equal(bias.weight, theirs)
    assert bias.weight is not theirs
    sum(layer(torch.randn(2, 5, 23)).sum() for layer in layers).backward()
    assert bias.weight.grad is not None
    assert "mask: RelativeBias(num_heads=5, num_buckets=8, max_distance=13" in str(layers[1].loaded_from)


def test_an_encoder_alone() -> None:
    model = transformers.T5EncoderModel(t5().config)
    ours = from_transformers(model, 1, part="encoder")
    assert torch.equal(ours.q_proj.weight, model.encoder.block[1].layer[0].SelfAttention.q.weight)
