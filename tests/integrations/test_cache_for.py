"""Small caches in the `generate` of transformers: what models give with them is what dense masks give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from clearhead.integrations.transformers import attention_forward, cache_for
from tests.checkpoints.architectures import CASES, WINDOW, randomised, t5

WORDS, PROMPT, NEW, SINKS, BUDGET = 31, 11, 9, 2, 6
TOTAL = PROMPT + NEW
KINDS: dict[str, dict[str, Any]] = {
    "sliding": {"window": 5},
    "heavy_hitters": {"budget": BUDGET},
    "sinks_and_recent": {"budget": BUDGET, "sinks": SINKS},
}


def deepseek_v2() -> nn.Module:
    config = transformers.DeepseekV2Config(
        **SIZES,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=12,  # transformers' rotary embedding takes even sizes
        qk_nope_head_dim=8,
        qk_rope_head_dim=6,
        v_head_dim=9,
        first_k_dense_replace=2,
    )
    return transformers.DeepseekV2Model(config)


TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 36,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **TOKENS,
}
DECODERS: dict[str, Callable[[], nn.Module]] = {
    name: case.build for name, case in CASES.items() if case.causal and name not in ("bloom", "bert decoder")
} | {"deepseek_v2": deepseek_v2}


def model_of(name: str, implementation: str = "eager") -> Any:
    """A language model of random parameters on the tiny configuration of one architecture."""
    torch.manual_seed(13)
    if name == "t5":
        config = t5().config
        model = transformers.T5ForConditionalGeneration(config)
        config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    else:
        config: Any = (DECODERS | {"bloom": CASES["bloom"].build})[name]().config
        config.max_position_embeddings = 64  # GPT-2's table of positions among them
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
        return [WINDOW] * config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [WINDOW if each == "sliding_attention" else None for each in types]


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
            distance = torch.arange(start, stop)[:, None] - torch.arange(stop)
            visible = (distance >= 0)[None, None].repeat(*seen.shape[:2], 1, 1)
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
