"""Recording transformers models: every head equals a float64 oracle on the query and key the layer handed over."""

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
from clearhead.cli._demo import default_model_path
from clearhead.errors import RecordError
from tests.support.models import encoder_decoder
from tests.support.statistics_oracle import EVERY, Oracle, compare

from .small_models import VOCABULARY, enlivened, padding, small, small_bart, token_ids
from .stacks import require_same_training

OPTIONS: dict[str, Any] = {"statistics": EVERY, "top_k": 8, "map_size": 5, "sink_keys": 2, "offsets": (-1, 0, 2)}
SENTENCES = [
    "The animal didn't cross the street because it was too tired.",
    "A short one.",
    "Rain fell all night on the tin roof, and in the morning the river had taken the lower field, the fence and the "
    "old boat that nobody had used since the summer before the war; only the mast still showed above the brown water.",
]
both = pytest.mark.parametrize("implementation", ["sdpa", "clearhead"])


@dataclass(frozen=True)
class Handed:
    """What one attention layer handed to its attention function, before anything is repeated or packed."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None


@pytest.fixture(name="handed")
def _handed(monkeypatch: pytest.MonkeyPatch) -> list[Handed]:
    calls: list[Handed] = []
    registry: dict[str, Callable[..., Any]] = AttentionInterface._global_mapping

    def watching(original: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            copies = (tensor.detach().clone() for tensor in (query, key, value))
            calls.append(Handed(module, *copies, kwargs.get("scaling")))
            return original(module, query, key, value, *args, **kwargs)

        return attend

    for name in ("sdpa", "clearhead"):
        monkeypatch.setitem(registry, name, watching(registry[name]))
    return calls


@pytest.fixture(scope="module", name="minilm")
def _minilm() -> tuple[Any, Any]:
    path = str(default_model_path())
    model = transformers.AutoModel.from_pretrained(path).float().eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


def compare_all(rec: Any, model: nn.Module, handed: list[Handed], visible: Any, counted: Any) -> None:
    """Every call of every module; `visible` and `counted` answer for a handed call."""
    names = {module: name for name, module in model.named_modules()}
    by_name: dict[str, list[Handed]] = {}
    for call in handed:
        by_name.setdefault(names[call.module], []).append(call)
    assert list(rec) == list(by_name), "modules in the order in which they run"
    for name, calls in by_name.items():
        assert len(rec[name]) == len(calls)
        for found, call in zip(rec[name], calls, strict=True):
            batch, heads, length, _ = call.query.shape
            seen = visible(call).expand(batch, heads, length, call.key.shape[2])
            compare(found, Oracle(call.query, call.key, seen, call.value, scale=call.scale, counted=counted(call)))


@both
def test_all_72_heads_of_minilm_on_a_padded_batch(implementation: str, minilm: Any, handed: list[Handed]) -> None:
    model, tokenizer = minilm
    model.set_attn_implementation(implementation)
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True)
    with torch.no_grad(), clearhead.record(model, **OPTIONS) as rec:
        model(**inputs)
    assert sum(found.num_heads for found in rec.values()) == 72
    mask = inputs["attention_mask"].bool()
    assert not mask.all()
    compare_all(rec, model, handed, lambda call: mask[:, None, None, :], lambda call: mask)


@both
def test_minilm_on_a_long_text(implementation: str, minilm: Any, handed: list[Handed]) -> None:
    model, tokenizer = minilm
    model.set_attn_implementation(implementation)
    inputs = tokenizer(" ".join(SENTENCES * 4), return_tensors="pt")
    assert inputs["input_ids"].shape[1] > 250
    with torch.no_grad(), clearhead.record(model, top_k=8) as rec:
        model(**inputs)
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    compare_all(rec, model, handed, lambda call: everything, lambda call: None)


@both
@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoders(kind: str, side: str, implementation: str, handed: list[Handed]) -> None:
    length = 13
    model, mask = small(kind), padding(side, length)
    model.set_attn_implementation(implementation)
    with torch.no_grad(), clearhead.record(model, **OPTIONS) as rec:
        model(input_ids=token_ids(length), attention_mask=mask)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    visible = causal[None, None] if mask is None else causal & mask.bool()[:, None, None, :]
    compare_all(rec, model, handed, lambda call: visible, lambda call: None if mask is None else mask.bool())


@both
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_cached_decoding_appends_a_call_per_step(
    kind: str, side: str, implementation: str, handed: list[Handed]
) -> None:
    length, new = 7, 4
    model, mask = small(kind), padding(side, length)
    model.set_attn_implementation(implementation)
    ids = token_ids(length)
    given = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad(), clearhead.record(model, **OPTIONS) as rec:
        model.generate(ids, attention_mask=given, min_new_tokens=new, max_new_tokens=new, do_sample=False)

    def whole(call: Handed) -> Tensor:
        return torch.cat([given, given.new_ones(3, call.key.shape[2] - length)], 1).bool()

    def visible(call: Handed) -> Tensor:
        queries, keys = call.query.shape[2], call.key.shape[2]
        causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        return causal & whole(call)[:, None, None, :]

    compare_all(rec, model, handed, visible, lambda call: whole(call)[:, -call.query.shape[2] :])
    assert [found.query_length for found in next(iter(rec.values()))] == [length, 1, 1, 1]


@both
@pytest.mark.parametrize("arguments", ["decoder_input_ids", "labels"])
@pytest.mark.parametrize("target_length", [7, 5], ids=["as long", "shorter"])
def test_encoder_and_decoder_count_their_own_queries(
    arguments: str, target_length: int, implementation: str, handed: list[Handed]
) -> None:
    model = small_bart()
    model.set_attn_implementation(implementation)
    mask = padding("right", 7)
    assert mask is not None
    with torch.no_grad(), clearhead.record(model, **OPTIONS) as rec:
        model(input_ids=token_ids(7), attention_mask=mask, **{arguments: token_ids(target_length)})
    assert len(rec) == 6

    def is_encoder(call: Handed) -> bool:
        return any(call.module is module for module in model.get_encoder().modules())

    def visible(call: Handed) -> Tensor:
        if is_encoder(call) or not call.module.is_causal:
            return mask.bool()[:, None, None, :]
        return torch.ones(target_length, target_length, dtype=torch.bool).tril()[None, None]

    compare_all(rec, model, handed, visible, lambda call: mask.bool() if is_encoder(call) else None)


@both
def test_whisper(implementation: str, handed: list[Handed]) -> None:
    lengths = {"num_mel_bins": 8, "max_source_positions": 19, "max_target_positions": 12}
    config = transformers.WhisperConfig(**encoder_decoder(24, 3, 1), **lengths, vocab_size=VOCABULARY)
    model = enlivened(transformers.WhisperForConditionalGeneration(config))
    model.set_attn_implementation(implementation)
    with torch.no_grad(), clearhead.record(model, **OPTIONS) as rec:
        model(torch.randn(3, 8, 38), decoder_input_ids=token_ids(5))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    compare_all(rec, model, handed, lambda call: causal if call.module.is_causal else everything, lambda call: None)
    assert [(found.query_length, found.key_length) for found in rec.values()] == [(19, 19), (5, 5), (5, 19)]


@both
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_models_output_stays_its_own(kind: str, implementation: str) -> None:
    model, ids, mask = small(kind), token_ids(11), padding("left", 11)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        before = model(input_ids=ids, attention_mask=mask).logits
        with clearhead.record(model):
            inside = model(input_ids=ids, attention_mask=mask).logits
        after = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(inside, before)
    assert torch.equal(after, before)


@both
def test_grouped_heads_can_be_reduced(implementation: str) -> None:
    model = small("llama")
    model.set_attn_implementation(implementation)
    ids, mask = token_ids(9), padding("right", 9)
    found: dict[str, Any] = {}
    for per in ("query_head", "kv_head"):
        with torch.no_grad(), clearhead.record(model, ("entropy",), per=per) as rec:
            model(input_ids=ids, attention_mask=mask)
        found[per] = rec["model.layers.1.self_attn"].entropy
    assert found["kv_head"].shape == (3, 2, 9)
    torch.testing.assert_close(found["kv_head"], found["query_head"].unflatten(1, (2, 3)).mean(2))


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
