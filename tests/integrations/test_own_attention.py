"""Encoders of transformers whose attention computes its softmax itself: `upgrade` puts it on Clearhead's attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from tests.integrations.architectures import VOCABULARY
from tests.integrations.conftest import Rows
from tests.integrations.encoders import BATCH, LENGTH, gradients_of, masks_of, pair, require_near
from tests.integrations.own_attention import OF_TOKENS, TYPES, given, make, upgraded


def cast_to(dtype: torch.dtype, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in arguments.items()}


def results(model: Any, arguments: dict[str, Tensor], direction: Tensor) -> list[Tensor]:
    """Weights, states and outputs at real tokens, and gradients."""
    output = model(**arguments, output_attentions=True, output_hidden_states=True)
    real = arguments["attention_mask"].bool()
    gradients = gradients_of(model, (output[0][:, :LENGTH][real] * direction.to(output[0])).sum())
    rows = [weights.transpose(1, 2)[:, :LENGTH][real] for weights in output.attentions]
    return [*rows, *(state[:, :LENGTH][real] for state in (*output.hidden_states, output[0])), *gradients]


@pytest.mark.usefixtures("exact_eager")
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", TYPES)
def test_outputs_weights_and_gradients(rows: Rows, name: str, side: str) -> None:
    arguments = given(name, side)
    direction = torch.randn(int(arguments["attention_mask"].sum()), 32, dtype=torch.float64)
    model = make(name)
    for dtype, bound in ((torch.float32, 2e-5), (torch.float64, 1e-10)):
        theirs = model.to(dtype)
        pairs = [results(each, cast_to(dtype, arguments), direction) for each in (theirs, upgraded(theirs))]
        assert not rows.unpadded
        assert len(pairs[0]) == len(pairs[1]) > 20
        largest = max(x.abs().max().item() for x in pairs[0][10:])
        for expected, actual in zip(*pairs, strict=True):
            assert (actual - expected).abs().max().item() <= bound * max(expected.abs().max().item(), largest * 1e-2)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", TYPES)
def test_outputs_without_weights(name: str, side: str) -> None:
    theirs, arguments = make(name), given(name, side)
    with torch.inference_mode():
        expected, actual = theirs(**arguments), upgraded(theirs)(**arguments)
    assert expected.keys() == actual.keys()
    require_near(actual[0][:, :LENGTH], expected[0][:, :LENGTH], arguments["attention_mask"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Luke", {"use_entity_aware_attention": False}),
        ("LayoutLMv3", {"has_spatial_attention_bias": False}),
        ("LayoutLMv3", {"has_relative_attention_bias": False, "has_spatial_attention_bias": False}),
        ("RoFormer", {"rotary_value": True}),
    ],
)
def test_settings_of_a_type(name: str, options: dict[str, Any]) -> None:
    theirs, arguments = make(name, **options), given(name, "right")
    actual, expected = (model(**arguments)[0][:, :LENGTH] for model in (upgraded(theirs), theirs))
    require_near(actual, expected, arguments["attention_mask"])


def test_luke_without_entities_and_layoutlm_without_a_page() -> None:
    for name, kept in (("Luke", 2), ("LayoutLMv3", 3)):
        theirs, arguments = make(name), dict([*given(name, "left").items()][:kept])
        actual, expected = (model(**arguments)[0] for model in (upgraded(theirs), theirs))
        require_near(actual, expected, arguments["attention_mask"])


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("name", OF_TOKENS)
def test_nan_in_padding_and_short_and_long_texts(name: str, unpad: bool) -> None:
    theirs = make(name, max_position_embeddings=600)
    ours = copy.deepcopy(theirs)
    clearhead.upgrade(ours, unpad=unpad)
    for length in (1, 512):
        ids = torch.randint(3, VOCABULARY, (2, length))
        require_near(ours(ids)[0], theirs(ids)[0])
    mask = masks_of("right")
    table = torch.randn(BATCH, LENGTH, theirs.get_input_embeddings().embedding_dim)
    poisoned = table.masked_fill(~mask.bool()[..., None], torch.nan)
    expected, actual = (
        model(inputs_embeds=embeds, attention_mask=mask)[0] for model, embeds in ((theirs, table), (ours, poisoned))
    )
    if unpad or name not in ("XLM", "Flaubert"):  # both multiply the padding by 0, whose NaN eager attention spreads
        require_near(actual, expected, mask)
    mask[1] = 0
    assert ours(inputs_embeds=table, attention_mask=mask)[0].isfinite().all()


def test_positions_of_the_caller_and_token_types(rows: Rows) -> None:
    for name in ("MPNet", "MegatronBert", "RemBert", "XLM"):
        theirs, ours = pair(make(name))
        more = {"position_ids": torch.arange(LENGTH).flip(0).expand(BATCH, -1).contiguous()}
        arguments = given(name, "right") | more
        if name != "MPNet":
            arguments["token_type_ids"] = arguments["input_ids"] % 2
        require_near(ours(**arguments)[0], theirs(**arguments)[0], arguments["attention_mask"])
        assert rows.unpadded


def test_masks_of_four_dimensions(rows: Rows) -> None:
    for name in ("MPNet", "RemBert", "RoFormer", "MegatronBert"):
        theirs, ours = pair(make(name))
        visible = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.5
        visible |= torch.eye(LENGTH).bool()
        additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
        require_near(ours(ids, attention_mask=additive)[0], theirs(ids, attention_mask=additive)[0])
        assert not rows.unpadded


@pytest.mark.parametrize("name", ["MegatronBert", "RemBert", "RoFormer"])
def test_decoders_with_a_cache_and_cross_attention(name: str) -> None:
    theirs = make(name, "ForCausalLM", is_decoder=True, add_cross_attention=True)
    ours, ids = upgraded(theirs), torch.randint(3, VOCABULARY, (2, 7))
    states = {"encoder_hidden_states": torch.randn(2, 7, 32)}
    expected, actual = (each(ids, use_cache=True, output_attentions=True, **states) for each in (theirs, ours))
    require_near(actual.logits, expected.logits)
    require_near(actual.attentions[1], expected.attentions[1])
    require_near(actual.cross_attentions[1], expected.cross_attentions[1])
    steps = [each(ids[:, :1], past_key_values=each(ids, use_cache=True).past_key_values) for each in (theirs, ours)]
    require_near(steps[1].logits, steps[0].logits)


HEADS = ["ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["MPNet", "MegatronBert", "RemBert", "RoFormer"])
def test_heads_and_labels(rows: Rows, name: str, head: str) -> None:
    theirs, ours = pair(make(name, head, num_labels=3, summary_type="first"))
    arguments = given(name, "right")
    labels = torch.randint(0, 3, (BATCH,))
    if head in ("ForMaskedLM", "ForTokenClassification"):
        labels = torch.randint(0, 3, (BATCH, LENGTH)).masked_fill(~arguments["attention_mask"].bool(), -100)
    if head == "ForMultipleChoice":
        arguments, labels = {key: x[None] for key, x in arguments.items()}, torch.tensor([1])
    expected, actual = (model(**arguments, labels=labels) for model in (theirs, ours))
    assert rows.unpadded
    torch.testing.assert_close(actual.loss, expected.loss, rtol=2e-5, atol=0)
    gradients = [gradients_of(m, output.loss) for m, output in ((theirs, expected), (ours, actual))]
    largest = max(float(gradient.abs().max()) for gradient in gradients[0])
    assert max(float((a - e).abs().max()) for e, a in zip(*gradients, strict=True)) <= 2e-5 * max(1.0, largest)


@pytest.mark.parametrize("summary", ["first", "last", "mean"])
@pytest.mark.parametrize("name", ["XLM", "Flaubert"])
def test_summaries(name: str, summary: str) -> None:
    theirs = make(name, "ForSequenceClassification", summary_type=summary)
    ours = copy.deepcopy(theirs)
    report = clearhead.upgrade(ours, unpad=summary == "first")
    assert bool(report.unpadded) == (summary == "first")
    arguments = given(name, "right")
    require_near(ours(**arguments).logits, theirs(**arguments).logits)


def test_language_embeddings(rows: Rows) -> None:
    theirs, ours = pair(make("XLM", n_langs=3))
    arguments = given("XLM", "left") | {"langs": torch.randint(0, 3, (BATCH, LENGTH))}
    require_near(ours(**arguments)[0], theirs(**arguments)[0], arguments["attention_mask"])
    assert rows.unpadded
