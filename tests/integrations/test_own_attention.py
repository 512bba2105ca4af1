"""Encoders of transformers whose attention computes its softmax itself: `upgrade` puts it on Clearhead's attention."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import clearhead
from tests.integrations.architectures import SMALL, VOCABULARY, relative_error
from tests.integrations.conftest import Rows
from tests.integrations.encoders import BATCH, LENGTH, OPTIONS, build, gradients_of, masks_of, pair, require_near

_BOXES = {"coordinate_size": 5, "shape_size": 6, "max_2d_position_embeddings": 64, "max_rel_2d_pos": 32}
_BINS = {"rel_pos_bins": 8, "max_rel_pos": 16, "rel_2d_pos_bins": 8, "input_size": 32, "patch_size": 8}
#: Options of small models of each type.
TYPES: dict[str, dict[str, Any]] = {
    "Flaubert": OPTIONS["FlaubertModel"],
    "LayoutLMv3": SMALL | _BOXES | _BINS,
    "Luke": SMALL | {"entity_vocab_size": 11, "entity_emb_size": 16},
    "MPNet": SMALL,
    "MegatronBert": SMALL,
    "RemBert": OPTIONS["RemBertModel"],
    "RoFormer": OPTIONS["RoFormerModel"],
    "XLM": OPTIONS["XLMModel"],
}
OF_TOKENS = [name for name in TYPES if name not in ("LayoutLMv3", "Luke")]


def make(name: str, model: str = "Model", **options: Any) -> Any:
    return build(f"{name}Model", model, **TYPES[name] | options)


def upgraded(model: Any) -> Any:
    """A copy that computes with Clearhead's attention, padded."""
    ours = copy.deepcopy(model)
    assert clearhead.upgrade(ours, linears=False).models == ("",)
    return ours


def given(name: str, side: str) -> dict[str, Tensor]:
    mask = torch.ones(BATCH, LENGTH).long() if side == "none" else masks_of(side)
    arguments = {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH)) * mask, "attention_mask": mask}
    if name == "LayoutLMv3":
        boxes = torch.randint(0, 30, (BATCH, LENGTH, 4)).sort(-1).values
        arguments |= {"bbox": boxes, "pixel_values": torch.randn(BATCH, 3, 32, 32)}
    if name == "Luke":
        entities = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 1]])
        arguments |= {"entity_ids": torch.randint(1, 11, (BATCH, 3)), "entity_attention_mask": entities}
        arguments["entity_position_ids"] = torch.randint(0, LENGTH, (BATCH, 3, 4))
    return arguments


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


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["MegatronBert", "RemBert", "RoFormer"])
def test_checkpointing_keeps_the_texts_of_a_row_apart(rows: Rows, name: str, reentrant: bool) -> None:
    theirs, ours = pair(make(name).train())
    ours.pooler = theirs.pooler = None
    enable = getattr(ours, "activation_checkpointing_enable", ours.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    arguments = given(name, "right")
    real = arguments["attention_mask"].bool()
    table = theirs.get_input_embeddings()(arguments.pop("input_ids")).detach()
    direction = torch.randn(int(real.sum()), 32)
    gradients: list[Any] = []
    for model in (theirs, ours):
        embeds = table.clone().requires_grad_()
        (model(inputs_embeds=embeds, **arguments)[0][real] * direction).sum().backward()
        gradients.append(embeds.grad)
    assert rows.batches
    require_near(gradients[1], gradients[0])


@pytest.mark.parametrize("name", TYPES)
def test_downgrade_copies_and_pickles(name: str) -> None:
    theirs, arguments = make(name), given(name, "right")
    ours = upgraded(theirs)
    output = ours(**arguments)[0]
    stored = io.BytesIO()
    torch.save(ours, stored)
    stored.seek(0)
    copies = copy.deepcopy(ours), torch.load(stored, weights_only=False), pickle.loads(pickle.dumps(ours))
    for each in copies:
        assert torch.equal(each(**arguments)[0], output)
    for each in (ours, *copies):
        assert clearhead.downgrade(each).models == ("",)
        kinds = [[type(part) for part in model.modules()] for model in (each, theirs)]
        assert kinds[0] == kinds[1]
        assert each.config._attn_implementation == theirs.config._attn_implementation
        assert torch.equal(each(**arguments)[0], theirs(**arguments)[0])


def test_saved_models_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = make("MPNet")
    upgraded(theirs).save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "ours/config.json").read_text() == (tmp_path / "theirs/config.json").read_text()
    loaded, arguments = transformers.AutoModel.from_pretrained(tmp_path / "ours"), given("MPNet", "left")
    assert torch.equal(loaded.eval()(**arguments)[0], theirs(**arguments)[0])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_hooks_and_adapters() -> None:
    theirs, arguments = make("MPNet"), given("MPNet", "right")
    theirs.encoder.layer[0].attention.attn.q.register_forward_hook(lambda module, args, output: output * 2)
    require_near(upgraded(theirs)(**arguments)[0], theirs(**arguments)[0], arguments["attention_mask"])
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make("MPNet"), peft.LoraConfig(target_modules=["q", "v"], init_lora_weights=False))
    ours = copy.deepcopy(adapted.eval())
    assert len(clearhead.upgrade(ours, unpad=True).unpadded) == 1
    require_near(ours(**arguments)[0], adapted(**arguments)[0], arguments["attention_mask"])
    ours.merge_adapter(), adapted.merge_adapter()
    require_near(ours(**arguments)[0], adapted(**arguments)[0], arguments["attention_mask"])


def test_other_attention_classes_stay() -> None:
    model = make("MPNet")
    attention: Any = model.encoder.layer[1].attention.attn
    attention.__class__ = type("Own", (type(attention),), {})
    report = clearhead.upgrade(model)
    assert "Own is a subclass with code of its own" in report.left[""]
    assert model.config._attn_implementation == "eager"
    assert type(model.encoder.layer[0].attention.attn).__module__.startswith("transformers.")
    model = make("RemBert", output_attentions=True)
    assert "output_attentions" in clearhead.upgrade(model).left[""]


@pytest.mark.parametrize("name", ["Luke", "LayoutLMv3"])
def test_encoders_that_keep_their_padding(name: str) -> None:
    model = make(name)
    report = clearhead.upgrade(model, unpad=True)
    assert report.models == ("",)
    assert report.left_padded[""].startswith("its ")


@pytest.mark.parametrize("name", ["MPNet", "XLM", "RoFormer"])
def test_compiled(name: str) -> None:
    theirs, arguments = make(name), given(name, "right")
    compiled = torch.compile(upgraded(theirs), backend="aot_eager")
    with torch.no_grad():
        require_near(compiled(**arguments)[0], theirs(**arguments)[0], arguments["attention_mask"])


@pytest.mark.parametrize("name", TYPES)
def test_autocast(name: str) -> None:
    theirs, arguments = make(name), given(name, "right")
    real, exact = arguments["attention_mask"].bool(), theirs(**arguments)[0][:, :LENGTH]
    with torch.autocast("cpu", torch.bfloat16):
        rounded, actual = (model(**arguments)[0][:, :LENGTH] for model in (theirs, upgraded(theirs)))
    assert actual.dtype == rounded.dtype
    assert relative_error(actual[real], exact[real]) <= 2 * relative_error(rounded[real], exact[real])


@pytest.mark.parametrize("name", TYPES)
def test_records_are_of_the_weights_of_eager(name: str) -> None:
    theirs, arguments = make(name), given(name, "right")
    ours = upgraded(theirs)
    with torch.no_grad(), clearhead.record(ours) as record:
        ours(**arguments)
    weights, real = theirs(**arguments, output_attentions=True).attentions, arguments["attention_mask"].bool()
    assert len(record) == len(weights) == 2
    for part, expected in zip(record, weights, strict=True):
        entropy = torch.special.entr(expected).sum(-1).transpose(1, 2)[:, :LENGTH]  # (B, L, H)
        require_near(record[part][0].entropy.transpose(1, 2)[:, :LENGTH], entropy, real)


def test_dropout_in_training() -> None:
    torch.manual_seed(0)
    model = upgraded(make("MPNet", attention_probs_dropout_prob=0.5)).train()
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    first, second = model(ids)[0], model(ids)[0]
    assert not torch.equal(first, second)
    assert torch.equal(model.eval()(ids)[0], model(ids)[0])


def test_threads() -> None:
    theirs, ours = pair(make("RoFormer"))
    batches = [given("RoFormer", side) for side in ("left", "right", "none") * 3]
    found: dict[int, Tensor] = {}

    def run(number: int) -> None:
        with torch.no_grad():
            found[number] = ours(**batches[number])[0]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, batch in enumerate(batches):
        require_near(found[number], theirs(**batch)[0], batch["attention_mask"])
