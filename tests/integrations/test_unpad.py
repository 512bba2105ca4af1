"""`upgrade(model, unpad=True)`: what encoders of transformers give on real tokens alone, and when they run padded."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

import clearhead
from clearhead.errors import ArgumentError
from clearhead.integrations import transformers as integration
from clearhead.integrations._unpad import ENCODERS
from tests.integrations.architectures import SMALL, VOCABULARY, relative_error

BATCH, LENGTH = 5, 13
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "vocab_size": VOCABULARY, "pad_token_id": 0}
WINDOWS = {"local_attention": 6, "global_attn_every_n_layers": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "DistilBertModel": DISTILBERT,
    "ElectraModel": SMALL | {"embedding_size": 16},
    "EuroBertModel": SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "ModernBertModel": SMALL | WINDOWS,
}
NO_DROPOUT = {
    "attention_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": 0.0,
    "dropout": 0.0,
    "embedding_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "mlp_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}


def build(name: str, model: str = "Model", **options: Any) -> Any:
    """A random model; its weights are far from uniform attention, and everything but embeddings of padding counts."""
    stem = name.removesuffix("Model")
    config = getattr(transformers, f"{stem}Config")(**(OPTIONS.get(name, SMALL) | NO_DROPOUT | options))
    built = getattr(transformers, f"{stem}{model}")(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.85 / built.config.hidden_size**0.5)  # features of one size in any width
    return built


def without_pooler(model: Any) -> Any:
    model.pooler = None
    return model


def pair(model: Any) -> tuple[Any, Any]:
    """The model with transformers' own attention, padded, and a copy of it that leaves padding out."""
    ours = copy.deepcopy(model)
    assert clearhead.upgrade(ours, unpad=True).unpadded
    return model, ours


def require_same(theirs: Any, ours: Any, given: dict[str, Tensor], pooled: bool = False) -> None:
    """The two models agree on real tokens, and on what is read of them."""
    expected, actual, real = theirs(**given), ours(**given), given["attention_mask"].bool()
    assert relative_error(actual[0][real], expected[0][real]) <= 2e-5
    assert not pooled or relative_error(actual.pooler_output, expected.pooler_output) <= 2e-5
    assert type(actual) is type(expected)


def token_ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def masks_of(kind: str) -> Tensor:
    """(B, L), as a tokenizer gives it."""
    lengths = torch.tensor([LENGTH, 3, 1, 7, 9])[:, None]
    places = torch.arange(LENGTH)
    if kind == "right":
        return (places < lengths).long()
    if kind == "left":
        return (places >= LENGTH - lengths).long()
    real = torch.rand(BATCH, LENGTH) < 0.6
    real[:, 4] = True
    return real.long()


def inputs_of(kind: str) -> dict[str, Tensor]:
    mask = masks_of(kind)
    ids = token_ids()
    return {"input_ids": ids if kind == "gaps" else ids * mask, "attention_mask": mask}


class Rows:
    """Batch sizes of the attention that was computed: 1 if padding was left out."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    @property
    def unpadded(self) -> bool:
        assert self.batches
        assert len(set(self.batches)) == 1
        found = self.batches[0] == 1
        self.batches.clear()
        return found


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    seen = Rows()

    def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.batches.append(query.shape[0])
        return integration.attention_forward(module, query, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "clearhead", attend)
    return seen


# --- The same numbers ---


@pytest.mark.parametrize("kind", ["right", "left", "gaps"])
@pytest.mark.parametrize("name", ENCODERS)
def test_outputs_and_gradients_at_real_tokens(rows: Rows, name: str, kind: str) -> None:
    options = {} if kind != "gaps" or name != "ModernBertModel" else {"layer_types": ["full_attention"] * 2}
    given = inputs_of(kind)
    real = given["attention_mask"].bool()
    direction = torch.randn(int(real.sum()), 32, dtype=torch.float64)
    for dtype, bound in ((torch.float32, 2e-5), (torch.float64, 1e-10)):
        theirs, ours = pair(without_pooler(build(name, **options)).to(dtype))
        found: list[list[Tensor]] = []
        for model in (theirs, ours):
            output = model(**given, output_hidden_states=True)
            loss = (output.last_hidden_state[real] * direction.to(dtype)).sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
            states = [state[real] for state in output.hidden_states]
            found.append([*states, output.last_hidden_state[real], *(g for g in gradients if g is not None)])
            padded = output
        assert rows.unpadded
        assert padded.last_hidden_state.shape == (BATCH, LENGTH, 32)
        assert not padded.last_hidden_state[~real].any()
        assert len(found[0]) == len(found[1]) > 10
        # Gradients that are all but zero, such as those of keys' biases, are compared with the largest one.
        largest = max(tensor.abs().max().item() for tensor in found[0][4:])
        for expected, actual in zip(*found, strict=True):
            scale = max(expected.abs().max().item(), largest * 1e-2)
            assert (actual - expected).abs().max().item() <= bound * scale


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification"])
@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "DistilBertModel", "ModernBertModel"])
def test_labels_at_padding_count_as_before(rows: Rows, name: str, head: str) -> None:
    theirs, ours = pair(build(name, head, num_labels=3))
    given = inputs_of("right")
    real, labels = given["attention_mask"].bool(), torch.randint(0, 3, (BATCH, LENGTH))
    one_only = labels.masked_fill(~real, -100)
    one_only[1, -1] = 2
    for each, unpadded in ((labels, False), (labels.masked_fill(~real, -100), True), (one_only, False)):
        found: list[Tensor] = []
        for model in (theirs, ours):
            loss = model(**given, labels=each).loss
            found += [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
        assert rows.unpadded == unpadded
        count = len(found) // 2
        for actual, expected in zip(found[count:], found[:count], strict=True):
            assert (actual - expected).abs().max() <= 2e-5 * max(1.0, float(expected.abs().max()))
    ours(**given)
    assert rows.unpadded


def test_labels_of_a_head_that_ignores_padding_itself(rows: Rows) -> None:
    theirs, ours = pair(build("ElectraModel", "ForPreTraining"))
    given = inputs_of("right") | {"labels": torch.randint(0, 2, (BATCH, LENGTH))}
    torch.testing.assert_close(ours(**given).loss, theirs(**given).loss, rtol=2e-5, atol=0)
    assert rows.unpadded


def test_the_forward_of_a_head_is_restored_and_can_be_copied() -> None:
    model = build("BertModel", "ForMaskedLM")
    clearhead.upgrade(model, unpad=True)
    assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.forward.args == (other,)
    clearhead.downgrade(model)
    assert "forward" not in vars(model)
    model.forward = model.forward
    report = clearhead.upgrade(model, unpad=True)
    assert not report.unpadded
    assert "the forward of BertForMaskedLM was replaced" in str(report)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForMaskedLM", "ForTokenClassification"])
@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "DistilBertModel", "ElectraModel", "ModernBertModel"])
def test_heads_give_the_same_loss(rows: Rows, name: str, head: str) -> None:
    theirs, ours = pair(build(name, head, num_labels=3))
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    if head == "ForSequenceClassification":
        labels = torch.randint(0, 3, (BATCH,))
    else:
        labels = torch.randint(0, 3, (BATCH, LENGTH)).masked_fill(~real, -100)
    expected, actual = (model(**given, labels=labels, output_hidden_states=True) for model in (theirs, ours))
    assert rows.unpadded
    torch.testing.assert_close(actual.loss, expected.loss, rtol=2e-5, atol=0)
    logits = [output.logits if labels.dim() == 1 else output.logits[real] for output in (expected, actual)]
    assert relative_error(logits[1], logits[0]) <= 2e-5
    assert len(actual.hidden_states) == 3
    for state, its in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert relative_error(state[real], its[real]) <= 2e-5
    gradients = [
        torch.autograd.grad(output.loss, list(m.parameters())) for m, output in ((theirs, expected), (ours, actual))
    ]
    largest = max(float(gradient.abs().max()) for gradient in gradients[0])
    assert max(float((a - e).abs().max()) for e, a in zip(*gradients, strict=True)) <= 2e-5 * largest


def test_the_pooler_reads_the_padded_result(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel"))
    require_same(theirs, ours, inputs_of("right"), pooled=True)
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


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["BertModel", "RobertaModel"])
def test_ways_to_call(rows: Rows, name: str, call: str) -> None:
    theirs, ours = pair(build(name))
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    found = [CALLS[call](model, given) for model in (theirs, ours)]
    assert rows.unpadded
    assert type(found[0]) is type(found[1])
    expected, actual = (list(tensors(output)) for output in found)
    assert len(expected) == len(actual) >= 2
    for one, other in zip(expected, actual, strict=True):
        pick: Any = real if one.dim() == 3 else slice(None)
        assert relative_error(other[pick], one[pick]) <= 2e-5


def tensors(output: Any) -> Iterator[Tensor]:
    for value in output.values() if isinstance(output, dict) else output:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors(value)


def test_hooks_on_the_encoder_see_the_batch(rows: Rows) -> None:
    _, ours = pair(build("BertModel"))
    given, seen = inputs_of("right"), []
    ours.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True)
    ours.register_forward_hook(lambda _, args, output: seen.append(output[0].shape))
    ours(**given)
    assert rows.unpadded
    assert [tuple(shape[:2]) for shape in seen] == [(BATCH, LENGTH)] * 2


def test_the_signature_stays() -> None:
    theirs, ours = pair(build("BertModel"))
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)


def test_windows_reach_as_far_as_in_the_padded_batch(rows: Rows) -> None:
    theirs, ours = pair(build("ModernBertModel"))
    for kind in ("right", "left"):
        require_same(theirs, ours, inputs_of(kind))
        assert rows.unpadded


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(rows: Rows, reentrant: bool) -> None:
    theirs, ours = pair(without_pooler(build("BertModel")).train())
    ours.activation_checkpointing_enable({"use_reentrant": reentrant})
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    gradients, direction = [], torch.randn(int(real.sum()), 32)
    for model in (theirs, ours):
        embeddings = model.embeddings.word_embeddings(given["input_ids"]).detach().requires_grad_()
        output = model(inputs_embeds=embeddings, attention_mask=given["attention_mask"])[0]
        (output[real] * direction).sum().backward()
        gradients.append(embeddings.grad)
    assert rows.unpadded
    assert relative_error(gradients[1], gradients[0]) <= 2e-5
    assert not gradients[1][~real].any()


def test_autocast(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    exact = theirs(**given)[0][real]
    with torch.autocast("cpu", torch.bfloat16):
        rounded, actual = theirs(**given)[0], ours(**given)[0]
    assert rows.unpadded
    assert actual.dtype == rounded.dtype
    assert relative_error(actual[real].float(), exact) <= 2 * relative_error(rounded[real].float(), exact)


def test_bfloat16(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel").to(torch.bfloat16))
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    exact = copy.deepcopy(theirs).double()(**given)[0][real]
    expected, actual = theirs(**given)[0], ours(**given)[0]
    assert rows.unpadded
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual[real].double(), exact) <= 2 * relative_error(expected[real].double(), exact)


def test_dropout_agrees_in_distribution() -> None:
    """Means over many draws, within four of their standard errors, and the same spread."""
    model = without_pooler(
        build("BertModel", attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.3, num_hidden_layers=1)
    )
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    found = []
    with torch.no_grad():
        for each in pair(model.train()):
            found.append(torch.stack([each(**given)[0][real] for _ in range(150)]))
    mean, spread = ([f(draws, dim=0) for draws in found] for f in (torch.mean, torch.std))
    distance = (mean[0] - mean[1]).abs() / (spread[0].square() + spread[1].square()).div(150).sqrt().clamp_min(1e-6)
    assert float(distance.max()) <= 5.5  # of about a thousand numbers
    assert float(distance.square().mean()) == pytest.approx(1, abs=0.35)
    assert float(spread[1].mean() / spread[0].mean()) == pytest.approx(1, abs=0.05)


def test_nan_of_one_text_stays_in_it(rows: Rows) -> None:
    _, ours = pair(without_pooler(build("BertModel")))
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    embeddings = ours.embeddings.word_embeddings(given["input_ids"]).detach()
    clean = ours(inputs_embeds=embeddings, attention_mask=given["attention_mask"])[0]
    embeddings[3, 2] = float("nan")
    embeddings[~real] = float("nan")
    embeddings.requires_grad_()
    poisoned = ours(inputs_embeds=embeddings, attention_mask=given["attention_mask"])[0]
    assert rows.unpadded
    others = torch.arange(BATCH) != 3
    assert torch.equal(poisoned[others], clean[others])
    assert bool(poisoned[3][real[3]].isnan().all())
    (gradient,) = torch.autograd.grad(poisoned[others].square().sum(), embeddings)
    assert bool(gradient[others].isfinite().all())


# --- Calls that run padded ---


def hooked(model: Any, part: Callable[[Any], nn.Module]) -> None:
    part(model).register_forward_hook(lambda module, args, output: None)


BEFORE: dict[str, Callable[[Any], None]] = {
    "a hook inside": lambda model: hooked(model, lambda m: m.encoder.layer[1].output.dense),
    "a hook on the embeddings": lambda model: hooked(model, lambda m: m.embeddings),
    "a backward hook": lambda model: model.encoder.layer[0].register_full_backward_hook(lambda *_: None) and None,
    "a replaced forward": lambda model: setattr(model.encoder.layer[0], "forward", model.encoder.layer[0].forward),
    "chunked feed-forward": lambda model: setattr(model.config, "chunk_size_feed_forward", 1),
    "another attention": lambda model: model.set_attn_implementation("sdpa"),
    "another pooler": lambda model: setattr(model, "pooler", without_hooks(copy.deepcopy(model.pooler))),
}


def without_hooks(module: nn.Module) -> nn.Module:
    module._forward_pre_hooks.clear()
    return module


@pytest.mark.parametrize("why", BEFORE)
def test_models_that_keep_their_padding(rows: Rows, why: str) -> None:
    theirs, ours = pair(build("BertModel"))
    BEFORE[why](ours)
    if why == "chunked feed-forward":
        for layer in (*ours.encoder.layer, *theirs.encoder.layer):
            layer.chunk_size_feed_forward = 1
    given = inputs_of("right")
    compare_padded(theirs(**given), ours(**given), given)
    assert why == "another attention" or not rows.unpadded


GIVEN: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "weights": lambda given: {**given, "output_attentions": True},
    "a 4-D mask": lambda given: {**given, "attention_mask": given["attention_mask"][:, None, None].bool()},
    "no mask": lambda given: {"input_ids": given["input_ids"]},
    "no padding": lambda given: {**given, "attention_mask": torch.ones_like(given["attention_mask"])},
    "a pooled column of padding": lambda given: {**given, "attention_mask": masks_of("left")},
    "a text without tokens": lambda given: {
        **given,
        "attention_mask": given["attention_mask"] * (torch.arange(BATCH) != 2)[:, None],
    },
}


@pytest.mark.parametrize("what", GIVEN)
def test_calls_that_keep_their_padding(rows: Rows, what: str) -> None:
    theirs, ours = pair(build("BertModel"))
    theirs.set_attn_implementation("eager" if what == "weights" else "sdpa")
    given = GIVEN[what](inputs_of("right"))
    expected, actual = theirs(**given), ours(**given)
    assert not rows.unpadded
    some = given.get("attention_mask")
    if some is not None and some.dim() == 2:
        seen = some.bool()
        assert relative_error(actual[0][seen], expected[0][seen]) <= 2e-5
        assert actual[0][~seen].numel() == 0 or actual[0][~seen].any()
    else:
        assert relative_error(actual[0], expected[0]) <= 2e-5
    if what == "weights":
        assert len(actual.attentions) == 2
        assert actual.attentions[0].shape == (BATCH, 4, LENGTH, LENGTH)


def compare_padded(expected: Any, actual: Any, given: dict[str, Tensor]) -> None:
    real = given["attention_mask"].bool()
    assert relative_error(actual[0][real], expected[0][real]) <= 2e-5
    assert bool(actual[0][~real].any())


def test_a_window_over_gaps_keeps_padding(rows: Rows) -> None:
    theirs, ours = pair(build("ModernBertModel"))
    given = inputs_of("gaps")
    compare_padded(theirs(**given), ours(**given), given)
    assert not rows.unpadded


def test_positions_scaled_by_the_longest_text_keep_padding(rows: Rows) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    theirs, ours = pair(build("NomicBertModel", rope_parameters=scaling, max_position_embeddings=8))
    given = inputs_of("right")
    compare_padded(theirs(**given), ours(**given), given)
    assert not rows.unpadded


def test_recording_sees_the_batch() -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    with torch.no_grad(), clearhead.record(ours) as recorded:
        output = ours(**given)
    compare_padded(theirs(**given), output, given)
    assert [recorded[name].entropy.shape[0] for name in recorded] == [BATCH, BATCH]


def test_graphs_are_traced_padded() -> None:
    theirs, ours = pair(without_pooler(build("BertModel", num_hidden_layers=1)))
    given = inputs_of("right")
    with torch.no_grad():
        traced = torch.export.export(ours, (), given, strict=False).module()(**given)
    compare_padded(theirs(**given), traced, given)
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        compare_padded(theirs(**given), compiled(**given), given)


def test_heads_that_read_the_first_column(rows: Rows) -> None:
    """RoBERTa's classifier takes the first column, which its encoder cannot know; a tagger reads no padding."""
    given = inputs_of("left")
    for head, unpadded in (("ForSequenceClassification", False), ("ForTokenClassification", True)):
        theirs, ours = pair(build("RobertaModel", head))
        expected, actual = theirs(**given).logits, ours(**given).logits
        assert rows.unpadded is unpadded
        real = given["attention_mask"].bool()
        pick: Any = real if unpadded else slice(None)
        assert relative_error(actual[pick], expected[pick]) <= 2e-5


def test_an_error_inside_leaves_nothing_behind(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    too_large = {**given, "input_ids": given["input_ids"] + VOCABULARY}
    with pytest.raises(IndexError):
        ours(**too_large)
    whole = {"input_ids": given["input_ids"]}
    assert relative_error(ours(**whole)[0], theirs(**whole)[0]) <= 2e-5
    assert not rows.unpadded
    require_same(theirs, ours, given)
    assert rows.unpadded


# --- The model itself ---


def state(module: nn.Module) -> dict[str, Any]:
    """Everything a module holds, in a form that can be compared."""
    return {name: dict(part.__dict__) for name, part in module.named_modules()}


@pytest.mark.parametrize("way", ["itself", "deepcopy", "pickle"])
def test_downgrade_restores_everything(way: str) -> None:
    model = build("BertModel", "ForSequenceClassification")
    before, attention = state(model), model.config._attn_implementation
    clearhead.upgrade(model, unpad=True)
    copied = {"itself": lambda m: m, "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}[way](
        model
    )
    report = clearhead.downgrade(copied)
    assert (report.unpadded, report.models) == (("bert",), ("",))
    assert copied.config._attn_implementation == attention
    assert "forward" not in vars(copied.bert)
    assert not copied.bert.pooler._forward_pre_hooks
    if way == "itself":
        assert state(model) == before


def test_upgrading_twice_registers_once() -> None:
    model = build("BertModel")
    clearhead.upgrade(model, unpad=True)
    once = state(model)
    report = clearhead.upgrade(model, unpad=True)
    assert report.left_padded == {"": "it runs without padding already"}
    assert state(model) == once


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: build("BertModel", "LMHeadModel", is_decoder=True), "got BertModel as a decoder"),
        (lambda: build("DebertaV2Model", "ForMaskedLM"), "got DebertaV2Model, which is not one of them"),
        (lambda: nn.Linear(2, 2), "got Linear, which holds no model of transformers"),
    ],
)
def test_other_architectures_are_refused_by_name(model: Callable[[], nn.Module], text: str) -> None:
    given = model()
    before = state(given)
    with pytest.raises(ArgumentError, match=r"unpad: expected one of the encoders .*BertModel, .*" + text):
        clearhead.upgrade(given, unpad=True)
    assert state(given) == before


def test_without_clearheads_attention_it_is_refused() -> None:
    model = build("BertModel")
    before = state(model)
    with pytest.raises(ArgumentError, match=r"unpad: expected Clearhead's attention in the model, .*attention=False"):
        clearhead.upgrade(model, attention=False, unpad=True)
    assert state(model) == before
    clearhead.upgrade(model)
    assert clearhead.upgrade(model, attention=False, unpad=True).unpadded == ("",)


def test_a_head_that_counts_padding_keeps_it() -> None:
    report = clearhead.upgrade(build("BertModel", "ForQuestionAnswering"), unpad=True)
    assert report.unpadded == ()
    assert report.left_padded == {"bert": "the loss of BertForQuestionAnswering counts the columns of padding"}
    assert "left padded: bert, the loss" in str(report)


@pytest.mark.parametrize("summary", ["last", "mean"])
def test_a_head_that_summarizes_padding_keeps_it(summary: str) -> None:
    model = build("ElectraModel", "ForMultipleChoice", embedding_size=16, summary_type=summary)
    ours = copy.deepcopy(model)
    assert clearhead.upgrade(ours, unpad=True).left_padded == {"electra": "its summary reads the columns of padding"}
    given = {name: tensor[None] for name, tensor in inputs_of("right").items()}
    assert relative_error(ours(**given).logits, model(**given).logits) <= 2e-5


class AcrossTokens(nn.Module):
    """A layer of a user's own, which mixes the tokens of a text."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


def across_tokens(model: Any) -> Any:
    model.encoder.layer[0].output.dropout = AcrossTokens()
    return model


def quantised(model: Any) -> Any:
    """With one scale for the activations of a whole batch."""
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("change", [across_tokens, quantised])
def test_layers_that_mix_tokens_keep_padding(rows: Rows, change: Callable[[Any], Any]) -> None:
    expected, changed = pair(change(build("BertModel")))
    require_same(expected, changed, inputs_of("right"))
    assert not rows.unpadded


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_copies_of_the_pooler_are_found_again() -> None:
    peft = pytest.importorskip("peft")
    model = build("BertModel")
    clearhead.upgrade(model, unpad=True)
    config = peft.LoraConfig(target_modules=["query"], modules_to_save=["pooler"])
    adapted = peft.get_peft_model(model, config).eval()
    clearhead.downgrade(adapted)
    merged = adapted.merge_and_unload()
    assert not merged.pooler._forward_pre_hooks
    require_same(*pair(merged), inputs_of("right"), pooled=True)


def test_a_forward_that_accelerate_bound_once_more(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    # accelerate keeps one precision per process, and a `Trainer` of another test has chosen it
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})
    model = build("BertModel")
    given = inputs_of("right")
    expected = model(**given)[0]
    clearhead.upgrade(model, unpad=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    unwrapped = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
    real = given["attention_mask"].bool()
    assert relative_error(unwrapped(**given)[0][real], expected[real]) <= 2e-5
    assert rows.unpadded
    assert clearhead.downgrade(unwrapped).unpadded == ("",)


def test_another_process_reads_an_upgraded_model(tmp_path: Path) -> None:
    model = build("BertModel")
    clearhead.upgrade(model, unpad=True)
    given = inputs_of("right")
    torch.save((model, given, model(**given)[0]), tmp_path / "model.pt")
    read = f"model, given, expected = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)"
    check = "torch.testing.assert_close(model(**given)[0], expected, rtol=0, atol=1e-5)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", f"import torch; {read}; {check}"], check=True)


def test_an_error_in_the_middle_leaves_everything() -> None:
    model = nn.ModuleDict({"torch": nn.MultiheadAttention(8, 2), "bert": build("BertModel")})

    def fail(name: str) -> None:
        model["bert"].config._attn_implementation = name
        raise AttributeError("in the middle")

    model["bert"].set_attn_implementation = fail  # pyright: ignore[reportAttributeAccessIssue]
    before = model["bert"].config._attn_implementation
    with pytest.raises(AttributeError, match="in the middle"):
        clearhead.upgrade(model, unpad=True)
    assert type(model["torch"]) is nn.MultiheadAttention
    assert model["bert"].config._attn_implementation == before
    assert "forward" not in vars(model["bert"])


def test_monitored_steps_run_padded_and_the_others_without_padding(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel", "ForSequenceClassification").train())
    kept: dict[str, list[tuple[int, dict[str, float]]]] = {"theirs": [], "ours": []}
    given = inputs_of("right") | {"labels": torch.arange(BATCH) % 2}
    for name, model in (("theirs", theirs), ("ours", ours)):
        with clearhead.monitor(model, every=2, to=lambda step, values, name=name: kept[name].append((step, values))):
            for step in range(3):
                model(**given).loss.backward()
                assert model is theirs or rows.unpadded == (step == 1)
    assert [step for step, _ in kept["ours"]] == [0, 2]
    for (_, expected), (_, actual) in zip(*kept.values(), strict=True):
        assert actual == pytest.approx(expected, abs=1e-5)
    expected, actual = (torch.cat([each.grad.flatten() for each in m.parameters()]) for m in (theirs, ours))
    assert relative_error(actual, expected) <= 2e-5
