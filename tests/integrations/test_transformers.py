"""Clearhead inside transformers' models: what `test_architectures` does not call them with."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers.masking_utils import create_chunked_causal_mask

from tests.integrations.architectures import DECODERS, GROUPED, SMALL, make_pair, padding, relative_error, token_ids


@pytest.mark.parametrize(("side", "cache"), [("none", None), ("left", "static")])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_generation_equals_eager(name: str, side: str, cache: str | None) -> None:
    taken = inspect.signature(create_chunked_causal_mask).parameters
    if (name, cache) == ("llama4, chunks", "static") and "block_sequence_ids" not in taken:
        pytest.skip("this version of transformers calls its own chunked mask with an argument that it does not take")
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
    expected, actual = (model.generate(**inputs, **options) for model in make_pair(*DECODERS[name]))
    assert actual.sequences.equal(expected.sequences)
    for logits, expected_logits in zip(actual.logits, expected.logits, strict=True):
        assert relative_error(logits, expected_logits) <= 1e-5
    for weights, expected_weights in zip(actual.attentions[-1], expected.attentions[-1], strict=True):
        assert (weights - expected_weights).abs().max() <= 1e-5


@torch.no_grad()
def test_packed_sequences() -> None:
    eager, ours = make_pair("LlamaModel", "LlamaConfig", GROUPED)
    ids, positions = token_ids(9, 1), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    bounds = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
    expected = eager(input_ids=ids, position_ids=positions, use_cache=False)[0]
    for told in ({}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}):
        actual = ours(input_ids=ids, position_ids=positions, use_cache=False, **told)[0]
        assert relative_error(actual, expected) <= 1e-5


def test_weights_are_built_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = make_pair(*DECODERS["llama"])

    def unwanted(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("built")

    monkeypatch.setattr("clearhead._layer.mixing.compute_weights", unwanted)
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
