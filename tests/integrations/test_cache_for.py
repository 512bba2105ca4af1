"""Small caches in the `generate` of transformers: what models give with them is what dense masks give."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from clearhead.integrations.transformers import cache_for
from tests.checkpoints.architectures import assert_close
from tests.integrations.decoders import (
    BUDGET,
    DECODERS,
    KINDS,
    NEW,
    PROMPT,
    SINKS,
    STEPS,
    TOTAL,
    Visible,
    batch,
    cache_of,
    cached_logits,
    dense_logits,
    generated,
    model_of,
    positions_of,
    prompt_of,
)


def compare_with_dense_mask(model: Any, kind: str, padding: str, window: int | None = None) -> Any:
    """A cache that is filled step by step; its logits are those under the dense mask of what it held."""
    ids, mask = batch(padding)
    cache, visible = cache_of(model, kind), Visible(model, mask, window)
    actual = cached_logits(model, cache, ids, mask, STEPS, visible)
    assert_close(actual[mask.bool()], dense_logits(model, ids, mask, visible.layers)[mask.bool()])
    if visible.windows[-1] is None:  # and something did go
        assert not torch.equal(visible.layers[-1][0, 0], torch.ones(TOTAL, TOTAL, dtype=torch.bool).tril())
    return cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "padding"), [*((n, "left") for n in DECODERS), ("llama", "none"), ("llama", "gaps")])
def test_a_model_gives_what_it_gives_under_the_dense_mask_of_what_is_held(name: str, kind: str, padding: str) -> None:
    for implementation in ("clearhead",) if kind == "heavy_hitters" else ("clearhead", "eager"):
        compare_with_dense_mask(model_of(name, implementation), kind, padding, KINDS[kind].get("window"))


@pytest.mark.parametrize("kind", ["heavy_hitters", "sinks_and_recent"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_layer_whose_own_window_is_wider_than_the_budget_evicts_what_the_window_has_passed(
    name: str, kind: str
) -> None:
    window = BUDGET + 3
    layer = compare_with_dense_mask(model_of(name, sliding_window=window), kind, "left").layers[0]
    assert layer.cache.positions.shape[-1] == layer.keys.shape[2] == layer.values.shape[2] == BUDGET
    assert int(layer.cache.positions[0].min()) > TOTAL - window


@torch.no_grad()
def test_heavy_hitters_are_the_keys_with_the_most_weight_in_the_prompt_and_the_latest() -> None:
    model, prompt = model_of("llama"), batch()[0][:, :PROMPT]
    cache = cache_for(model, "heavy_hitters", budget=BUDGET, recent=0.5)
    model(prompt, past_key_values=cache)
    for layer, weights in zip(cache.layers, model(prompt, output_attentions=True).attentions, strict=True):
        received = weights.sum(2).unflatten(1, (layer.keys.shape[1], -1)).sum(2)  # (B, Hkv, PROMPT)
        received[..., -BUDGET // 2 :] = torch.inf
        expected = received.topk(BUDGET).indices.sort(-1).values
        assert torch.equal(layer.cache.positions.sort(-1).values, expected)


SAMPLED = {"do_sample": True, "temperature": 1.3}
BEAMS = {"num_beams": 3, "num_return_sequences": 2}


@pytest.mark.parametrize(
    ("name", "options"),
    [*((n, {}) for n in [*DECODERS, "bloom", "t5"]), ("llama", SAMPLED), *((n, BEAMS) for n in ("gemma2", "t5"))],
    ids=str,
)
def test_everything_kept_gives_the_tokens_of_transformers_own_cache(name: str, options: dict[str, Any]) -> None:
    for implementation, max_length in (("eager", None), ("eager" if name == "bloom" else "clearhead", TOTAL)):
        model = model_of(name, implementation)
        inputs = prompt_of("left") | options
        # By itself `generate` gives T5's decoder as many layers as its encoder has.
        plain = (
            EncoderDecoderCache(DynamicCache(), DynamicCache()) if name == "t5" else DynamicCache(config=model.config)
        )
        actual = generated(model, cache_for(model, max_length=max_length), **inputs).sequences
        assert torch.equal(actual, generated(model, plain, **inputs).sequences)


def definition(kind: str, mask: Tensor) -> Tensor:
    """What a sliding window, or sinks and recent tokens, hold by their definition when single steps follow a prompt."""
    position = mask.cumsum(1) - 1
    distance = position[:, :, None] - position[:, None]
    visible = (distance >= 0) & mask.bool()[:, None] & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
    if kind == "sliding":
        return visible & (distance < KINDS[kind]["window"])
    visible[:, PROMPT:] &= ((distance <= BUDGET - SINKS) | (position[:, None] < SINKS))[:, PROMPT:]
    return visible


@pytest.mark.parametrize("kind", ["sliding", "sinks_and_recent"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "clearhead"])
def test_generated_logits_are_those_under_the_mask_of_the_definition(implementation: str, kind: str) -> None:
    model, inputs = model_of("llama", implementation), prompt_of("left")
    output = generated(model, cache_of(model, kind), **inputs)
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, NEW, dtype=torch.int64)), 1)
    visible = definition(kind, mask)[:, None].expand(-1, model.config.num_attention_heads, -1, -1)
    expected = dense_logits(model, output.sequences, mask, [visible] * model.config.num_hidden_layers)
    assert_close(torch.stack(output.logits, 1), expected[:, PROMPT - 1 : -1])


@pytest.mark.parametrize("kind", KINDS)
def test_beams_have_the_scores_of_their_tokens(kind: str) -> None:
    """A text of a beam, fed by itself, has the score that beam search gave it: its keys were those of its own past."""
    model, beams = model_of("llama"), {"num_beams": 5, "length_penalty": 0.0, "output_scores": True}
    output = generated(model, cache_of(model, kind), **prompt_of(), **beams)
    assert bool((output.beam_indices != output.beam_indices[:, :1]).any())  # rows did change places
    ids, cache = output.sequences, cache_of(model, kind)
    logits = cached_logits(model, cache, ids, torch.ones_like(ids), [PROMPT, *[1] * NEW])
    scores = logits.log_softmax(-1)[:, PROMPT - 1 : -1].gather(2, ids[:, PROMPT:, None])
    torch.testing.assert_close(output.sequences_scores, scores.sum((1, 2)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["full", *KINDS])
def test_a_chat_goes_on_where_it_ended(kind: str) -> None:
    model, (ids, _) = model_of("qwen3"), batch()
    cache, other = (cache_of(model, kind) for _ in range(2))
    first = generated(model, cache, input_ids=ids[:, :PROMPT], max_new_tokens=3).sequences
    said = torch.cat((first, ids[:, :5]), 1)
    pickled = pickle.loads(pickle.dumps(cache))
    output = generated(model, cache, input_ids=said)
    assert torch.equal(output.sequences, generated(model, pickled, input_ids=said).sequences)
    fed = output.sequences[:, :-1]
    steps = [PROMPT, 1, 1, 6, *[1] * (NEW - 1)]  # the last token of an answer comes with the next question
    logits = cached_logits(model, other, fed, torch.ones_like(fed), steps)
    assert_close(torch.stack(output.logits, 1), logits[:, said.shape[1] - 1 :])


@pytest.mark.parametrize("kind", ["full", *KINDS])
def test_rows_are_repeated_and_selected(kind: str) -> None:
    model, (ids, mask) = model_of("llama"), batch("left")
    cache = cache_of(model, kind)
    cached_logits(model, cache, ids, mask, [PROMPT])
    other, rows = copy.deepcopy(cache), torch.tensor([0, 0, 1, 1])
    cache.batch_repeat_interleave(2)
    other.batch_select_indices(torch.tensor([1]))
    repeated = cached_logits(model, cache, ids[rows], mask[rows], [NEW], start=PROMPT)
    assert_close(repeated[0::2], repeated[1::2])
    assert_close(cached_logits(model, other, ids[1:], mask[1:], [NEW], start=PROMPT), repeated[2:3])


@pytest.mark.parametrize("kind", ["full", *KINDS])
def test_a_cache_that_is_reset_begins_anew(kind: str) -> None:
    model, inputs = model_of("gemma2"), prompt_of("left")
    cache = cache_of(model, kind)
    first = generated(model, cache, **inputs).sequences
    cache.reset()
    assert cache.get_seq_length() == 0
    single = {name: tensor[:1] for name, tensor in inputs.items()}
    assert torch.equal(generated(model, cache, **single).sequences, first[:1])


@pytest.mark.parametrize("kind", ["full", "heavy_hitters"])
def test_a_prompt_of_embeddings(kind: str) -> None:
    model, inputs = model_of("llama"), prompt_of("left")
    expected = generated(model, cache_of(model, kind), **inputs).sequences[:, PROMPT:]
    embedded = {"inputs_embeds": model.model.embed_tokens(inputs.pop("input_ids")).detach(), **inputs}
    assert torch.equal(generated(model, cache_of(model, kind), **embedded).sequences, expected)


def test_weights_of_what_is_held_are_returned() -> None:
    model, (ids, mask) = model_of("llama"), batch("left")
    cache = cache_for(model, "heavy_hitters", budget=BUDGET)
    cached_logits(model, cache, ids, mask, [PROMPT])
    with torch.no_grad():
        output = model(ids[:, PROMPT:], attention_mask=mask, past_key_values=cache, output_attentions=True)
    for weights in output.attentions:
        assert weights.shape == (2, 6, NEW, BUDGET + NEW)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, NEW))


def test_a_model_goes_on_as_before_with_its_own_caches() -> None:
    model, inputs = model_of("gemma2"), prompt_of("left")
    before = generated(model, DynamicCache(config=model.config), **inputs).sequences
    for kind in (*KINDS, *KINDS):
        cache_of(model, kind)
    assert len(model.model._forward_pre_hooks) == len(model.model._forward_hooks) == 1
    assert torch.equal(generated(model, DynamicCache(config=model.config), **inputs).sequences, before)
    assert torch.equal(generated(copy.deepcopy(model), cache_for(model), **inputs).sequences, before)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["full", "sliding"])
@torch.no_grad()
def test_a_decoder_without_a_head_is_served_by_names_and_by_places(name: str, kind: str) -> None:
    model, (ids, mask) = model_of(name, "eager"), batch("left")
    expected, cache = (cache_of(each, kind) for each in (model, model.base_model))
    cached_logits(model, expected, ids, mask, [PROMPT, NEW])
    for start, stop in ((0, PROMPT), (PROMPT, TOTAL)):
        new, so_far, positions = ids[:, start:stop], mask[:, :stop], positions_of(mask)[:, start:stop]
        if name == "llama":
            model.base_model(new, so_far, positions, cache)
        else:
            model.base_model(new, cache, attention_mask=so_far, position_ids=positions)
    assert_close(cache.layers[-1].keys, expected.layers[-1].keys)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_model_inside_peft_is_served() -> None:
    peft = pytest.importorskip("peft")
    model, inputs, kind = model_of("llama"), prompt_of("left"), "sinks_and_recent"
    expected = generated(model, cache_of(model, kind), **inputs).sequences
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    actual = generated(wrapped, cache_of(wrapped, kind), **inputs).sequences
    assert torch.equal(actual, expected)  # new adapters change nothing


@pytest.mark.parametrize(
    ("kind", "settings"), [("full", {}), ("sliding", {"window": 64}), ("heavy_hitters", {"budget": 64})]
)
def test_under_autocast(kind: str, settings: dict[str, Any]) -> None:
    """Rotary positions leave keys in float32 there, and values in bfloat16."""
    model, inputs = model_of("llama", "clearhead" if kind == "heavy_hitters" else "sdpa"), prompt_of()
    with torch.autocast("cpu", torch.bfloat16):
        expected = generated(model, DynamicCache(config=model.config), **inputs).sequences
        assert torch.equal(generated(model, cache_for(model, kind, **settings), **inputs).sequences, expected)
