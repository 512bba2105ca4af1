"""DeBERTa after `upgrade`: outputs, gradients, the calls that stay with transformers' code, and the way back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import clearhead
from clearhead.integrations import _deberta
from tests.integrations.architectures import VOCABULARY, padding
from tests.integrations.conftest import Rows
from tests.integrations.encoders import build, gradients_of

BATCH, LENGTH = 3, 29
V3 = {"position_buckets": 6, "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("DebertaV2Model", V3),
    "no position in the input": ("DebertaV2Model", V3 | {"position_biased_input": False, "type_vocab_size": 0}),
    "own keys and queries": ("DebertaV2Model", V3 | {"share_att_key": False}),
    "c2p": ("DebertaV2Model", V3 | {"share_att_key": False, "pos_att_type": ["c2p"]}),
    "p2c": ("DebertaV2Model", V3 | {"share_att_key": False, "pos_att_type": ["p2c"]}),
    "no buckets": ("DebertaV2Model", V3 | {"position_buckets": -1, "max_relative_positions": 7}),
    "steep buckets": ("DebertaV2Model", V3 | {"position_buckets": 16, "max_relative_positions": 12}),
    "a convolution": ("DebertaV2Model", V3 | {"conv_kernel_size": 3}),
    "v1": ("DebertaModel", {"pos_att_type": ["c2p", "p2c"]}),
    "v1, c2p": ("DebertaModel", {"pos_att_type": ["c2p"]}),
    "v1, few positions": ("DebertaModel", {"max_relative_positions": 9}),
}


def model_of(variant: str, head: str = "ForMaskedLM", **options: Any) -> Any:
    name, more = VARIANTS[variant]
    model = build(name, head, **{"relative_attention": True, **more, **options})
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "LayerNorm" not in parameter_name:
                parameter.normal_(std=0.3)
    return model


def upgraded(model: Any, **options: bool) -> Any:
    ours = copy.deepcopy(model)
    assert clearhead.upgrade(ours, **options).models == ("",)
    return ours


def inputs(side: str = "right") -> dict[str, Tensor]:
    given = {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH))}
    return given if side == "none" else given | {"attention_mask": padding(side, LENGTH)}


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients_are_those_of_eager_in_float64(rows: Rows, variant: str, side: str) -> None:
    model, given = model_of(variant), inputs(side)
    direction = torch.randn(BATCH, LENGTH, VOCABULARY, dtype=torch.float64)
    results: list[list[Tensor]] = []
    for each in (copy.deepcopy(model).double(), upgraded(model)):
        logits = each(**given).logits  # those of padding among them
        results.append([logits, *gradients_of(each, (logits * direction.to(logits.dtype)).sum())])
    assert rows.batches == [BATCH] * 2
    assert len(results[0]) == len(results[1])
    largest = max(gradient.abs().max().item() for gradient in results[0][1:])
    for number, (expected, actual) in enumerate(zip(*results, strict=True)):
        scale = expected.abs().max().item()
        assert (actual - expected).abs().max() <= 1e-5 * (scale if number == 0 else max(scale, largest * 1e-2))


def test_a_loss_that_reads_padding(rows: Rows) -> None:
    model = model_of("v3", "ForQuestionAnswering")
    given = inputs() | {"start_positions": torch.tensor([3, 1, 5]), "end_positions": torch.tensor([4, 4, 8])}
    torch.testing.assert_close(upgraded(model)(**given).loss, model(**given).loss, rtol=2e-5, atol=0)
    assert rows.batches == [BATCH] * 2
    report = clearhead.upgrade(model, unpad=True)
    assert report.left_padded == {"deberta": "the loss of DebertaV2ForQuestionAnswering counts the columns of padding"}


def test_a_convolution_keeps_padding(rows: Rows) -> None:
    model, given = model_of("a convolution"), inputs()
    ours = copy.deepcopy(model)
    report = clearhead.upgrade(ours, unpad=True)
    assert report.left_padded == {"deberta": "its convolution reads the padded batch"}
    torch.testing.assert_close(ours(**given).logits, model(**given).logits, rtol=0, atol=1e-4)
    assert rows.batches == [BATCH] * 2


#: Calls that transformers' code computes.
ORDINARY: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "weights": lambda model, given: model(**given, output_attentions=True),
    "autocast": lambda model, given: torch.autocast("cpu", torch.bfloat16)(model)(**given),
    "float64": lambda model, given: model.double()(**given),
    "fake tensors": lambda model, given: torch.compile(model, backend="eager")(**given),
}


@pytest.mark.parametrize(
    ("variant", "call"), [*(("v3", call) for call in ORDINARY), ("v1", "weights"), ("v1", "float64")]
)
def test_calls_of_transformers_own_code(rows: Rows, variant: str, call: str) -> None:
    model, given = model_of(variant, "Model"), inputs()
    ours = upgraded(model)
    expected, actual = (ORDINARY[call](each, given) for each in (model, ours))
    assert not rows.batches
    bound = 5e-2 if call == "autocast" else 1e-5
    torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, rtol=0, atol=bound)
    if call == "weights":
        torch.testing.assert_close(actual.attentions, expected.attentions)


@pytest.mark.parametrize("variant", ["v3", "v1"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_without_padding(rows: Rows, variant: str, dtype: torch.dtype) -> None:
    model, given = model_of(variant).to(dtype), inputs()
    real = given["attention_mask"].bool()
    expected, actual = (each(**given).logits[real] for each in (model, upgraded(model, unpad=True)))
    assert rows.batches == [1, 1]
    bound = 1e-10 if dtype is torch.float64 else 0.1
    assert (actual - expected).abs().max() <= bound * expected.abs().max()


def test_training_with_dropout(rows: Rows) -> None:
    model = model_of("v3", "Model", attention_probs_dropout_prob=0.4).train()
    ours, given = upgraded(model, unpad=True), inputs("none")
    torch.manual_seed(0)
    first, second = ours(**given)[0], ours(**given)[0]
    assert not torch.equal(first, second)
    mean = torch.stack([ours(**given)[0] for _ in range(300)]).mean(0)
    theirs = torch.stack([model(**given)[0] for _ in range(300)]).mean(0)
    assert (mean - theirs).abs().mean() < 0.1 * theirs.abs().mean()
    ours.eval()
    assert torch.equal(ours(**given)[0], ours(**given)[0])


# In transformers' own code too, reentrant checkpoints need embeddings of positions without a norm.
@pytest.mark.parametrize(("variant", "reentrant"), [("v3", False), ("v1", False), ("v1", True)])
def test_gradient_checkpointing(rows: Rows, variant: str, reentrant: bool) -> None:
    model, given = upgraded(model_of(variant).train(), unpad=True), inputs()
    real, results = given["attention_mask"].bool(), []
    for checkpointed in (False, True):
        if checkpointed:
            name = "activation_checkpointing_enable"  # `gradient_…` in transformers 5.18
            enable = getattr(model, name) if hasattr(model, name) else model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(**given).logits[real].square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert rows.batches == [1] * 6  # two of them again
    largest = max(float(gradient.abs().max()) for gradient in results[0])
    assert max(float((a - e).abs().max()) for e, a in zip(*results, strict=True)) <= 2e-5 * largest


def test_hooks_and_adapters_of_projections() -> None:
    model, given = model_of("v3", "Model"), inputs()
    ours = upgraded(model)
    seen: list[tuple[int, ...]] = []
    for each in (model, ours):
        projection = each.encoder.layer[0].attention.self.key_proj
        projection.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)) or 2 * output)
    torch.testing.assert_close(ours(**given)[0], model(**given)[0], rtol=0, atol=1e-4)
    assert len(seen) == 4  # for tokens and for positions, in each model


def test_a_record_sees_the_weights_of_transformers_code() -> None:
    ours = upgraded(model_of("v3", "Model"))
    with pytest.raises(clearhead.errors.RecordError, match="code of its own"), clearhead.record(ours):
        ours(**inputs())


COPIES: dict[str, Callable[[Any, Path], Any]] = {
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model, path: (torch.save(model, path / "m"), torch.load(path / "m", weights_only=False))[1],
}


@pytest.mark.parametrize("way", COPIES)
def test_copies_are_upgraded(rows: Rows, way: str, tmp_path: Path) -> None:
    model, given = upgraded(model_of("v1"), unpad=True), inputs()
    expected = model(**given).logits
    rows.batches.clear()
    assert torch.equal(COPIES[way](model, tmp_path)(**given).logits, expected)
    assert rows.unpadded


def test_a_saved_model_is_that_of_transformers(tmp_path: Path) -> None:
    model, given = model_of("v3"), inputs("none")
    upgraded(model).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert {type(module).__module__.partition(".")[0] for module in loaded.modules()} <= {"torch", "transformers"}
    torch.testing.assert_close(loaded(**given).logits, model(**given).logits)


@pytest.mark.parametrize("variant", ["v3", "v1"])
def test_downgrade_restores_the_classes(variant: str) -> None:
    model = model_of(variant)
    kinds, state = [type(module) for module in model.modules()], [set(vars(module)) for module in model.modules()]
    first = clearhead.upgrade(model, unpad=True)
    assert (first.models, first.unpadded) == (("",), ("deberta",))
    assert clearhead.upgrade(model).left == {"": "it runs on 'clearhead' already"}
    changed = {name for name, module in model.named_modules() if type(module).__module__ == _deberta.__name__}
    assert changed == {"deberta.encoder", *(f"deberta.encoder.layer.{n}.attention.self" for n in range(2))}
    assert clearhead.downgrade(model).models == ("",)
    assert [type(module) for module in model.modules()] == kinds
    assert [set(vars(module)) for module in model.modules()] == state
    assert clearhead.downgrade(model).models == ()


def test_a_model_that_was_loaded_with_the_name_is_upgraded(rows: Rows, tmp_path: Path) -> None:
    model, given = model_of("v3"), inputs("none")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation="clearhead").eval()
    torch.testing.assert_close(loaded(**given).logits, model(**given).logits)
    assert not rows.batches
    assert clearhead.upgrade(loaded).models == ("",)
    torch.testing.assert_close(loaded(**given).logits, model(**given).logits, rtol=0, atol=1e-4)
    assert rows.batches == [BATCH] * 2


class Own(transformers.models.deberta_v2.modeling_deberta_v2.DisentangledSelfAttention):
    """A user's attention."""


def of_a_subclass(model: Any) -> None:
    model.deberta.encoder.layer[1].attention.self.__class__ = Own


@pytest.mark.parametrize(
    ("variant", "options", "change", "reason"),
    [
        ("v3", {"relative_attention": False}, None, "its scores have no relative positions"),
        ("v3", {"pos_att_type": None, "share_att_key": False}, None, "its scores have no relative positions"),
        ("v1", {"talking_head": True}, None, "its heads mix their scores"),
        ("v3", {}, of_a_subclass, ".*Own is a subclass with code of its own"),
    ],
)
def test_other_attention_stays(
    variant: str, options: dict[str, Any], change: Callable[[Any], None] | None, reason: str
) -> None:
    model = model_of(variant, **options)
    if change is not None:
        change(model)
    kinds = [type(module) for module in model.modules()]
    report = clearhead.upgrade(model, linears=False)
    assert report.models == ()
    (why,) = report.left.values()
    assert why.endswith(reason.removeprefix(".*"))
    assert [type(module) for module in model.modules()] == kinds


def test_layers_that_were_replaced_see_what_transformers_gives_them() -> None:
    model, given = model_of("v1", "Model"), inputs()
    ours = upgraded(model, unpad=True)
    for each in (model, ours):
        part = each.encoder.layer[1].attention
        part.self.__class__ = transformers.models.deberta.modeling_deberta.DisentangledSelfAttention
    torch.testing.assert_close(ours(**given)[0], model(**given)[0], rtol=0, atol=1e-4)


MASK = padding("right", LENGTH)
POSITIONS = torch.arange(LENGTH)[None, :, None] - torch.arange(LENGTH).flip(0)[None, None]


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (MASK, {"relative_pos": POSITIONS}),
        (MASK[:, None] * MASK[:, :, None], {}),
        (MASK, {"query_states": torch.randn(BATCH, LENGTH, 32)}),
    ],
)
def test_arguments_of_an_encoder_that_its_model_never_passes(
    rows: Rows, mask: Tensor, options: dict[str, Tensor]
) -> None:
    model = model_of("v3", "Model")
    ours, states = upgraded(model), torch.randn(BATCH, LENGTH, 32)
    expected, actual = (each.encoder(states, mask, **options).last_hidden_state for each in (model, ours))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert not rows.batches
