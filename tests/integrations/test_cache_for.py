"""Small caches in the `generate` of transformers: what models give with them is what dense masks give."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from clearhead.errors import ArgumentError, CacheError, ClearheadError, DTypeError, ShapeError
from clearhead.integrations import transformers as integration
from clearhead.integrations.transformers import attention_forward
from tests.checkpoints.architectures import CASES, deepseek, randomised, t5

cache_for: Any = integration.cache_for  # kinds and arguments come from tables

WORDS, PROMPT, NEW, SINKS, BUDGET, WIDE = 31, 11, 7, 2, 6, 9
TOTAL = PROMPT + NEW
KINDS: dict[str, dict[str, Any]] = {
    "sliding": {"window": 5},
    "heavy_hitters": {"budget": BUDGET},
    "sinks_and_recent": {"budget": BUDGET, "sinks": SINKS},
}


TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
DECODERS: dict[str, Callable[[], nn.Module]] = {
    name: case.build
    for name, case in CASES.items()
    if case.causal and name not in ("bloom", "bert decoder") and "deepseek" not in name
} | {"deepseek_v2": functools.partial(deepseek, "v2"), "deepseek_v3": functools.partial(deepseek, "low-rank queries")}


def model_of(name: str, implementation: str = "eager", **settings: Any) -> Any:
    """A language model of random parameters on the tiny configuration of one architecture."""
    torch.manual_seed(13)
    if name == "t5":
        config: Any = t5().config
        model: Any = transformers.T5ForConditionalGeneration(config)
        config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    else:
        config = (DECODERS | {"bloom": CASES["bloom"].build})[name]().config
        config.update({"max_position_embeddings": 64} | settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.update(**TOKENS, max_length=None)
    model = randomised(model)
    model.set_attn_implementation(implementation)
    return model


def batch(padded: bool) -> tuple[Tensor, Tensor]:
    """Ids (2, TOTAL) and their marks; the second text is shorter."""
    ids = torch.randint(1, WORDS, (2, TOTAL), generator=torch.Generator().manual_seed(3))
    marks = torch.ones_like(ids)
    if padded:
        marks[1, :4] = 0
    return ids, marks


def positions_of(marks: Tensor) -> Tensor:
    return (marks.cumsum(1) - 1).clamp(min=0)


def close(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest."""
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


# What is seen, as dense masks --------------------------------------------------------------------------------------


def own_windows(model: Any) -> list[int | None]:
    config = model.config
    if config.model_type == "mistral":
        return [config.sliding_window] * config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [config.sliding_window if each == "sliding_attention" else None for each in types]


class Seen:
    """Bool (B, H, TOTAL, TOTAL) for every layer: what the queries of each forward saw, by what the cache held."""

    def __init__(self, model: Any, marks: Tensor, window: int | None) -> None:
        self.windows, self.window, self.marks = own_windows(model), window, marks.bool()
        self.heads = model.config.num_attention_heads
        batch_size, length = marks.shape
        self.layers = [torch.zeros(batch_size, self.heads, length, length, dtype=torch.bool) for _ in self.windows]

    def add(self, cache: Any, start: int, stop: int) -> None:
        """Before a forward with the tokens of columns start … stop − 1."""
        for layer, own, seen in zip(cache.layers, self.windows, self.layers, strict=True):
            place = self.marks.cumsum(1)[:, None, :stop]  # windows count tokens, not padding
            distance = place[:, :, start:, None] - place[:, :, None]  # (B, 1, L, stop)
            visible = torch.ones(stop, stop, dtype=torch.bool).tril()[start:].repeat(*seen.shape[:2], 1, 1)
            visible[..., :start] = False if start == 0 else self.held(layer.positions, start)[:, :, None]
            for reach in (own, self.window):
                if reach is not None:
                    visible &= distance < reach
            seen[:, :, start:stop, :stop] = visible & self.marks[:, None, None, :stop]

    def held(self, positions: Tensor, start: int) -> Tensor:
        """Bool (B, H, start): the columns whose keys a layer holds."""
        found = torch.zeros(len(positions), positions.shape[1], start, dtype=torch.bool)
        for row, marks in enumerate(self.marks[:, :start]):
            columns = marks.nonzero().flatten()
            for head, held in enumerate(positions[row]):
                found[row, head, columns[held[held >= 0]]] = True
        return found.repeat_interleave(self.heads // found.shape[1], 1)


def dense_logits(model: Any, ids: Tensor, marks: Tensor, seen: list[Tensor]) -> Tensor:
    """The model's logits without a cache, every layer under its own mask."""

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, *args: Any, **kwargs: Any) -> Any:
        return attention_forward(module, query, key, value, seen[module.layer_idx], *args, **kwargs)

    AttentionInterface.register("dense test mask", forward)
    other = copy.deepcopy(model)
    other.set_attn_implementation("dense test mask")
    with torch.no_grad():
        return other(ids, position_ids=positions_of(marks), use_cache=False).logits


def cached_logits(
    model: Any, cache: Any, ids: Tensor, marks: Tensor, parts: list[int], seen: Seen | None = None
) -> Tensor:
    """The logits of the same tokens, so many at a time."""
    found, start = [], 0
    positions = positions_of(marks)
    for part in parts:
        stop = start + part
        if seen is not None:
            seen.add(cache, start, stop)
        with torch.no_grad():
            found.append(
                model(
                    ids[:, start:stop],
                    attention_mask=marks[:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                ).logits
            )
        start = stop
    return torch.cat(found, 1)


STEPS = [PROMPT, *[1] * (NEW - 3), 3]


@pytest.mark.parametrize("padded", [False, True], ids=["equal rows", "left padding"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_model_gives_what_it_gives_under_the_dense_mask_of_what_is_held(name: str, kind: str, padded: bool) -> None:
    ids, marks = batch(padded)
    for implementation in ("clearhead",) if kind == "heavy_hitters" else ("clearhead", "eager"):
        model = model_of(name, implementation)
        cache, seen = cache_for(model, kind, **KINDS[kind]), Seen(model, marks, KINDS[kind].get("window"))
        actual = cached_logits(model, cache, ids, marks, STEPS, seen)
        expected = dense_logits(model, ids, marks, seen.layers)
        close(actual[marks.bool()], expected[marks.bool()])
        if seen.windows[-1] is None:  # and something did go
            causal = torch.ones(TOTAL, TOTAL, dtype=torch.bool).tril()
            assert not torch.equal(seen.layers[-1][0, 0], causal)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_the_right_and_between_tokens(kind: str) -> None:
    model, (ids, marks) = model_of("llama", "clearhead"), batch(False)
    marks[0, [2, 5, 13]] = 0
    marks[1, 7:PROMPT] = 0
    cache, seen = cache_for(model, kind, **KINDS[kind]), Seen(model, marks, KINDS[kind].get("window"))
    actual = cached_logits(model, cache, ids, marks, STEPS, seen)
    close(actual[marks.bool()], dense_logits(model, ids, marks, seen.layers)[marks.bool()])


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "clearhead"])
def test_a_window_is_that_of_a_model_with_sliding_windows(implementation: str) -> None:
    ids, marks = batch(True)
    wide, narrow = (model_of("mistral", implementation, sliding_window=each) for each in (None, 5))
    actual = cached_logits(wide, cache_for(wide, "sliding", window=5), ids, marks, STEPS)
    expected = cached_logits(narrow, DynamicCache(config=narrow.config), ids, marks, STEPS)
    close(actual[marks.bool()], expected[marks.bool()])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_near_to_float64_as_without_a_cache(kind: str) -> None:
    model, (ids, marks) = model_of("gemma2", "clearhead").bfloat16(), batch(True)
    cache, seen = cache_for(model, kind, **KINDS[kind]), Seen(model, marks, KINDS[kind].get("window"))
    actual = cached_logits(model, cache, ids, marks, STEPS, seen)
    assert cache.layers[1].keys.dtype == actual.dtype == torch.bfloat16
    expected = dense_logits(copy.deepcopy(model).double(), ids, marks, seen.layers)
    errors = (expected - actual)[marks.bool()], (expected - dense_logits(model, ids, marks, seen.layers))[marks.bool()]
    assert errors[0].abs().max() <= 2 * errors[1].abs().max()


@pytest.mark.parametrize("kind", ["heavy_hitters", "sinks_and_recent"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_layer_whose_own_window_is_wider_than_the_budget_evicts_what_the_window_has_passed(
    name: str, kind: str
) -> None:
    model, (ids, marks) = model_of(name, "clearhead", sliding_window=WIDE), batch(True)
    cache, seen = cache_for(model, kind, **KINDS[kind]), Seen(model, marks, None)
    actual = cached_logits(model, cache, ids, marks, STEPS, seen)
    expected = dense_logits(model, ids, marks, seen.layers)
    close(actual[marks.bool()], expected[marks.bool()])
    reached = cache.layers[0].positions[0]  # (Hkv or 1, S)
    assert reached.shape[1] == BUDGET
    assert int(reached.min()) > TOTAL - WIDE


@pytest.mark.parametrize("padded", [False, True], ids=["equal rows", "left padding"])
def test_sinks_and_recent_are_the_first_and_the_latest_tokens_of_each_text(padded: bool) -> None:
    model, (ids, marks) = model_of("llama"), batch(padded)
    cache = cache_for(model, "sinks_and_recent", **KINDS["sinks_and_recent"])
    cached_logits(model, cache, ids, marks, STEPS)
    for layer in cache.layers:
        for row, length in enumerate(marks.sum(1).tolist()):
            held = [0, 1, *range(length - BUDGET + SINKS, length)]
            assert layer.positions[row].sort(-1).values.tolist() == [held] * layer.positions.shape[1]


def test_heavy_hitters_are_the_keys_with_the_most_weight_in_the_prompt_and_the_latest() -> None:
    model, (ids, _) = model_of("llama", "clearhead"), batch(False)
    with torch.no_grad():
        weights = model(ids[:, :PROMPT], output_attentions=True).attentions
    cache = cache_for(model, "heavy_hitters", budget=BUDGET, recent=0.5)
    with torch.no_grad():
        model(ids[:, :PROMPT], past_key_values=cache)
    for layer, each in zip(cache.layers, weights, strict=True):
        received = each.sum(2).unflatten(1, (layer.keys.shape[1], -1)).sum(2)  # (B, Hkv, PROMPT)
        received[..., -BUDGET // 2 :] = torch.inf
        expected = received.topk(BUDGET).indices.sort(-1).values
        assert torch.equal(layer.positions.sort(-1).values, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_as_many_keys_are_stored_as_the_kind_says(name: str, kind: str) -> None:
    model, (ids, _) = model_of(name, "clearhead"), batch(False)
    cache = cache_for(model, kind, **KINDS[kind])
    most = KINDS[kind].get("window", BUDGET)
    memory = []
    for start, stop in [(0, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 1, TOTAL)]:
        with torch.no_grad():
            model(ids[:, start:stop], past_key_values=cache)
        for layer, own in zip(cache.layers, own_windows(model), strict=True):
            assert layer.keys.shape[2] == layer.values.shape[2] == layer.positions.shape[2]
            assert layer.keys.shape[2] <= min(most, own or most)
        memory.append(sum(each.untyped_storage().nbytes() for la in cache.layers for each in (la.keys, la.values)))
    assert memory[0] == memory[1] == memory[2]
    assert cache.get_seq_length() == TOTAL


# With `generate` ------------------------------------------------------------------------------------------------------


def inputs_of(name: str, padded: bool = False) -> dict[str, Any]:
    ids, marks = batch(padded)
    return {"input_ids": ids[:, :PROMPT], "attention_mask": marks[:, :PROMPT]}


def generated(model: Any, cache: Any, seed: int = 5, **options: Any) -> Any:
    torch.manual_seed(seed)
    chosen = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(past_key_values=cache, **chosen | options)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*DECODERS, "bloom", "t5"])
def test_everything_kept_gives_the_tokens_of_transformers_own_cache(name: str, way: str) -> None:
    for implementation, max_length in (("eager", None), ("eager" if name == "bloom" else "clearhead", TOTAL)):
        model = model_of(name, implementation)
        inputs = inputs_of(name, padded=True)
        # By itself `generate` gives T5's decoder as many layers as its encoder has.
        own = EncoderDecoderCache(DynamicCache(), DynamicCache()) if name == "t5" else DynamicCache(config=model.config)
        expected = generated(model, own, **inputs, **WAYS[way]).sequences
        found = generated(model, cache_for(model, max_length=max_length), **inputs, **WAYS[way])
        assert torch.equal(found.sequences, expected)


def definition(kind: str, marks: Tensor, heads: int) -> Tensor:
    """What a sliding window, or sinks and recent tokens, hold by their definition when single steps follow a prompt."""
    length = marks.shape[1]
    place, real = marks.cumsum(1) - 1, marks.bool()
    distance = place[:, :, None] - place[:, None]
    seen = (distance >= 0) & real[:, None] & torch.ones(length, length, dtype=torch.bool).tril()
    if kind == "sliding":
        seen &= distance < KINDS[kind]["window"]
    else:
        held = (distance <= BUDGET - SINKS) | (place[:, None] < SINKS)
        seen[:, PROMPT:] &= held[:, PROMPT:]
    return seen[:, None].expand(-1, heads, -1, -1)


@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["sliding", "sinks_and_recent"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "clearhead"])
def test_generated_logits_are_those_under_the_mask_of_the_definition(implementation: str, kind: str, way: str) -> None:
    model, inputs = model_of("llama", implementation), inputs_of("llama", padded=True)
    found = generated(model, cache_for(model, kind, **KINDS[kind]), **inputs, **WAYS[way])
    marks = torch.cat((inputs["attention_mask"], torch.ones(2, NEW, dtype=torch.int64)), 1)
    seen = [definition(kind, marks, model.config.num_attention_heads)] * model.config.num_hidden_layers
    expected = dense_logits(model, found.sequences, marks, seen)[:, PROMPT - 1 : -1]
    close(torch.stack(found.logits, 1), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_text_is_written_as_it_is_alone(kind: str) -> None:
    model, inputs = model_of("gemma2", "clearhead"), inputs_of("gemma2", padded=True)
    both = generated(model, cache_for(model, kind, **KINDS[kind]), **inputs)
    pad = int((inputs["attention_mask"][1] == 0).sum())
    alone = {name: each[1:, pad:] for name, each in inputs.items()}
    single = generated(model, cache_for(model, kind, **KINDS[kind]), **alone)
    assert torch.equal(both.sequences[1:, pad:], single.sequences)
    close(torch.stack(both.logits)[:, 1:], torch.stack(single.logits))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_beams_have_the_scores_of_their_tokens(name: str, kind: str) -> None:
    """A text of a beam, fed by itself, has the score that beam search gave it: its keys were those of its own past."""
    model, inputs = model_of(name, "clearhead"), inputs_of(name)
    found = generated(
        model, cache_for(model, kind, **KINDS[kind]), **inputs, num_beams=5, length_penalty=0.0, output_scores=True
    )
    assert bool((found.beam_indices != found.beam_indices[:, :1]).any())  # rows did change places
    marks = torch.ones_like(found.sequences)
    cache = cache_for(model, kind, **KINDS[kind])
    logits = cached_logits(model, cache, found.sequences, marks, [PROMPT, *[1] * NEW])
    each = logits.log_softmax(-1)[:, PROMPT - 1 : -1].gather(2, found.sequences[:, PROMPT:, None])
    torch.testing.assert_close(found.sequences_scores, each.sum((1, 2)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["full", *KINDS])
def test_a_chat_goes_on_where_it_ended(kind: str) -> None:
    model, (ids, _) = model_of("qwen3", "clearhead"), batch(False)
    arguments = KINDS.get(kind, {})
    cache = cache_for(model, kind, **arguments)
    first = generated(model, cache, input_ids=ids[:, :PROMPT], max_new_tokens=3).sequences
    said = torch.cat((first, ids[:, :5]), 1)
    kept = pickle.loads(pickle.dumps(cache))
    whole = generated(model, cache, input_ids=said)
    again = generated(model, kept, input_ids=said)
    assert torch.equal(whole.sequences, again.sequences)
    other = cache_for(model, kind, **arguments)
    parts = [PROMPT, 1, 1, 6, *[1] * (NEW - 1)]  # the last token of an answer comes with the next question
    fed = cached_logits(model, other, whole.sequences[:, :-1], torch.ones_like(whole.sequences)[:, :-1], parts)
    close(torch.stack(whole.logits, 1), fed[:, said.shape[1] - 1 :])


@pytest.mark.parametrize("kind", ["full", *KINDS])
def test_rows_are_repeated_and_selected(kind: str) -> None:
    model, (ids, marks) = model_of("llama", "clearhead"), batch(True)
    cache = cache_for(model, kind, **KINDS.get(kind, {}))
    cached_logits(model, cache, ids, marks, [PROMPT])
    other = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    other.batch_select_indices(torch.tensor([1]))
    rows = torch.tensor([0, 0, 1, 1])

    def step(cache: Any, rows: Tensor) -> Tensor:
        new = {"attention_mask": marks[rows], "position_ids": positions_of(marks)[rows][:, PROMPT:]}
        with torch.no_grad():
            return model(ids[rows][:, PROMPT:], past_key_values=cache, **new).logits

    repeated = step(cache, rows)
    close(repeated[0::2], repeated[1::2])
    close(step(other, torch.tensor([1])), repeated[2:3])


@pytest.mark.parametrize("kind", ["full", *KINDS])
def test_a_cache_that_is_reset_begins_anew(kind: str) -> None:
    model, inputs = model_of("gemma2", "clearhead"), inputs_of("gemma2", padded=True)
    cache = cache_for(model, kind, **KINDS.get(kind, {}))
    first = generated(model, cache, **inputs).sequences
    cache.reset()
    assert cache.get_seq_length() == 0
    one = {name: each[:1] for name, each in inputs.items()}
    assert torch.equal(generated(model, cache, **one).sequences, first[:1])


@pytest.mark.parametrize("kind", ["full", *KINDS])
def test_a_prompt_of_embeddings(kind: str) -> None:
    model, inputs = model_of("llama", "clearhead"), inputs_of("llama", padded=True)
    expected = generated(model, cache_for(model, kind, **KINDS.get(kind, {})), **inputs).sequences[:, PROMPT:]
    embedded: dict[str, Any] = {"inputs_embeds": model.model.embed_tokens(inputs["input_ids"]).detach()}
    found = generated(
        model, cache_for(model, kind, **KINDS.get(kind, {})), attention_mask=inputs["attention_mask"], **embedded
    )
    assert torch.equal(found.sequences, expected)


def test_a_prompt_comes_in_chunks() -> None:
    model, inputs = model_of("llama", "sdpa"), inputs_of("llama", padded=True)
    whole = generated(model, cache_for(model, "sliding", window=5), **inputs)
    chunks = generated(model, cache_for(model, "sliding", window=5), **inputs, prefill_chunk_size=4)
    assert torch.equal(whole.sequences, chunks.sequences)


def test_weights_of_what_is_held_are_returned() -> None:
    model, (ids, marks) = model_of("llama", "clearhead"), batch(True)
    cache = cache_for(model, "heavy_hitters", budget=BUDGET)
    cached_logits(model, cache, ids, marks, [PROMPT])
    with torch.no_grad():
        output = model(ids[:, PROMPT:], attention_mask=marks, past_key_values=cache, output_attentions=True)
    for weights in output.attentions:
        assert weights.shape == (2, 6, NEW, BUDGET + NEW)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, NEW))


def test_assisted_decoding_takes_tokens_back_from_everything_and_is_refused_by_the_others() -> None:
    model, inputs = model_of("llama", "clearhead"), inputs_of("llama")
    one = {name: each[:1] for name, each in inputs.items()}
    plain = generated(model, DynamicCache(config=model.config), **one, max_new_tokens=12).sequences
    assistant = model_of("mistral")
    for way in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        assert torch.equal(generated(model, cache_for(model), **one, **way, max_new_tokens=12).sequences, plain)
        for kind in KINDS:
            with pytest.raises(CacheError, match="tokens to be taken back"):
                generated(model, cache_for(model, kind, **KINDS[kind]), **one, **way)
    cache = cache_for(model, "sliding", window=5)
    generated(model, cache, **one)
    with pytest.raises(
        CacheError, match=r"crop: expected decoding that only goes forward.* cache_for\(model, \"full\"\)"
    ):
        cache.crop(-1)


# What is refused ------------------------------------------------------------------------------------------------------


def state(model: Any) -> tuple[Any, ...]:
    hooks = [(len(each._forward_pre_hooks), len(each._forward_hooks)) for each in model.modules()]
    return hooks, model.config._attn_implementation, sorted(vars(model))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kind": "heavy_hitters", "budget": 0}, ArgumentError, "budget: expected an int ≥ 1, got 0"),
        ({"kind": "sinks_and_recent", "budget": 0}, ArgumentError, "budget: expected an int ≥ 1, got 0"),
        ({"kind": "sinks_and_recent"}, DTypeError, "budget: expected an int ≥ 1, got None"),
        ({"kind": "sinks_and_recent", "budget": 4}, ArgumentError, "sinks: expected fewer than budget=4"),
        ({"kind": "sinks_and_recent", "budget": 4, "sinks": -1}, ArgumentError, "sinks: expected an int ≥ 0, got -1"),
        ({"kind": "heavy_hitters", "budget": 4, "recent": 1.5}, ArgumentError, r"recent: expected a share in \[0, 1\]"),
        ({"kind": "sliding", "window": 0}, ArgumentError, "window: expected an int ≥ 1, got 0"),
        ({"kind": "sliding", "window": 2.0}, DTypeError, "window: expected an int ≥ 1, got 2.0"),
        ({"kind": "sliding"}, DTypeError, "window: expected an int ≥ 1, got None"),
        ({"kind": "full", "max_length": 0}, ArgumentError, "max_length: expected an int ≥ 1, got 0"),
        (
            {"kind": "full", "window": 3},
            ArgumentError,
            "window: expected nothing for kind='full', got 3. window is for",
        ),
        ({"kind": "full", "budget": 3}, ArgumentError, "budget is for 'heavy_hitters' and 'sinks_and_recent'"),
        ({"kind": "sliding", "window": 3, "budget": 3}, ArgumentError, "budget: expected nothing for kind='sliding'"),
        ({"kind": "sliding", "window": 3, "sinks": 2}, ArgumentError, "sinks: expected nothing"),
        ({"kind": "sinks_and_recent", "budget": 9, "recent": 0.25}, ArgumentError, "recent: expected nothing"),
        ({"kind": "heavy_hitters", "budget": 9, "max_length": 64}, ArgumentError, "max_length: expected nothing"),
        ({"kind": "heavy_hitters", "budget": 9, "sinks": 1}, ArgumentError, "sinks: expected nothing"),
        ({"kind": "lru"}, ArgumentError, "kind: expected 'full', 'sliding'"),
        ({"kind": ["full"]}, ArgumentError, "kind: expected 'full', 'sliding'"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing(arguments: dict[str, Any], error: type[ClearheadError], message: str) -> None:
    model = model_of("llama", "clearhead")
    before = state(model)
    with pytest.raises(error, match=message):
        cache_for(model, **arguments)
    assert state(model) == before


def bert() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    return transformers.BertModel(transformers.BertConfig(vocab_size=WORDS, **sizes))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (bert, "full", "model: expected for kind='full' a decoder of type llama.*, got BertModel, type bert"),
        (bert, "sliding", "model: expected for kind='sliding' a decoder of type llama"),
        (lambda: model_of("bloom"), "sinks_and_recent", "bloom: its attention adds a bias .* kind='full' serves it"),
        (lambda: model_of("t5"), "sliding", "t5: its attention adds a bias .* kind='full' serves it"),
        (lambda: model_of("llama"), "heavy_hitters", "'clearhead', got 'eager'.*set_attn_implementation"),
        (lambda: nn.Linear(2, 2), "full", "model: expected a model of transformers"),
        (lambda: "llama", "full", "model: expected a torch.nn.Module, got str"),
    ],
    ids=["bert", "bert sliding", "bloom", "t5", "eager", "linear", "name"],
)
def test_models_that_cannot_be_served(make: Callable[[], Any], kind: str, message: str) -> None:
    model = make()
    before = state(model) if hasattr(model, "config") else None
    with pytest.raises(ClearheadError, match=message):
        cache_for(model, kind, **KINDS.get(kind, {}))
    assert before is None or state(model) == before


def test_a_decoder_with_cross_attention_is_refused() -> None:
    config: Any = CASES["gpt2"].build().config
    config.update({"add_cross_attention": True, "is_decoder": True})
    with pytest.raises(ArgumentError, match="model: expected for kind='sliding'"):
        cache_for(transformers.GPT2LMHeadModel(config), "sliding", window=3)


def test_more_tokens_than_there_is_room_for() -> None:
    for name in ("llama", "mistral"):  # also where every layer keeps a window of its own
        model = model_of(name)
        with pytest.raises(CacheError, match=r"at most max_length = 13 tokens, got 13 held and 1 more, 14.*larger"):
            generated(model, cache_for(model, max_length=13), **inputs_of(name))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_another_batch_is_refused(name: str) -> None:
    model, (ids, _) = model_of(name, "clearhead"), batch(False)
    cache = cache_for(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ShapeError, match=r"past_key_values: expected a batch of 2 rows, got 3.*reset\(\) it"):
            model(ids[[0, 0, 0], :1], past_key_values=cache)
    assert cache.get_seq_length() == TOTAL


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_cache_cannot_take_is_refused_before_anything_is_written(kind: str) -> None:
    model, (ids, marks) = model_of("llama", "clearhead"), batch(True)
    cache = cache_for(model, kind, **KINDS[kind])
    expected = cached_logits(model, cache_for(model, kind, **KINDS[kind]), ids, marks, STEPS)
    found = [cached_logits(model, cache, ids[:, :PROMPT], marks, [PROMPT])]
    step = ids[:, PROMPT : PROMPT + 1]
    with torch.no_grad():
        with pytest.raises(ShapeError, match=r"attention_mask: expected .* all tokens so far, \(2, 12\)"):
            model(step, attention_mask=marks[:, :1], past_key_values=cache)
        with pytest.raises(ShapeError, match="attention_mask: expected the tokenizer's marks"):
            model(step, attention_mask=torch.ones(2, 1, 1, PROMPT + 1), past_key_values=cache)
        with pytest.raises(CacheError, match="attention_mask: expected the same marks as before"):
            model(step, attention_mask=torch.ones_like(marks)[:, : PROMPT + 1], past_key_values=cache)
        with pytest.raises(ShapeError, match="past_key_values: expected a batch of 2 rows, got 3"):
            model(step[[0, 0, 0]], past_key_values=cache)
        with pytest.raises(CacheError, match="past_key_values: expected a cache that was made for this model"):
            model_of("mistral", "clearhead")(step, past_key_values=cache)  # without the hooks
        other = model_of("mistral", "clearhead")
        cache_for(other, "sliding", window=3)
        with pytest.raises(CacheError, match="past_key_values: expected a cache that was made for this model"):
            other(step, past_key_values=cache)
        model.set_attn_implementation("flex_attention")
        with pytest.raises(ArgumentError, match=f"model: expected for kind='{kind}' the attention implementation"):
            model(step, past_key_values=cache)
        model.set_attn_implementation("clearhead")
    start = PROMPT
    for part in STEPS[1:]:
        at = {"attention_mask": marks[:, : start + part], "position_ids": positions_of(marks)[:, start : start + part]}
        with torch.no_grad():
            found.append(model(ids[:, start : start + part], past_key_values=cache, **at).logits)
        start += part
    close(torch.cat(found, 1)[marks.bool()], expected[marks.bool()])


def test_a_forward_that_was_interrupted_leaves_a_cache_that_says_so() -> None:
    model, (ids, _) = model_of("llama"), batch(False)
    cache = cache_for(model, "sliding", window=5)

    @contextmanager
    def broken() -> Generator[None]:
        def fail(*_: Any) -> None:
            raise RuntimeError("broken")

        handle = model.model.layers[1].register_forward_pre_hook(fail)
        yield
        handle.remove()

    with torch.no_grad():
        with broken(), pytest.raises(RuntimeError, match="broken"):
            model(ids, past_key_values=cache)
        with pytest.raises(CacheError, match=r"an interrupted forward left halfway. reset\(\) it"):
            model(ids, past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == TOTAL


def test_gradients_are_refused() -> None:
    model, (ids, _) = model_of("llama"), batch(False)
    for kind in ("full", "sliding"):
        with pytest.raises(CacheError, match=r"torch.no_grad\(\)"):
            model(ids, past_key_values=cache_for(model, kind, **KINDS.get(kind, {})))


def test_a_model_goes_on_as_before_with_its_own_caches() -> None:
    model, inputs = model_of("gemma2", "clearhead"), inputs_of("gemma2", padded=True)
    before = generated(model, DynamicCache(config=model.config), **inputs).sequences
    for kind in KINDS:
        cache_for(model, kind, **KINDS[kind])
        cache_for(model, kind, **KINDS[kind])
    assert len(model.model._forward_pre_hooks) == len(model.model._forward_hooks) == 1
    assert torch.equal(generated(model, DynamicCache(config=model.config), **inputs).sequences, before)
    assert torch.equal(generated(copy.deepcopy(model), cache_for(model), **inputs).sequences, before)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_decoder_without_a_head_is_served_by_names_and_by_places(name: str) -> None:
    model, (ids, marks) = model_of(name), batch(True)
    for kind in ("full", "sliding"):
        whole, alone = (cache_for(each, kind, **KINDS.get(kind, {})) for each in (model, model.base_model))
        cached_logits(model, whole, ids, marks, STEPS)
        positions, start = positions_of(marks), 0
        for part in STEPS:
            new, seen, at = ids[:, start : start + part], marks[:, : start + part], positions[:, start : start + part]
            with torch.no_grad():
                if name == "llama":
                    model.base_model(new, seen, at, alone)
                else:
                    model.base_model(new, alone, attention_mask=seen, position_ids=at)
            start += part
        close(alone.layers[-1].keys, whole.layers[-1].keys)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_model_inside_peft_is_served() -> None:
    peft = pytest.importorskip("peft")
    model, inputs = model_of("llama", "clearhead"), inputs_of("llama", padded=True)
    expected = generated(model, cache_for(model, "sinks_and_recent", budget=BUDGET, sinks=2), **inputs).sequences
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    found = generated(wrapped, cache_for(wrapped, "sinks_and_recent", budget=BUDGET, sinks=2), **inputs)
    assert torch.equal(found.sequences, expected)  # new adapters change nothing


@pytest.mark.parametrize("kind", ["full", "sliding", "heavy_hitters"])
def test_under_autocast(kind: str) -> None:
    """Rotary positions leave keys in float32 there, and values in bfloat16."""
    implementation = "clearhead" if kind == "heavy_hitters" else "sdpa"
    model, options = model_of("llama", implementation), {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    prompt = torch.arange(1, 8)[None]
    settings: dict[str, Any] = {"full": {}, "sliding": {"window": 64}, "heavy_hitters": {"budget": 64}}[kind]
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(prompt, **options)
        found = model.generate(prompt, past_key_values=cache_for(model, kind, **settings), **options)
    assert found.tolist() == expected.tolist()
