"""`upgrade(model, unpad=True)` in inference: an encoder's layers run in one loop, unless others have to see them."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead._native import extension
from clearhead.errors import ArgumentError
from clearhead.integrations import _lean
from clearhead.integrations._lean_families import FAMILIES
from tests.integrations.architectures import VOCABULARY, relative_error
from tests.integrations.conftest import Rows
from tests.integrations.encoders import BATCH, ENCODERS, LENGTH, build, inputs_of, pair, require_near

pytestmark = [
    pytest.mark.skipif(extension is None, reason="the loop needs the native kernel"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft reads it
]

LEAN = [name for name in ENCODERS if name in FAMILIES]


def without_padding() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH))}


@pytest.mark.parametrize("kind", ["right", "left", "gaps", "none"])
@pytest.mark.parametrize("name", LEAN)
@torch.no_grad()
def test_every_family_agrees_with_its_own_code(rows: Rows, name: str, kind: str) -> None:
    given = without_padding() if kind == "none" else inputs_of(kind)
    theirs, ours = pair(build(name))
    expected, actual = theirs(**given), ours(**given)
    assert rows.lean
    assert list(actual) == list(expected)
    assert type(actual) is type(expected)
    require_near(actual.last_hidden_state, expected.last_hidden_state, given.get("attention_mask"))
    if "pooler_output" in expected:
        require_near(actual.pooler_output, expected.pooler_output)


@pytest.mark.parametrize("name", LEAN)
@torch.no_grad()
def test_bfloat16_beside_float32_parameters(rows: Rows, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.integrations._upgrade.gains_by_bfloat16", lambda: True)
    theirs = build(name)
    ours, half = copy.deepcopy(theirs), copy.deepcopy(theirs).to(torch.bfloat16)
    clearhead.upgrade(ours, unpad=True, dtype=torch.bfloat16)
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    before = {name: parameter.clone() for name, parameter in ours.named_parameters()}
    expected, actual = theirs(**given)[0], ours(**given)[0]
    assert rows.dtypes == [torch.bfloat16]
    assert actual.dtype == torch.float32
    # At most twice the error of a model of bfloat16, whose norms are rounded too.
    error = relative_error(actual[real], expected[real])
    assert 1e-5 < error <= 2 * relative_error(half(**given)[0].float()[real], expected[real])
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, before[name])
    clearhead.downgrade(ours)
    assert torch.equal(ours(**given)[0], expected)


@torch.no_grad()
def test_a_second_upgrade_makes_new_copies(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.integrations._upgrade.gains_by_bfloat16", lambda: True)
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    first = ours(**given)[0]
    weight = ours.encoder.layer[0].intermediate.dense.weight
    places = torch.randperm(weight.numel())[:1]
    for model in (theirs, ours):
        model.encoder.layer[0].intermediate.dense.weight.data.view(-1)[places] += 30
    assert clearhead.upgrade(ours, unpad=True).unpadded == ("",)
    require_near(ours(**given)[0], theirs(**given)[0], given["attention_mask"])
    assert (ours(**given)[0] - first).abs().max() > 1e-3
    rows.dtypes.clear()
    clearhead.upgrade(ours, unpad=True, dtype=torch.bfloat16)
    ours(**given)
    assert rows.dtypes == [torch.bfloat16]
    clearhead.downgrade(ours)
    assert torch.equal(ours(**given)[0], theirs(**given)[0])


@torch.no_grad()
def test_a_model_of_bfloat16_runs_in_bfloat16(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel").to(torch.bfloat16))
    given, exact = inputs_of("right"), copy.deepcopy(theirs).float()
    real, expected = given["attention_mask"].bool(), exact(**given)[0]
    errors = [relative_error(model(**given)[0].float()[real], expected[real]) for model in (ours, theirs)]
    assert rows.dtypes == [torch.bfloat16]
    assert errors[0] <= 2 * errors[1]


def test_dtype_is_refused_with_words() -> None:
    model = build("BertModel")
    with pytest.raises(ArgumentError, match=r"expected torch\.bfloat16 or None"):
        clearhead.upgrade(model, unpad=True, dtype=torch.float16)
    with pytest.raises(ArgumentError, match="unpad=False"):
        clearhead.upgrade(model, dtype=torch.bfloat16)
    assert "forward" not in vars(model)


def test_the_report_tells_memory_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("BertModel")
    monkeypatch.setattr(_lean, "few_rows", lambda: 32)  # weights as they are, beside those that are laid out
    for gains, words in ((True, "in torch.bfloat16, on up to 0.0532 MB of"), (False, "bfloat16 would gain nothing")):
        monkeypatch.setattr("clearhead.integrations._upgrade.gains_by_bfloat16", lambda gains=gains: gains)
        report = clearhead.upgrade(copy.deepcopy(model), unpad=True, dtype=torch.bfloat16)
        assert words in str(report), report
    assert "float64" not in str(clearhead.upgrade(copy.deepcopy(model), unpad=True))
    report = clearhead.upgrade(model.double(), unpad=True)
    assert "run by their own code: its parameters are neither float32 nor bfloat16" in str(report)


def hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: None)


@contextlib.contextmanager
def grown() -> Any:
    """Every linear layer has a global hook."""
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        yield
    finally:
        handle.remove()


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def replace_layer(model: Any) -> None:
    layer = model.encoder.layer[0].intermediate
    doubled = Doubled(layer.dense.in_features, layer.dense.out_features)
    doubled.load_state_dict(layer.dense.state_dict())
    layer.dense = doubled


def patch_forward(model: Any) -> None:
    module = model.encoder.layer[1].output
    module.forward = lambda x, residual: type(module).forward(module, x, residual) + 1


#: Changes after which the layers' own code must run, and which change what it computes or can see it.
CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook on a linear layer": lambda model: hook(model.encoder.layer[0].output.dense),
    "a hook on a layer": lambda model: hook(model.encoder.layer[1]),
    "a hook on the list's owner": lambda model: hook(model.encoder),
    "a pre-hook": lambda model: model.encoder.layer[1].register_forward_pre_hook(lambda module, args: None),
    "another class": replace_layer,
    "another forward": patch_forward,
    "dropout in training": lambda model: model.encoder.layer[0].output.dropout.train(),
    "a spectral norm": lambda model: nn.utils.parametrizations.spectral_norm(model.encoder.layer[0].output.dense),
    "a compiled part": lambda model: model.encoder.layer[0].intermediate.compile(backend="eager"),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_the_layers_own_code_runs_after(rows: Rows, change: str) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    ours(**given)
    assert rows.lean
    for model in (theirs, ours):
        torch.manual_seed(0)
        CHANGES[change](model)
    states = []
    for model in (theirs, ours):
        torch.manual_seed(0)
        states.append(model(**given)[0])
    assert not rows.lean
    if change != "dropout in training":
        require_near(states[1], states[0], given["attention_mask"])


def adapt(model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(model, LoraConfig(r=2, target_modules=["query"])).eval()


def quantise(model: Any) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


REASONS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a hook": (CHANGES["a hook on a layer"], "have other code than transformers'"),
    "a hook on a linear layer": (CHANGES["a hook on a linear layer"], "have other code than transformers'"),
    "a compiled part": (CHANGES["a compiled part"], "a method of BertIntermediate was replaced"),
    "LoRA": (adapt, "has hooks, an adapter or other code than nn.Linear's"),
    "torchao": (quantise, "not all of its parameters are plain tensors on the CPU"),
}


@pytest.mark.parametrize("change", REASONS)
@torch.no_grad()
def test_the_report_says_why_the_layers_own_code_runs(rows: Rows, change: str) -> None:
    theirs, (apply, reason) = build("BertModel"), REASONS[change]
    ours = copy.deepcopy(theirs)
    for model in (theirs, ours):
        torch.manual_seed(0)
        apply(model)
    given, report = inputs_of("right"), clearhead.upgrade(ours, unpad=True)
    assert f"run by their own code: {report.loops[''].partition(': ')[2]}" in str(report)
    assert reason in report.loops[""]
    require_near(ours(**given)[0], theirs(**given)[0], given["attention_mask"])
    assert not rows.lean


def scale_weight(model: Any) -> None:
    model.encoder.layer[0].attention.self.key.weight.data.mul_(3)


def merge_adapter(model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=["query", "dense"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.05)
    merged: Any = adapted.merge_and_unload()
    assert merged is model


def use_function(model: Any) -> None:
    layer = model.encoder.layer[0].intermediate
    del layer.intermediate_act_fn
    layer.intermediate_act_fn = torch.sigmoid


def transpose(model: Any) -> None:
    weight = model.encoder.layer[0].attention.self.key.weight
    weight.data = weight.data.t()


#: Changes of what the layers compute, after which the loop has to make its copies again.
NEW_VALUES: dict[str, Callable[[Any], object]] = {
    "written through data": scale_weight,
    "written in place": lambda model: model.encoder.layer[0].output.dense.bias[3].add_(5),
    "one number": lambda model: model.encoder.layer[0].intermediate.dense.weight[3, 5].add_(100),
    "another parameter": lambda model: setattr(
        model.encoder.layer[1].intermediate.dense, "weight", nn.Parameter(torch.randn(40, 32), requires_grad=False)
    ),
    "another tensor in a parameter": lambda model: setattr(
        model.encoder.layer[1].intermediate.dense.weight, "data", torch.randn(40, 32)
    ),
    "a loaded state": lambda model: model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}),
    "another layer's module": lambda model: model.encoder.layer.__setitem__(0, copy.deepcopy(model.encoder.layer[1])),
    "fewer layers": lambda model: model.encoder.layer.__delitem__(1),
    "a norm's weight": lambda model: model.encoder.layer[0].output.LayerNorm.weight.mul_(2),
    "a norm's epsilon": lambda model: setattr(model.encoder.layer[0].output.LayerNorm, "eps", 0.5),
    "another activation": lambda model: setattr(model.encoder.layer[0].intermediate, "intermediate_act_fn", nn.ReLU()),
    "a function as activation": use_function,
    "a transposed square": transpose,
    "a merged adapter": merge_adapter,
}


@pytest.mark.parametrize("change", NEW_VALUES)
@torch.no_grad()
def test_copies_follow_the_parameters(rows: Rows, change: str) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    before = ours(**given)[0]
    for model in (theirs, ours):
        torch.manual_seed(0)
        NEW_VALUES[change](model)
    expected, actual = theirs(**given)[0], ours(**given)[0]
    real = given["attention_mask"].bool()
    assert relative_error(before[real], expected[real]) > 1e-3  # the change counts
    rows.batches.clear(), rows.dtypes.clear()
    require_near(ours(**given)[0], expected, given["attention_mask"])
    require_near(actual, expected, given["attention_mask"])


@torch.no_grad()
def test_an_adapter_is_merged_and_unmerged(rows: Rows) -> None:
    from peft import LoraConfig, get_peft_model

    model = build("BertModel")
    given = inputs_of("right")
    clearhead.upgrade(model, unpad=True)
    first = model(**given)[0]
    adapted: Any = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=["query", "dense"])).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.05)
    rows.batches.clear(), rows.dtypes.clear()
    with_adapter = adapted(**given)[0]
    assert not rows.lean
    adapted.merge_adapter()
    require_near(adapted(**given)[0], with_adapter, given["attention_mask"])
    adapted.unmerge_adapter()
    require_near(adapted(**given)[0], with_adapter, given["attention_mask"])
    adapted.merge_adapter()
    merged = adapted.unload()
    for name, module in merged.named_modules():
        assert "lora" not in name, module
    rows.batches.clear(), rows.dtypes.clear()
    require_near(merged(**given)[0], with_adapter, given["attention_mask"])
    assert rows.lean
    real = given["attention_mask"].bool()
    assert relative_error(first[real], with_adapter[real]) > 1e-3


def in_autocast(model: Any, given: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**given)


def with_forced_gemm(model: Any, given: Any) -> Any:
    with clearhead.use_linear("pytorch"):
        return model(**given)


def with_global_hook(model: Any, given: Any) -> Any:
    with grown():
        return model(**given)


def in_record(model: Any, given: Any) -> Any:
    with clearhead.record(model) as recorded:
        output = model(**given)
    assert len(recorded) == 2
    return output


def in_training(model: Any, given: Any) -> Any:
    model.train()
    try:
        return model(**given)
    finally:
        model.eval()


def by_configuration(model: Any, given: Any) -> Any:
    model.config.output_hidden_states = True
    try:
        output = model(**given)
    finally:
        model.config.output_hidden_states = False
    assert len(output.hidden_states) == 3
    return output


#: Calls for which the layers' own code runs, without gradients unless it says so.
OWN_CODE: dict[str, Callable[[Any, Any], Any]] = {
    "gradients": torch.enable_grad()(lambda model, given: model(**given)),
    "gradients of embeddings": torch.enable_grad()(
        lambda model, given: model.requires_grad_(False)(
            inputs_embeds=model.embeddings.word_embeddings(given["input_ids"]).requires_grad_(),
            attention_mask=given["attention_mask"],
        )
    ),
    "training": in_training,
    "hidden states": lambda model, given: model(**given, output_hidden_states=True),
    "hidden states by configuration": by_configuration,
    "weights": lambda model, given: model(**given, output_attentions=True),
    "autocast": in_autocast,
    "another GEMM": with_forced_gemm,
    "global hooks": with_global_hook,
    "record": in_record,
    "vmap": lambda model, given: torch.vmap(lambda scale: model(**given)[0] * scale)(torch.ones(2))[:1],
}


@pytest.mark.parametrize("call", OWN_CODE)
@torch.no_grad()
def test_the_layers_own_code_runs_in(rows: Rows, call: str) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    ours(**given)
    assert rows.lean
    expected = OWN_CODE[call](theirs, given) if call != "record" else theirs(**given)
    actual = OWN_CODE[call](ours, given)
    assert not rows.lean
    bound = 2e-2 if call == "autocast" else 2e-5
    real = given["attention_mask"].bool()
    assert relative_error(actual[0][real], expected[0][real]) <= bound
    require_near(ours(**given)[0], theirs(**given)[0], given["attention_mask"])
    assert rows.lean


@torch.no_grad()
def test_frozen_parameters_need_no_no_grad(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel").requires_grad_(False))
    given = inputs_of("right")
    with torch.enable_grad():
        require_near(ours(**given)[0], theirs(**given)[0], given["attention_mask"])
    assert rows.lean


@pytest.mark.parametrize("extra", ["input_ids twice", "empty text", "cross"])
@torch.no_grad()
def test_other_calls_run_as_before(rows: Rows, extra: str) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    if extra == "input_ids twice":
        given["inputs_embeds"] = torch.randn(BATCH, LENGTH, 32)
        with pytest.raises(ValueError, match="exactly one"):
            ours(**given)
        return
    if extra == "empty text":
        given["attention_mask"][2] = 0
    else:
        given["encoder_hidden_states"] = torch.randn(BATCH, 3, 32)
    expected, actual = theirs(**given)[0], ours(**given)[0]
    assert not rows.lean
    real = given["attention_mask"].bool()
    require_near(actual, expected, real)


@torch.no_grad()
def test_rows_that_the_caller_has_packed(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    counts = real.sum(1)
    bounds = nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    row = {
        "input_ids": given["input_ids"][real][None],
        "position_ids": torch.cat([torch.arange(int(count)) for count in counts])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": LENGTH,
        "max_length_k": LENGTH,
    }
    actual = ours(**row)[0]
    assert rows.lean
    require_near(actual[0], theirs(**given)[0][real])
    with torch.enable_grad():
        require_near(ours(**row)[0], actual)
    with pytest.raises(ArgumentError, match="last boundary"):
        ours(**row | {"cu_seq_lens_q": bounds[:-1], "cu_seq_lens_k": bounds[:-1]})


@pytest.mark.parametrize("length", [1, 512])
@torch.no_grad()
def test_lengths_of_one_text(rows: Rows, length: int) -> None:
    theirs, ours = pair(build("BertModel", max_position_embeddings=512))
    given = {"input_ids": torch.randint(3, VOCABULARY, (1, length))}
    require_near(ours(**given)[0], theirs(**given)[0])
    assert rows.lean
    with pytest.raises((IndexError, RuntimeError)):
        ours(input_ids=torch.randint(3, VOCABULARY, (1, 513)))


@torch.no_grad()
def test_nan_at_padding_reaches_nothing() -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    embedded = theirs.embeddings.word_embeddings(given["input_ids"])
    poisoned = embedded.masked_fill(~real[..., None], float("nan"))
    expected = theirs(inputs_embeds=embedded, attention_mask=given["attention_mask"])[0]
    actual = ours(inputs_embeds=poisoned, attention_mask=given["attention_mask"])[0]
    require_near(actual, expected, real)
    assert not actual[~real].any()


@pytest.mark.parametrize("name", ["BertModel", "EuroBertModel", "ModernBertModel"])
@torch.no_grad()
def test_the_callers_tensors_are_not_written(name: str) -> None:
    _, ours = pair(build(name))
    embedded = torch.randn(BATCH, LENGTH, 32)
    before = embedded.clone()
    ours(inputs_embeds=embedded)
    assert torch.equal(embedded, before)


@torch.no_grad()
def test_copies_save_and_threads(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    expected = ours(**given)[0]
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    rows.batches.clear(), rows.dtypes.clear()
    for model in (copy.deepcopy(ours), torch.load(buffer, weights_only=False)):
        assert torch.equal(model(**given)[0], expected)
        assert rows.lean
    results: list[Tensor] = []
    model = copy.deepcopy(ours)
    barrier = threading.Barrier(4)

    @torch.no_grad()
    def work() -> None:
        barrier.wait()
        results.extend(model(**given)[0] for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    assert all(relative_error(result, expected) <= 1e-6 for result in results)
    require_near(expected, theirs(**given)[0], given["attention_mask"])


@torch.no_grad()
def test_saved_pretrained_models_are_the_users_own(tmp_path: Any) -> None:
    from transformers import BertModel

    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    ours(**given)
    ours.save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    require_near(loaded(**given)[0], theirs(**given)[0], given["attention_mask"])
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter)


@torch.no_grad()
def test_a_compiled_model_runs_its_own_code(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    compiled = torch.compile(ours, backend="eager")
    require_near(compiled(**given)[0], theirs(**given)[0], given["attention_mask"])
    assert not rows.dtypes


@torch.no_grad()
def test_copies_die_with_their_model_and_by_downgrade() -> None:
    _, ours = pair(build("BertModel"))
    ours(**inputs_of("right"))
    layers = weakref.ref(ours.forward.args[-1]._layers)
    clearhead.downgrade(ours)
    gc.collect()
    assert layers() is None
    clearhead.upgrade(ours, unpad=True)
    ours(**inputs_of("right"))
    layers, model = weakref.ref(ours.forward.args[-1]._layers), weakref.ref(ours)
    del ours
    gc.collect()
    assert layers() is None
    assert model() is None


#: Arguments that every call of an encoder may have.
ARGUMENTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "types of tokens": lambda given: {"token_type_ids": given["input_ids"] % 2},
    "own positions": lambda given: {"position_ids": torch.arange(LENGTH).flip(0)[None]},
    "a bool mask": lambda given: {"attention_mask": given["attention_mask"].bool()},
}


@pytest.mark.parametrize("more", ARGUMENTS)
@torch.no_grad()
def test_arguments_of_the_caller(rows: Rows, more: str) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    expected, actual = (model(**given | ARGUMENTS[more](given)) for model in (theirs, ours))
    assert rows.lean
    require_near(actual[0], expected[0], given["attention_mask"])
    require_near(actual[1], expected[1])


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"])
@torch.no_grad()
def test_labels(rows: Rows, head: str) -> None:
    theirs, ours = pair(build("BertModel", head, num_labels=3))
    given = inputs_of("right")
    labels = torch.randint(0, 3, (BATCH, LENGTH)).masked_fill(given["attention_mask"] == 0, -100)
    labels = labels[:, 0] if head == "ForSequenceClassification" else labels
    expected, actual = (model(**given, labels=labels) for model in (theirs, ours))
    assert rows.lean
    torch.testing.assert_close(actual.loss, expected.loss, rtol=2e-5, atol=0)
    require_near(actual.logits, expected.logits, None if labels.dim() == 1 else given["attention_mask"])


@pytest.mark.parametrize("count", [1, 3])
@torch.no_grad()
def test_another_number_of_threads(rows: Rows, count: int) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    expected, before = ours(**given)[0], torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        actual = ours(**given)[0]
    finally:
        torch.set_num_threads(before)
    assert rows.lean
    assert relative_error(actual, expected) <= 1e-6
    require_near(actual, theirs(**given)[0], given["attention_mask"])
