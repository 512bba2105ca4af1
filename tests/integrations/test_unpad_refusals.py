"""`upgrade(model, unpad=True)`: which models and calls keep their padding, and how a model is restored."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import ArgumentError
from tests.integrations.architectures import VOCABULARY
from tests.integrations.conftest import Rows
from tests.integrations.encoders import BATCH, ENCODERS, LENGTH, build, inputs_of, masks_of, pair, require_near
from tests.support.snapshots import snapshot


def quantise_by_one_scale(model: nn.Module) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    granularity = pytest.importorskip("torchao.quantization.granularity").PerTensor()
    quantization.quantize_(
        model, quantization.Int8DynamicActivationInt8WeightConfig(granularity=granularity, version=2)
    )
    return model


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    # One scale for the activations of a whole batch.
    "quantised": (lambda: torch.ao.quantization.quantize_dynamic(build("BertModel"), {nn.Linear}), "right"),
    "quantised by torchao": (lambda: quantise_by_one_scale(build("BertModel")), "right"),
    "chunks of the configuration": (lambda: build("BertModel", chunk_size_feed_forward=1), "right"),
    "a window over gaps": (lambda: build("ModernBertModel"), "gaps"),
    "distances over gaps": (lambda: build("DebertaV2Model"), "gaps"),
    "positions scaled by the longest text": (
        lambda: build("NomicBertModel", rope_parameters=DYNAMIC, max_position_embeddings=8),
        "right",
    ),
}


NESTED = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
MODELS["positions of one kind of layer scaled by the longest text"] = (
    lambda: build("ModernBertModel", rope_parameters=NESTED, max_position_embeddings=8),
    "right",
)


class Own(nn.Module):
    """A layer of a user's own, which may mix the tokens of a text."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0


def hooked(part: nn.Module) -> None:
    part.register_forward_hook(lambda module, args, output: None)


def pooler_without_hooks(model: Any) -> None:
    model.pooler = copy.deepcopy(model.pooler)
    model.pooler._forward_pre_hooks.clear()


#: Changes of a model that is upgraded already.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "a layer of one's own": lambda model: setattr(model.encoder.layer[0].output, "dropout", Own()),
    "chunked feed-forward": lambda model: setattr(model.encoder.layer[1], "chunk_size_feed_forward", 1),
    "a hook inside": lambda model: hooked(model.encoder.layer[1].output.dense),
    "a hook on the embeddings": lambda model: hooked(model.embeddings),
    "a backward hook": lambda model: model.encoder.layer[0].register_full_backward_hook(lambda *_: None),
    "a replaced forward": lambda model: setattr(model.encoder.layer[0], "forward", model.encoder.layer[0].forward),
    "another attention": lambda model: model.set_attn_implementation("sdpa"),
    "another pooler": pooler_without_hooks,
}


def compare_padded(expected: Any, actual: Any, mask: Tensor) -> None:
    require_near(actual[0], expected[0], mask)
    assert bool(actual[0][~mask.bool()].any())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("why", [*MODELS, *CHANGES])
def test_models_that_keep_their_padding(rows: Rows, why: str) -> None:
    make, kind = MODELS.get(why, (lambda: build("BertModel"), "right"))
    theirs, ours = pair(make())
    if why in CHANGES:
        CHANGES[why](ours)
    given = inputs_of(kind)
    compare_padded(theirs(**given), ours(**given), given["attention_mask"])
    assert why == "another attention" or not rows.unpadded


ARGUMENTS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "weights": lambda mask: {"attention_mask": mask, "output_attentions": True},
    "a 4-D mask": lambda mask: {"attention_mask": mask[:, None, None].bool()},
    "no mask": lambda mask: {},
    "no padding": lambda mask: {"attention_mask": torch.ones_like(mask)},
    "a pooled column of padding": lambda mask: {"attention_mask": masks_of("left")},
    "a text without tokens": lambda mask: {"attention_mask": mask * (torch.arange(BATCH) != 2)[:, None]},
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_calls_that_keep_their_padding(rows: Rows, what: str) -> None:
    theirs, ours = pair(build("BertModel"))
    theirs.set_attn_implementation("eager" if what == "weights" else "sdpa")
    given = inputs_of("right")
    given = {"input_ids": given["input_ids"], **ARGUMENTS[what](given["attention_mask"])}
    expected, actual = theirs(**given), ours(**given)
    assert not rows.unpadded
    mask = given.get("attention_mask")
    require_near(actual[0], expected[0], mask if mask is not None and mask.dim() == 2 else None)
    assert what != "weights" or actual.attentions[1].shape == (BATCH, 4, LENGTH, LENGTH)


def test_recording_sees_the_batch() -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    with torch.no_grad(), clearhead.record(ours) as recorded:
        output = ours(**given)
    compare_padded(theirs(**given), output, given["attention_mask"])
    assert [recorded[name].entropy.shape[0] for name in recorded] == [BATCH, BATCH]


@torch.no_grad()
def test_graphs_are_traced_padded() -> None:
    theirs, ours = pair(build("BertModel", num_hidden_layers=1))
    given = inputs_of("right")
    exported = torch.export.export(ours, (), given, strict=False).module()
    for traced in (exported, torch.compile(ours, backend="eager")):
        compare_padded(theirs(**given), traced(**given), given["attention_mask"])


@pytest.mark.parametrize(("head", "unpadded"), [("ForSequenceClassification", False), ("ForTokenClassification", True)])
def test_heads_that_read_the_first_column(rows: Rows, head: str, unpadded: bool) -> None:
    """RoBERTa's classifier takes the first column, which its encoder cannot know; a tagger reads no padding."""
    theirs, ours = pair(build("RobertaModel", head))
    given = inputs_of("left")
    expected, actual = theirs(**given).logits, ours(**given).logits
    assert rows.unpadded is unpadded
    require_near(actual, expected, given["attention_mask"] if unpadded else None)


def test_an_error_inside_leaves_nothing_behind(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    with pytest.raises(IndexError):
        ours(**{**given, "input_ids": given["input_ids"] + VOCABULARY})
    unmasked = {"input_ids": given["input_ids"]}
    require_near(ours(**unmasked)[0], theirs(**unmasked)[0])
    assert not rows.unpadded
    require_near(ours(**given)[0], theirs(**given)[0], given["attention_mask"])
    assert rows.unpadded


KNOWN = rf"unpad: .* padding out \({', '.join(ENCODERS)}\) .*"


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: build("BertModel", "LMHeadModel", is_decoder=True), {}, f"{KNOWN}got BertModel as a decoder"),
        (lambda: build("BigBirdModel", "ForMaskedLM"), {}, f"{KNOWN}got BigBirdModel, which is not one of them"),
        (lambda: nn.Linear(2, 2), {}, f"{KNOWN}got Linear, which holds no model of transformers"),
        (lambda: build("BertModel"), {"attention": False}, "Clearhead's attention in the model, .*attention=False"),
    ],
)
def test_other_models_are_refused_by_name(make: Callable[[], nn.Module], options: dict[str, bool], text: str) -> None:
    model = make()
    before = snapshot(model, 40)
    with pytest.raises(ArgumentError, match=text):
        clearhead.upgrade(model, unpad=True, **options)
    assert snapshot(model, 40) == before


@pytest.mark.parametrize(
    ("name", "head", "options", "reason"),
    [
        ("BertModel", "ForQuestionAnswering", {}, "the loss of BertForQuestionAnswering counts the columns of padding"),
        ("ElectraModel", "ForMultipleChoice", {"summary_type": "last"}, "its summary reads the columns of padding"),
    ],
)
def test_a_head_that_reads_padding_keeps_it(name: str, head: str, options: dict[str, Any], reason: str) -> None:
    report = clearhead.upgrade(build(name, head, **options), unpad=True)
    encoder = name.removesuffix("Model").lower()
    assert (report.unpadded, report.left_padded) == ((), {encoder: reason})
    assert f"left padded: {encoder}, {reason}" in str(report)


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


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_downgrade_restores_everything(copied: Callable[[Any], Any]) -> None:
    model = build("BertModel", "ForSequenceClassification")
    before, attention = snapshot(model, 40), model.config._attn_implementation
    clearhead.upgrade(model, unpad=True)
    assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))
    assert inspect.signature(model.bert.forward) == inspect.signature(type(model.bert).forward.__get__(model.bert))
    ours = copied(model)
    assert ours.forward.args == (ours,)
    report = clearhead.downgrade(ours)
    assert (report.unpadded, report.models) == (("bert",), ("",))
    assert ours.config._attn_implementation == attention
    assert "forward" not in vars(ours) | vars(ours.bert)
    assert not ours.bert.pooler._forward_pre_hooks
    assert ours is not model or snapshot(model, 40) == before
    ours.forward = ours.forward
    assert "the forward of BertForSequenceClassification was replaced" in str(clearhead.upgrade(ours, unpad=True))


def test_upgrading_twice_registers_once() -> None:
    model = build("BertModel")
    clearhead.upgrade(model)
    assert clearhead.upgrade(model, attention=False, unpad=True).unpadded == ("",)
    report = clearhead.upgrade(model, unpad=True)
    assert (report.unpadded, report.left_padded) == (("",), {})
    assert len(model.pooler._forward_pre_hooks) == 1
    assert model.forward.__wrapped__.__func__ is type(model).forward  # and not the forward of the first time


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
    theirs, ours = pair(merged)
    given = inputs_of("right")
    require_near(ours(**given).pooler_output, theirs(**given).pooler_output)


def test_a_forward_that_accelerate_bound_once_more(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate")
    # accelerate keeps one precision per process, and a `Trainer` of another test has chosen it
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})
    theirs, ours = pair(build("BertModel"))
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    unwrapped = accelerator.unwrap_model(accelerator.prepare(ours), keep_fp32_wrapper=False)
    given = inputs_of("right")
    require_near(unwrapped(**given)[0], theirs(**given)[0], given["attention_mask"])
    assert rows.unpadded
    assert clearhead.downgrade(unwrapped).unpadded == ("",)


def test_another_process_reads_an_upgraded_model(tmp_path: Path) -> None:
    _, model = pair(build("BertModel"))
    given = inputs_of("right")
    torch.save((model, given, model(**given)[0]), tmp_path / "model.pt")
    read = f"model, given, expected = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)"
    check = "torch.testing.assert_close(model(**given)[0], expected, rtol=0, atol=1e-5)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", f"import torch; {read}; {check}"], check=True)
