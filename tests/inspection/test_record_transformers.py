"""Recording transformers models: every head equals a float64 oracle on the layer's query and key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

import clearhead
import clearhead.integrations.transformers
from clearhead.errors import RecordError
from tests.integrations.architectures import padding, token_ids
from tests.support.models import minilm
from tests.support.statistics_oracle import EVERY, Oracle, compare

from .conftest import require_same_training
from .small_models import small

OPTIONS: dict[str, Any] = {"statistics": EVERY, "top_k": 8, "map_size": 5, "sink_keys": 2, "offsets": (-1, 0, 2)}
SENTENCES = [
    "The animal didn't cross the street because it was too tired.",
    "A short one.",
    "Rain fell all night on the tin roof, and in the morning the river had taken the lower field, the fence and the "
    "old boat that nobody had used since the summer before the war; only the mast still showed above the brown water.",
]
both = pytest.mark.parametrize("implementation", ["sdpa", "clearhead"])


@dataclass(frozen=True)
class Attended:
    """The operands that a layer passes to its attention function, before heads are repeated or moved."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None


@pytest.fixture(name="attended")
def _attended(monkeypatch: pytest.MonkeyPatch) -> list[Attended]:
    calls: list[Attended] = []
    registry: dict[str, Callable[..., Any]] = AttentionInterface._global_mapping

    def listening(original: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            copies = (tensor.detach().clone() for tensor in (query, key, value))
            calls.append(Attended(module, *copies, kwargs.get("scaling")))
            return original(module, query, key, value, *args, **kwargs)

        return attend

    for name in ("sdpa", "clearhead"):
        monkeypatch.setitem(registry, name, listening(registry[name]))
    return calls


@pytest.fixture(scope="module", name="minilm")
def _minilm() -> tuple[Any, Any]:
    path = minilm()
    model = transformers.AutoModel.from_pretrained(path).float().eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


def compare_all(rec: Any, model: nn.Module, attended: list[Attended], visible: Any, counted: Any) -> None:
    """Compare every call of every module. `visible` and `counted` are functions of a call."""
    names = {module: name for name, module in model.named_modules()}
    by_name: dict[str, list[Attended]] = {}
    for call in attended:
        by_name.setdefault(names[call.module], []).append(call)
    assert list(rec) == list(by_name), "modules in the order in which they run"
    for name, calls in by_name.items():
        for statistics, call in zip(rec[name], calls, strict=True):
            batch, heads, length, _ = call.query.shape
            seen = visible(call).expand(batch, heads, length, call.key.shape[2])
            compare(statistics, Oracle(call.query, call.key, seen, call.value, scale=call.scale, counted=counted(call)))


def recorded(model: Any, implementation: str, run: Callable[..., Any] | None = None, **inputs: Any) -> Any:
    """The record of `run(**inputs)`, or of a call of the model, which does not change its output."""
    model.set_attn_implementation(implementation)
    with torch.no_grad(), clearhead.record(model, **OPTIONS) as rec:
        inside = (run or model)(**inputs)
    if run is None:
        with torch.no_grad():
            assert torch.equal(inside[0], model(**inputs)[0])
    return rec


def lower(queries: int, keys: int) -> Tensor:
    """The causal mask whose last query sees all keys."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


EVERYTHING = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@both
@pytest.mark.parametrize("texts", [SENTENCES, [" ".join(SENTENCES * 4)]], ids=["padded", "long"])
def test_all_72_heads_of_minilm(texts: list[str], implementation: str, minilm: Any, attended: list[Attended]) -> None:
    model, tokenizer = minilm
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    mask = inputs["attention_mask"].bool()
    assert (mask.shape[1] > 250) == bool(mask.all()) == (len(texts) == 1)
    model.set_attn_implementation(implementation)
    options = OPTIONS if len(texts) > 1 else {"top_k": 8}
    with torch.no_grad(), clearhead.record(model, **options) as rec:
        model(**inputs)
    assert sum(statistics.num_heads for statistics in rec.values()) == 72
    compare_all(rec, model, attended, lambda call: mask[:, None, None, :], lambda call: mask)


@both
@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoders(kind: str, side: str, implementation: str, attended: list[Attended]) -> None:
    length = 13
    model, mask = small(kind), None if side == "none" else padding(side, length)
    rec = recorded(model, implementation, input_ids=token_ids(length), attention_mask=mask)
    real = EVERYTHING if mask is None else mask.bool()[:, None, None, :]
    counted = None if mask is None else mask.bool()
    calls = attended[: len(attended) // 2]  # the second half is outside of the record
    compare_all(rec, model, calls, lambda call: real & lower(length, length), lambda call: counted)


@both
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_cached_decoding_appends_a_call_per_step(
    kind: str, side: str, implementation: str, attended: list[Attended]
) -> None:
    length, new = 7, 4
    model, ids, mask = small(kind), token_ids(length), padding(side, length)
    steps = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
    rec = recorded(model, implementation, model.generate, input_ids=ids, attention_mask=mask, **steps)

    def real(call: Attended) -> Tensor:
        return torch.cat([mask, mask.new_ones(3, call.key.shape[2] - length)], 1).bool()

    def visible(call: Attended) -> Tensor:
        return lower(call.query.shape[2], call.key.shape[2]) & real(call)[:, None, None, :]

    compare_all(rec, model, attended, visible, lambda call: real(call)[:, -call.query.shape[2] :])
    assert [statistics.query_length for statistics in next(iter(rec.values()))] == [length, 1, 1, 1]


@both
@pytest.mark.parametrize("arguments", ["decoder_input_ids", "labels"])
@pytest.mark.parametrize("target_length", [7, 5], ids=["as long", "shorter"])
def test_encoder_and_decoder_count_their_own_queries(
    arguments: str, target_length: int, implementation: str, attended: list[Attended]
) -> None:
    model, mask = small("bart"), padding("right", 7).bool()
    inputs = {"input_ids": token_ids(7), "attention_mask": mask.long(), arguments: token_ids(target_length)}
    rec = recorded(model, implementation, lambda **inputs: model(**inputs), **inputs)
    assert len(rec) == 6
    encoder = set(model.get_encoder().modules())

    def visible(call: Attended) -> Tensor:
        if call.module in encoder or not call.module.is_causal:
            return mask[:, None, None, :]
        return lower(target_length, target_length)

    compare_all(rec, model, attended, visible, lambda call: mask if call.module in encoder else None)


def test_eager_attention_is_an_error_by_name() -> None:
    model = small("llama")
    model.set_attn_implementation("eager")
    text = r"no attention was seen.*model\.layers\.0\.self_attn \(LlamaAttention\).*set_attn_implementation\('sdpa'\)"
    with torch.no_grad(), pytest.raises(RecordError, match=text), clearhead.record(model):
        model(input_ids=token_ids(5))


@both
def test_training_inside_has_the_gradients_of_training_outside(implementation: str) -> None:
    model, ids = small("gpt2").train(), token_ids(9)
    model.set_attn_implementation(implementation)
    require_same_training(model, lambda: model(input_ids=ids, labels=ids).loss)
