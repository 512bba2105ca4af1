"""The three attentions of T5: encoder, decoder, and from decoder to encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from clearhead import masks
from clearhead.caches import CrossKVCache
from clearhead.checkpoints import from_transformers, layers_from_transformers
from clearhead.masks import Mask

from .architectures import PROMPT, B, L, assert_close, marks, positions_of, t5, token_ids, watching

#: Where an attention is, and how many layers have it.
PLACES = {
    "encoder": ("encoder.block.{layer}.layer.0.SelfAttention", (0, 1)),
    "decoder": ("decoder.block.{layer}.layer.0.SelfAttention", (0, 1, 2)),
    "cross": ("decoder.block.{layer}.layer.1.EncDecAttention", (0, 1, 2)),
}
#: Another number of decoder tokens than of encoder tokens.
WRITTEN = 13


def written_ids() -> Tensor:
    return token_ids()[:, :WRITTEN]


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_the_encoder(side: str | None) -> None:
    model, (name, layers) = t5(), PLACES["encoder"]
    kept = torch.ones(B, L).long() if side is None else marks(side)
    with watching(model, name, name, layers) as seen:
        model.encoder(input_ids=token_ids(), attention_mask=kept)
    real, given = kept.bool(), None if side is None else positions_of(kept)
    for layer in layers:
        ours = from_transformers(model, layer, part="encoder")
        x = seen.x[layer][0].masked_fill(~real[..., None], torch.nan)
        with torch.no_grad():
            assert_close(ours(x, positions=given)[real], seen.output[layer][0][real])


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_the_decoder(side: str | None) -> None:
    model, (name, layers) = t5(), PLACES["decoder"]
    kept = torch.ones(B, L).long() if side is None else marks(side)
    with watching(model, name, name, layers) as seen:
        model(input_ids=written_ids(), decoder_input_ids=token_ids(), decoder_attention_mask=kept)
    real, given = kept.bool(), None if side is None else positions_of(kept)
    for layer in layers:
        ours = from_transformers(model, layer, part="decoder")
        x = seen.x[layer][0].masked_fill(~real[..., None], torch.nan)
        with torch.no_grad():
            assert_close(ours(x, mask=masks.causal(), positions=given)[real], seen.output[layer][0][real])


@pytest.mark.parametrize("left", [False, True])
def test_the_decoder_step_by_step(left: bool) -> None:
    model, (name, layers) = t5(), PLACES["decoder"]
    kept = torch.ones(B, L).long()
    if left:
        kept[1, :2], kept[2, :5] = 0, 0
    ids, past = token_ids(), None
    with watching(model, name, name, layers) as seen:
        memory = model.encoder(input_ids=written_ids())
        for start, stop in [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, L))]:
            told: dict[str, Any] = {"decoder_attention_mask": kept[:, :stop]} if left else {}
            result = model(
                encoder_outputs=memory,
                decoder_input_ids=ids[:, start:stop],
                past_key_values=past,
                use_cache=True,
                **told,
            )
            past = result.past_key_values
    for layer in layers:
        ours = from_transformers(model, layer, part="decoder")
        cache = ours.make_cache(B, L)
        given, real = positions_of(kept[:, :PROMPT]) if left else None, kept[:, :PROMPT].bool()
        first, *steps = zip(seen.x[layer], seen.output[layer], strict=True)
        with torch.no_grad():
            output = ours(first[0], mask=masks.causal(), cache=cache, positions=given)
            assert_close(output[real], first[1][real])
            for x, expected in steps:
                assert_close(ours(x, mask=masks.causal(), cache=cache), expected)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_from_decoder_to_encoder(side: str | None) -> None:
    """In one call, and step by step with the encoder's keys and values projected once."""
    model, (name, layers) = t5(), PLACES["cross"]
    kept = torch.ones(B, L).long() if side is None else marks(side)
    keys: Mask | None = None if side is None else masks.keep(keys=kept)
    ids, past = written_ids(), None
    with torch.no_grad():
        memory = model.encoder(input_ids=token_ids(), attention_mask=kept)
    with watching(model, name, name, layers) as whole:
        model(encoder_outputs=memory, attention_mask=kept, decoder_input_ids=ids)
    with watching(model, name, name, layers) as stepped:
        for start, stop in [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, WRITTEN))]:
            result = model(
                encoder_outputs=memory,
                attention_mask=kept,
                decoder_input_ids=ids[:, start:stop],
                past_key_values=past,
                use_cache=True,
            )
            past = result.past_key_values
    words = memory.last_hidden_state
    for layer in layers:
        ours = from_transformers(model, layer, part="cross")
        assert (ours.mask, ours.position) == (None, None)
        with torch.no_grad():
            assert_close(ours(whole.x[layer][0], words, mask=keys), whole.output[layer][0])
            cache = CrossKVCache()
            first, *steps = zip(stepped.x[layer], stepped.output[layer], strict=True)
            assert_close(ours(first[0], words, mask=keys, cache=cache), first[1])
            for x, expected in steps:
                assert_close(ours(x, mask=keys, cache=cache), expected)


@pytest.mark.parametrize(("part", "count"), [("encoder", 2), ("decoder", 3)])
def test_all_layers_have_one_bias_together(part: str, count: int) -> None:
    model = t5()
    layers = layers_from_transformers(model, part=part)
    assert len(layers) == count
    bias = layers[0].mask
    assert all(layer.mask is bias for layer in layers)
    stack = getattr(model, part)
    theirs = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert torch.equal(bias.weight, theirs)
    assert bias.weight is not theirs
    total = sum(layer(torch.randn(2, 5, 23)).sum() for layer in layers)
    total.backward()
    assert bias.weight.grad is not None
    assert "mask: RelativeBias(num_heads=5, num_buckets=8, max_distance=13" in str(layers[1].loaded_from)


def test_an_encoder_alone() -> None:
    config = t5().config
    model = transformers.T5EncoderModel(config)
    ours = from_transformers(model, 1, part="encoder")
    assert torch.equal(ours.q_proj.weight, model.encoder.block[1].layer[0].SelfAttention.q.weight)
