"""Clearhead inside transformers' models: what `test_architectures` does not call them with."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from clearhead.cli._demo import default_model_path
from clearhead.errors import DeviceError
from clearhead.integrations import transformers as integration
from tests.integrations.architectures import (
    DECODERS,
    GROUPED,
    SMALL,
    SMALL_GPT2,
    make_pair,
    padding,
    relative_error,
    token_ids,
)

TEXTS = [
    "The animal didn't cross the street because it was too tired.",
    "Short.",
    "Attention weights are not explanations, but they are worth a look.",
]


@pytest.fixture(scope="module")
def minilm() -> tuple[Any, Any, Any]:
    path = str(default_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    eager = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    ours = transformers.AutoModel.from_pretrained(path).eval()
    ours.set_attn_implementation("clearhead")
    return tokenizer, eager, ours


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS], ids=["one text", "padded batch"])
@torch.no_grad()
def test_minilm_equals_eager(minilm: tuple[Any, Any, Any], texts: list[str]) -> None:
    tokenizer, eager, ours = minilm
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    expected = eager(**inputs, output_attentions=True)
    actual = ours(**inputs, output_attentions=True)
    valid = inputs["attention_mask"].bool()
    assert (actual.last_hidden_state - expected.last_hidden_state)[valid].abs().max() <= 2e-5
    assert len(actual.attentions) == 6
    for weights, expected_weights in zip(actual.attentions, expected.attentions, strict=True):
        assert weights.shape == (len(texts), 12, valid.shape[1], valid.shape[1])
        assert (weights - expected_weights).transpose(1, 2)[valid].abs().max() <= 1e-5
        assert (weights.transpose(1, 2)[valid].sum(-1) - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("side", ["none", "right", "left"])
@torch.no_grad()
def test_esm_equals_eager(side: str) -> None:
    """Its configuration gives no sizes, by which the others are built."""
    eager, ours = make_pair("EsmModel", "EsmConfig", SMALL | {"position_embedding_type": "rotary"})
    mask = padding(side)
    inputs = {"input_ids": token_ids(), "attention_mask": None if side == "none" else mask}
    expected, actual = (model(**inputs, output_attentions=True) for model in (eager, ours))
    assert relative_error(actual[0][mask.bool()], expected[0][mask.bool()]) <= 1e-5
    for weights, expected_weights in zip(actual.attentions, expected.attentions, strict=True):
        assert (weights - expected_weights).transpose(1, 2)[mask.bool()].abs().max() <= 1e-5


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_generation_equals_eager(name: str, side: str, cache: str | None) -> None:
    eager, ours = make_pair(*DECODERS[name])
    inputs = {"input_ids": token_ids(), "attention_mask": padding(side)}
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "output_logits": True,
        "output_attentions": True,
        "return_dict_in_generate": True,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    expected = eager.generate(**inputs, **options)
    actual = ours.generate(**inputs, **options)
    assert actual.sequences.equal(expected.sequences)
    for logits, expected_logits in zip(actual.logits, expected.logits, strict=True):
        assert relative_error(logits, expected_logits) <= 1e-5
    last, expected_last = actual.attentions[-1], expected.attentions[-1]
    for weights, expected_weights in zip(last, expected_last, strict=True):
        assert (weights - expected_weights).abs().max() <= 1e-5


@torch.no_grad()
def test_several_new_tokens_on_a_cache() -> None:
    eager, ours = make_pair(*DECODERS["mistral, window"])
    ids = token_ids()

    def in_two_parts(model: Any) -> Tensor:
        cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
        return model(input_ids=ids[:, 4:], past_key_values=cache).logits

    assert relative_error(in_two_parts(ours), in_two_parts(eager)) <= 1e-5


CROSS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Model", "GPT2Config", SMALL_GPT2 | {"add_cross_attention": True}),
    "bert": ("BertModel", "BertConfig", SMALL | {"is_decoder": True, "add_cross_attention": True}),
}


@pytest.mark.parametrize("name", CROSS)
@torch.no_grad()
def test_cross_attention_equals_eager(name: str) -> None:
    eager, ours = make_pair(*CROSS[name])
    inputs = {"input_ids": token_ids(), "encoder_hidden_states": torch.randn(3, 5, 32)}
    expected, actual = (model(**inputs, output_attentions=True) for model in (eager, ours))
    assert relative_error(actual[0], expected[0]) <= 1e-5
    for kind in ("attentions", "cross_attentions"):
        assert len(actual[kind]) == len(expected[kind]) == 2
        for weights, expected_weights in zip(actual[kind], expected[kind], strict=True):
            assert (weights - expected_weights).abs().max() <= 1e-5


@torch.no_grad()
def test_packed_sequences() -> None:
    eager, ours = make_pair("LlamaModel", "LlamaConfig", GROUPED)
    ids, positions = token_ids(1, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    bounds = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
    expected = eager(input_ids=ids, position_ids=positions, use_cache=False)[0]
    told_by_positions = ours(input_ids=ids, position_ids=positions, use_cache=False)[0]
    told_twice = ours(
        input_ids=ids, position_ids=positions, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds
    )[0]
    assert relative_error(told_by_positions, expected) <= 1e-5
    assert relative_error(told_twice, expected) <= 1e-5


@torch.no_grad()
def test_four_dimensional_masks() -> None:
    eager, ours = make_pair("LlamaModel", "LlamaConfig", GROUPED)
    ids = token_ids()
    keep = torch.rand(3, 1, 11, 11) > 0.4
    keep |= torch.eye(11, dtype=torch.bool)
    additive = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    expected = eager(input_ids=ids, attention_mask=additive)[0]
    assert relative_error(ours(input_ids=ids, attention_mask=keep)[0], expected) <= 1e-5
    assert relative_error(ours(input_ids=ids, attention_mask=additive)[0], expected) <= 1e-5


def test_weights_are_built_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = make_pair(*DECODERS["llama"])

    def unwanted(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("built")

    monkeypatch.setattr(integration, "attention_weights", unwanted)
    assert ours(input_ids=token_ids()).attentions is None
    with pytest.raises(RuntimeError, match="built"):
        ours(input_ids=token_ids(), output_attentions=True)


def test_training_with_dropout() -> None:
    _, ours = make_pair("LlamaModel", "LlamaConfig", GROUPED, attention_dropout=0.5)
    ids = token_ids()
    in_eval = [ours(input_ids=ids)[0] for _ in range(2)]
    assert in_eval[0].equal(in_eval[1])
    ours.train()
    first, second = (ours(input_ids=ids, output_attentions=True) for _ in range(2))
    assert not first[0].equal(second[0])
    assert (first.attentions[0].sum(-1) - 1).abs().max() <= 1e-5, "weights are reported before dropout"
    first[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())


@torch.no_grad()
def test_compiles_without_a_graph_break() -> None:
    eager, ours = make_pair("BertModel", "BertConfig", SMALL)
    ours(input_ids=token_ids(), output_attentions=True)  # transformers installs its hooks, which cannot be traced
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    inputs = {"input_ids": token_ids(), "attention_mask": padding("right")}
    valid = inputs["attention_mask"].bool()
    expected, actual = eager(**inputs, output_attentions=True), compiled(**inputs, output_attentions=True)
    assert relative_error(actual[0][valid], expected[0][valid]) <= 1e-5
    assert len(actual.attentions) == 2


def test_clearhead_alone_imports_no_optional_package() -> None:
    code = "import clearhead, sys; print(sorted({'transformers', 'matplotlib', 'typer', 'rich'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_boundaries_without_data_are_refused(name: str) -> None:
    packed, starts = torch.randn(1, 2, 5, 4), torch.tensor([0, 3, 5])
    given: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, name: starts.to("meta")}
    with pytest.raises(DeviceError, match=rf"{name}: expected the \w+'s cpu, got meta"):
        integration.attention_forward(torch.nn.Module(), packed, packed, packed, None, **given)
