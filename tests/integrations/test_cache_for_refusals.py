"""What `cache_for` and its caches refuse, and what they are then left as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from clearhead.errors import ArgumentError, CacheError, ClearheadError, DTypeError, ShapeError
from clearhead.integrations.transformers import cache_for
from tests.checkpoints.architectures import CASES, assert_close
from tests.integrations.decoders import (
    KINDS,
    PROMPT,
    STEPS,
    TOTAL,
    batch,
    cache_of,
    cached_logits,
    generated,
    model_of,
    prompt_of,
)


def state(model: Any) -> tuple[Any, ...]:
    hooks = [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()]
    return hooks, model.config._attn_implementation, sorted(vars(model))


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        ("heavy_hitters", {"budget": 9, "max_length": 64}, ArgumentError, "max_length: expected nothing"),
        ("heavy_hitters", {"budget": 9, "sinks": 1}, ArgumentError, "sinks: expected nothing"),
        ("sinks_and_recent", {}, DTypeError, "budget: expected an int ≥ 1, got None"),
        ("sinks_and_recent", {"budget": 4}, ArgumentError, "sinks: expected fewer than budget=4"),
        ("sinks_and_recent", {"budget": 9, "recent": 0.25}, ArgumentError, "recent: expected nothing"),
        ("sliding", {}, DTypeError, "window: expected an int ≥ 1, got None"),
        ("sliding", {"window": 3, "budget": 3}, ArgumentError, "budget: expected nothing for kind='sliding'"),
        ("full", {"budget": 3}, ArgumentError, "got 3. It is for 'heavy_hitters' and 'sinks_and_recent'"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing(
    kind: Any, arguments: dict[str, Any], error: type[ClearheadError], message: str
) -> None:
    """`tests/malformed` has arguments of other types."""
    model = model_of("llama")
    before = state(model)
    with pytest.raises(error, match=message):
        cache_for(model, kind, **arguments)
    assert state(model) == before


def gpt2_with_cross_attention() -> Any:
    config: Any = CASES["gpt2"].build().config
    config.update({"add_cross_attention": True, "is_decoder": True})
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (CASES["bert"].build, "full", "expected for kind='full' a decoder of type llama.*, got BertModel, type bert"),
        (gpt2_with_cross_attention, "sliding", "model: expected for kind='sliding' a decoder of type llama"),
        (lambda: model_of("bloom", "eager"), "sinks_and_recent", "bloom: its attention adds .* kind='full' serves it"),
        (lambda: model_of("t5"), "sliding", "t5: its attention adds a bias .* kind='full' serves it"),
        (lambda: model_of("llama", "eager"), "heavy_hitters", "'clearhead', got 'eager'.*set_attn_implementation"),
        (lambda: nn.Linear(2, 2), "full", "model: expected a model of transformers"),
    ],
)
def test_models_that_cannot_be_served(make: Callable[[], Any], kind: str, message: str) -> None:
    model = make()
    before = state(model) if hasattr(model, "config") else None
    with pytest.raises(ClearheadError, match=message):
        cache_of(model, kind)
    assert before is None or state(model) == before


@pytest.mark.parametrize("name", ["llama", "mistral"])  # also where every layer keeps a window of its own
def test_more_tokens_than_there_is_room_for(name: str) -> None:
    model = model_of(name)
    with pytest.raises(CacheError, match=r"at most max_length = 13 tokens, got 13 held and 1 more, 14.*larger"):
        generated(model, cache_for(model, max_length=13), **prompt_of())


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@torch.no_grad()
def test_another_batch_is_refused(name: str) -> None:
    model, (ids, _) = model_of(name), batch()
    cache = cache_for(model)
    model(ids, past_key_values=cache)
    with pytest.raises(ShapeError, match=r"past_key_values: expected a batch of 2 rows, got 3.*reset\(\) it"):
        model(ids[[0, 0, 0], :1], past_key_values=cache)
    assert cache.get_seq_length() == TOTAL


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_cache_cannot_take_is_refused_before_anything_is_written(kind: str) -> None:
    model, (ids, mask) = model_of("llama"), batch("left")
    cache, step = cache_of(model, kind), ids[:, PROMPT : PROMPT + 1]
    expected = cached_logits(model, cache_of(model, kind), ids, mask, STEPS)
    first = cached_logits(model, cache, ids, mask, STEPS[:1])

    def refused(error: type[Exception], match: str, *, by: Any = model, ids: Tensor = step, **told: Any) -> None:
        with torch.no_grad(), pytest.raises(error, match=match):
            by(ids, past_key_values=cache, **told)

    all_tokens = r"attention_mask: expected the tokenizer's marks of all tokens so far, \(2, 12\)"
    refused(ShapeError, all_tokens, attention_mask=mask[:, :1])
    refused(ShapeError, all_tokens, attention_mask=torch.ones(2, 1, 1, PROMPT + 1))
    same = "attention_mask: expected the same marks as before"
    refused(CacheError, same, attention_mask=torch.ones_like(mask)[:, : PROMPT + 1])
    refused(ShapeError, "past_key_values: expected a batch of 2 rows, got 3", ids=step[[0, 0, 0]])
    other = model_of("mistral")
    for _ in range(2):  # without the hooks, and with them
        refused(CacheError, "past_key_values: expected a cache that was made for this model", by=other)
        cache_for(other, "sliding", window=3)
    model.set_attn_implementation("flex_attention")
    refused(ArgumentError, f"model: expected for kind='{kind}' the attention implementation")
    model.set_attn_implementation("clearhead")
    later = cached_logits(model, cache, ids, mask, STEPS[1:], start=PROMPT)
    assert_close(torch.cat((first, later), 1)[mask.bool()], expected[mask.bool()])


@torch.no_grad()
def test_a_forward_that_was_interrupted_leaves_a_cache_that_says_so() -> None:
    model, (ids, _) = model_of("llama"), batch()
    cache = cache_for(model, "sliding", window=5)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        model(ids, past_key_values=cache)
    handle.remove()
    with pytest.raises(CacheError, match=r"an interrupted forward left halfway. reset\(\) it"):
        model(ids, past_key_values=cache)
    cache.reset()
    model(ids, past_key_values=cache)
    assert cache.get_seq_length() == TOTAL


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_gradients_are_refused(kind: str) -> None:
    model = model_of("llama")
    with pytest.raises(CacheError, match=r"torch.no_grad\(\)"):
        model(batch()[0], past_key_values=cache_of(model, kind))


def test_assisted_decoding_takes_tokens_back_from_everything_and_is_refused_by_the_others() -> None:
    model = model_of("llama")
    single = {name: tensor[:1] for name, tensor in prompt_of().items()} | {"max_new_tokens": 12}
    plain = generated(model, DynamicCache(config=model.config), **single).sequences
    lookup = {"prompt_lookup_num_tokens": 3}
    assert torch.equal(generated(model, cache_for(model), **single, **lookup).sequences, plain)
    for kind in KINDS:
        with pytest.raises(CacheError, match="tokens to be taken back"):
            generated(model, cache_of(model, kind), **single, **lookup)
    cache = cache_for(model, "sliding", window=5)
    generated(model, cache, **single)
    only_forward = r"crop: expected decoding that only goes forward.* cache_for\(model, \"full\"\)"
    with pytest.raises(CacheError, match=only_forward):
        cache.crop(-1)
