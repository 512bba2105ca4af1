"""`upgrade(model, unpad=True)`: encoders of transformers compute the same on real tokens alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.architectures import relative_error
from tests.integrations.conftest import Rows
from tests.integrations.encoders import (
    BATCH,
    ENCODERS,
    LENGTH,
    build,
    gradients_of,
    inputs_of,
    pair,
    require_near,
    without_pooler,
)

#: Encoders whose scores depend on distances, which padding between tokens is a part of.
DISTANCES = ("DebertaModel", "DebertaV2Model")


@pytest.mark.usefixtures("exact_eager")
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "right") for name in ENCODERS), *((name, "gaps") for name in ENCODERS if name not in DISTANCES)],
)
def test_outputs_and_gradients_at_real_tokens(rows: Rows, name: str, kind: str) -> None:
    # MPNet's bias counts the padding between two tokens.
    unpadded = (name, kind) != ("MPNetModel", "gaps")
    options = {"layer_types": ["full_attention"] * 2} if kind == "gaps" and name == "ModernBertModel" else {}
    given = inputs_of(kind)
    real = given["attention_mask"].bool()
    direction = torch.randn(int(real.sum()), 32, dtype=torch.float64)
    for dtype, bound in ((torch.float32, 2e-5), (torch.float64, 1e-10)):
        results: list[list[Tensor]] = []
        for model in pair(without_pooler(build(name, **options)).to(dtype)):
            output = model(**given, output_hidden_states=True)
            gradients = gradients_of(model, (output.last_hidden_state[real] * direction.to(dtype)).sum())
            states = [state[real] for state in output.hidden_states]
            results.append([*states, output.last_hidden_state[real], *gradients])
        assert rows.unpadded == unpadded
        assert output.last_hidden_state.shape == (BATCH, LENGTH, 32)
        assert not (unpadded and output.last_hidden_state[~real].any())
        assert len(results[0]) == len(results[1]) > 10
        # Gradients that are all but zero, such as those of keys' biases, are compared with the largest one.
        largest = max(tensor.abs().max().item() for tensor in results[0][4:])
        for expected, actual in zip(*results, strict=True):
            scale = max(expected.abs().max().item(), largest * 1e-2)
            assert (actual - expected).abs().max().item() <= bound * scale


def labels_of(head: str, real: Tensor) -> list[tuple[Tensor, bool]]:
    """Labels for a head, and whether padding is removed with them."""
    if head == "ForSequenceClassification":
        return [(torch.randint(0, 3, (BATCH,)), True)]
    labels = torch.randint(0, 2, (BATCH, LENGTH))
    if head == "ForPreTraining":  # ELECTRA's loss leaves padding out whatever its labels are
        return [(labels, True)]
    ignored = labels.masked_fill(~real, -100)
    single = ignored.clone()
    single[1, -1] = 1
    return [(ignored, True), (labels, False), (single, False)]


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *(
            (f"{name}Model", "ForSequenceClassification")
            for name in ("Bert", "DebertaV2", "Roberta", "DistilBert", "Electra")
        ),
        *((f"{name}Model", "ForTokenClassification") for name in ("Deberta", "Roberta", "DistilBert", "ModernBert")),
        *((f"{name}Model", "ForMaskedLM") for name in ("Bert", "DebertaV2", "ModernBert")),
        ("ElectraModel", "ForPreTraining"),
    ],
)
def test_heads_give_the_same_loss(rows: Rows, name: str, head: str) -> None:
    models, given = pair(build(name, head, num_labels=3)), inputs_of("right")
    real = given["attention_mask"].bool()
    for labels, unpadded in labels_of(head, real):
        expected, actual = (model(**given, labels=labels, output_hidden_states=True) for model in models)
        assert rows.unpadded == unpadded
        torch.testing.assert_close(actual.loss, expected.loss, rtol=2e-5, atol=0)
        require_near(actual.logits, expected.logits, None if labels.dim() == 1 else real)
        assert len(actual.hidden_states) == 3
        for state, its in zip(actual.hidden_states, expected.hidden_states, strict=True):
            require_near(state, its, real)
        gradients = [gradients_of(m, output.loss) for m, output in zip(models, (expected, actual), strict=True)]
        largest = max(float(gradient.abs().max()) for gradient in gradients[0])
        assert max(float((a - e).abs().max()) for e, a in zip(*gradients, strict=True)) <= 2e-5 * max(1.0, largest)
    models[1](**given)
    assert rows.unpadded


CALLS: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "by position": lambda model, given: model(given["input_ids"], given["attention_mask"]),
    "as a tuple": lambda model, given: model(**given, return_dict=False, output_hidden_states=True),
    "bool mask": lambda model, given: model(given["input_ids"], given["attention_mask"].bool()),
    "types of tokens": lambda model, given: model(**given, token_type_ids=given["input_ids"] % 2),
    "own positions": lambda model, given: model(**given, position_ids=torch.arange(LENGTH).flip(0)[None]),
    "embeddings": lambda model, given: model(
        inputs_embeds=model.embeddings.word_embeddings(given["input_ids"]), attention_mask=given["attention_mask"]
    ),
    "one layer's states": lambda model, given: model(**given, output_hidden_states=[1]),
    "inference mode": torch.inference_mode()(lambda model, given: model(**given)),
}


@pytest.mark.parametrize(("name", "call"), [*(("BertModel", call) for call in CALLS), ("RobertaModel", "embeddings")])
def test_ways_to_call(rows: Rows, name: str, call: str) -> None:
    given = inputs_of("right")
    outputs = [CALLS[call](model, given) for model in pair(build(name))]
    assert rows.unpadded
    assert type(outputs[0]) is type(outputs[1])
    expected, actual = (list(tensors(output)) for output in outputs)
    assert len(expected) == len(actual) >= 2  # the pooler's among them
    for theirs, ours in zip(expected, actual, strict=True):
        require_near(ours, theirs, given["attention_mask"] if theirs.dim() == 3 else None)


def tensors(output: Any) -> Iterator[Tensor]:
    for value in output.values() if isinstance(output, dict) else output:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors(value)


@pytest.mark.parametrize("kind", ["right", "left"])
def test_windows_reach_as_far_as_in_the_padded_batch(rows: Rows, kind: str) -> None:
    theirs, ours = pair(build("ModernBertModel"))
    given = inputs_of(kind)
    require_near(ours(**given)[0], theirs(**given)[0], given["attention_mask"])
    assert rows.unpadded


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(rows: Rows, reentrant: bool) -> None:
    theirs, ours = pair(without_pooler(build("BertModel")).train())
    name = "activation_checkpointing_enable"  # `gradient_…` in transformers 5.18
    enable = getattr(ours, name) if hasattr(ours, name) else ours.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    gradients, direction = [], torch.randn(int(real.sum()), 32)
    for model in (theirs, ours):
        embeddings = model.embeddings.word_embeddings(given["input_ids"]).detach().requires_grad_()
        output = model(inputs_embeds=embeddings, attention_mask=given["attention_mask"])[0]
        (output[real] * direction).sum().backward()
        gradients.append(embeddings.grad)
    assert rows.unpadded
    require_near(gradients[1], gradients[0])
    assert not gradients[1][~real].any()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(rows: Rows, autocast: bool) -> None:
    model = build("BertModel") if autocast else build("BertModel").to(torch.bfloat16)
    theirs, ours = pair(model)
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    exact = copy.deepcopy(theirs).double()(**given)[0][real]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rounded, actual = theirs(**given)[0], ours(**given)[0]
    assert rows.unpadded
    assert actual.dtype == rounded.dtype
    assert relative_error(actual[real].double(), exact) <= 2 * relative_error(rounded[real].double(), exact)
