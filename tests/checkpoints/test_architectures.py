"""Attention of transformers' models from their weights and configurations: theirs and ours on the same inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from clearhead import MultiHeadAttention, MultiHeadLatentAttention, masks
from clearhead.caches import CrossKVCache
from clearhead.checkpoints import from_transformers, layers_from_transformers

from .architectures import (
    CASES,
    DEEPSEEK,
    PROMPT,
    TYPICAL,
    WINDOW,
    B,
    Case,
    L,
    Seen,
    assert_close,
    deepseek,
    marks,
    positions_of,
    t5,
    token_ids,
    watching,
)


@torch.no_grad()
def compare(case: Case, model: nn.Module) -> None:
    """Every layer on a whole batch."""
    seen = case.run(model, input_ids=token_ids())
    for layer in case.layers:
        ours = case.load(model, layer)
        assert isinstance(ours, MultiHeadLatentAttention if "Deepseek" in case.stem else MultiHeadAttention)
        assert_close(ours(seen.x[layer][0], mask=case.mask), seen.output[layer][0])


@pytest.mark.parametrize("name", CASES)
def test_a_whole_batch(name: str) -> None:
    compare(CASES[name], CASES[name].model())


@pytest.mark.parametrize("name", ["afmoe", "qwen3_next", "qwen3_5"])
def test_gradients_through_a_gate(name: str) -> None:
    case = CASES[name]
    model = case.model()
    for layer in case.layers:
        theirs, ours = model.layers[layer].self_attn, case.load(model, layer)
        x = torch.randn(B, L, ours.embed_dim, requires_grad=True)
        at = torch.arange(L)[None]
        hidden = torch.full((L, L), -torch.inf).triu(1)
        if layer in case.windowed:
            hidden = hidden + torch.full((L, L), -torch.inf).tril(-WINDOW)
        expected, _ = theirs(x, position_embeddings=model.rotary_emb(x, at), attention_mask=hidden[None, None])
        upstream, output = torch.randn(B, L, ours.embed_dim), ours(x, mask=case.mask)
        (of_theirs, k_theirs), (of_ours, k_ours) = (
            torch.autograd.grad((y * upstream).sum(), (x, module.k_proj.weight))
            for module, y in ((theirs, expected), (ours, output))
        )
        for found, other in ((output, expected), (of_ours, of_theirs), (k_ours, k_theirs)):
            assert_close(found, other)


@pytest.mark.parametrize(("side", "told_by"), [("left", "positions"), ("right", "mask")])
@pytest.mark.parametrize("name", TYPICAL)
@torch.no_grad()
def test_a_padded_batch(name: str, side: str, told_by: str) -> None:
    case, kept = CASES[name], marks(side)
    model, real = case.model(), kept.bool()
    told = {"position_ids": positions_of(kept).clamp(min=0)} if case.takes_positions else {}
    seen = case.run(model, input_ids=token_ids(), attention_mask=kept, **told)
    for layer in case.layers:
        ours, x = case.load(model, layer), seen.x[layer][0]
        if told_by == "positions":
            x = x.masked_fill(~real[..., None], torch.nan)  # whatever stands in padding
            output = ours(x, mask=case.mask, positions=positions_of(kept))
        else:
            keys = masks.keep(keys=kept)
            output = ours(x, mask=keys if case.mask is None else keys & case.mask)
        assert_close(output[real], seen.output[layer][0][real])


def decode(name: str, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[nn.Module, Seen]:
    """Their model: a prompt, then one token after the other with its cache."""
    case = CASES[name]
    model, past = case.model(), None
    with case.watching(model) as seen:
        for start, stop in [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, L))]:
            told = {}
            if attention_mask is not None:
                told["attention_mask"] = attention_mask[:, :stop]
                if case.takes_positions:
                    told["position_ids"] = positions_of(attention_mask)[:, start:stop].clamp(min=0)
            result = model(input_ids=ids[:, start:stop], past_key_values=past, use_cache=True, **told)
            past = result.past_key_values
    return model, seen


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [name for name in TYPICAL if CASES[name].causal])
@torch.no_grad()
def test_step_by_step(name: str, padded: bool) -> None:
    """A windowed layer works with every cache: what slides is the layer's mask, or the cache itself."""
    case, kept = CASES[name], marks("left")
    kept[:, PROMPT - 1 :] = 1  # padding ends within the prompt
    model, seen = decode(name, token_ids(), kept if padded else None)
    prompt = kept[:, :PROMPT] if padded else torch.ones(B, PROMPT).long()
    for layer in case.layers:
        ours = case.load(model, layer)
        cache = case.cache(ours, layer) if padded else ours.make_cache(B, L)
        first, *steps = zip(seen.x[layer], seen.output[layer], strict=True)
        x = first[0].masked_fill(prompt[..., None] == 0, torch.nan)
        output = ours(x, mask=masks.causal(), cache=cache, positions=positions_of(prompt) if padded else None)
        assert_close(output[prompt.bool()], first[1][prompt.bool()])
        for x, expected in steps:
            assert_close(ours(x, mask=masks.causal(), cache=cache), expected)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        # Dynamic scaling is measured against the longest context of the configuration, here less than the batch's.
        ("llama", {"max_position_embeddings": 7, "rope_parameters": DYNAMIC}),
        *(("gpt2", {"scale_attn_weights": on, "scale_attn_by_inverse_layer_idx": on}) for on in (False, True)),
        ("gpt2", {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}),
        *(("bloom", {"hidden_size": 56, "n_head": heads}) for heads in (1, 2, 7, 8)),
    ],
    ids=str,
)
def test_other_settings(name: str, settings: dict[str, Any]) -> None:
    case = CASES[name]
    compare(case, Case(case.stem, case.options | settings, case.x, case.output).model())


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


def test_what_was_read_of_latent_attention_is_told() -> None:
    text = str(from_transformers(deepseek("halves, biases"), 1).loaded_from)
    for part in ("deepseek_v3", "'layers.1.self_attn.'", "kv_b_proj.weight", "position: Rotary", "dropout: 0.1"):
        assert part in text


def test_yarns_factor_may_follow_from_the_lengths() -> None:
    """DeepSeek's own files leave it out now and then; 64 / 16 positions make a factor of 4."""
    model = deepseek("low-rank queries")

    def scale(rope: dict[str, Any]) -> float | None:
        ours = from_transformers(
            model, 0, config=SimpleNamespace(**(model.config.to_dict() | {"rope_parameters": rope}))
        )
        assert isinstance(ours, MultiHeadLatentAttention)
        return ours.scale

    told = DEEPSEEK["yarn"]["rope_parameters"] | {"factor": 4.0}
    left_out = {name: value for name, value in told.items() if name != "factor"}
    assert scale(left_out) == scale(told) > 13**-0.5
