"""The loop over an encoder's layers gives way where modules, settings or inputs are not what it takes them for."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import clearhead
from clearhead._native import extension
from clearhead.integrations import _lean
from clearhead.transformer import Encoder
from tests.integrations.architectures import relative_error
from tests.integrations.conftest import Rows
from tests.integrations.encoders import BATCH, LENGTH, build, inputs_of, pair, require_near
from tests.integrations.test_lean_stacks import STACKS, upgraded

pytestmark = pytest.mark.skipif(extension is None, reason="the loop needs the native kernel")

Change = Callable[[Any], object]


def cut(model: Any) -> None:
    model.layers = model.layers[:1]


def fewer_by_configuration(model: Any) -> None:
    model.config.num_hidden_layers = 1


def other_encoder(model: Any) -> None:
    torch.manual_seed(1)
    model.encoder = build("BertModel").encoder


def other_norm(model: Any) -> None:
    torch.manual_seed(1)
    name = "final_norm" if hasattr(model, "final_norm") else "LayerNorm"
    setattr(model, name, nn.LayerNorm(32).eval())
    nn.init.normal_(getattr(model, name).weight)


def other_scale(model: Any) -> None:
    for layer in model.encoder.layer:
        layer.attention.self.scaling = 0.05


def prune_heads(model: Any) -> None:
    attention = model.encoder.layer[0].attention
    own = attention.self
    for name in ("query", "key", "value"):
        old = getattr(own, name)
        new = nn.Linear(32, 16).eval()
        new.weight, new.bias = nn.Parameter(old.weight[:16].clone()), nn.Parameter(old.bias[:16].clone())
        setattr(own, name, new)
    output = nn.Linear(16, 32).eval()
    output.weight = nn.Parameter(attention.output.dense.weight[:, :16].clone())
    output.bias = attention.output.dense.bias
    attention.output.dense = output
    own.num_attention_heads, own.all_head_size = 2, 16


def other_window(model: Any) -> None:
    model.config.sliding_window = 1


def other_method(model: Any) -> None:
    for layer in model.encoder.layer:
        layer.feed_forward_chunk = lambda attention_output: attention_output * 2


def tanh_for_dropout(model: Any) -> None:
    model.encoder.layer[0].attention.output.dropout = nn.Tanh().eval()


def mixing_activation(model: Any) -> None:
    for layer in model.encoder.layer:
        del layer.intermediate.intermediate_act_fn
        layer.intermediate.intermediate_act_fn = lambda x: x - x.mean(-1, keepdim=True)


def gemma_norms(model: Any) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    for layer in model.layers:
        layer.input_layernorm = GemmaRMSNorm(32).eval()
        nn.init.constant_(layer.input_layernorm.weight, 0.7)


CHANGES: dict[str, tuple[str, Change]] = {
    "fewer layers": ("EuroBertModel", cut),
    "fewer layers of ModernBERT": ("ModernBertModel", cut),
    "fewer layers by the configuration": ("GteModel", fewer_by_configuration),
    "another encoder inside": ("BertModel", other_encoder),
    "another last norm": ("ModernBertModel", other_norm),
    "another last norm of RoBERTa": ("RobertaPreLayerNormModel", other_norm),
    "another scale": ("BertModel", other_scale),
    "fewer heads in one layer": ("BertModel", prune_heads),
    "another window in the configuration": ("ModernBertModel", other_window),
    "another method": ("BertModel", other_method),
    "something else than dropout": ("BertModel", tanh_for_dropout),
    "an activation of the user's": ("BertModel", mixing_activation),
    "norms of another model": ("EuroBertModel", gemma_norms),
}


@pytest.mark.parametrize("first", [True, False], ids=["after a call", "before"])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_of_what_layers_compute_are_seen(change: str, first: bool) -> None:
    name, apply = CHANGES[change]
    theirs = build(name)
    given, ours = inputs_of("right"), copy.deepcopy(theirs)
    clearhead.upgrade(ours, unpad=True)
    before = ours(**given)[0] if first else theirs(**given)[0]
    apply(theirs), apply(ours)
    if not first:
        ours = copy.deepcopy(theirs)
        clearhead.upgrade(ours, unpad=True)
    expected = theirs(**given)[0]
    real = given["attention_mask"].bool()
    assert relative_error(before[real], expected[real]) > 1e-3
    require_near(ours(**given)[0], expected, given["attention_mask"])


@pytest.mark.parametrize("name", ["EuroBertModel", "XLMRobertaXLModel", "BertModel", "DistilBertModel"])
@torch.no_grad()
def test_embeddings_in_any_layout(rows: Rows, name: str) -> None:
    theirs, ours = pair(build(name))
    for x in (torch.randn(LENGTH, BATCH, 32).transpose(0, 1), torch.randn(BATCH, 32, LENGTH).transpose(1, 2)):
        require_near(ours(inputs_embeds=x)[0], theirs(inputs_embeds=x)[0])
        assert rows.lean


@torch.no_grad()
def test_embeddings_of_another_width_are_refused_as_by_the_model() -> None:
    theirs, ours = pair(build("EuroBertModel"))
    ours(**inputs_of("right"))
    for width in (31, 64, 1 << 16):
        for model in (theirs, ours):
            with pytest.raises(RuntimeError):
                model(inputs_embeds=torch.randn(2, 5, width))


@torch.no_grad()
def test_parameters_without_memory_are_not_read() -> None:
    _, ours = pair(build("BertModel"))
    ours(**inputs_of("right"))
    for parameter in ours.encoder.parameters():
        parameter.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        ours(**inputs_of("right"))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@torch.no_grad()
def test_expanded_and_sparse_weights_run_their_own_code(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    ours(**given)
    for model in (theirs, ours):
        model.encoder.layer[0].output.dense.weight.data = torch.full((), 0.01).expand(32, 40)
    rows.batches.clear(), rows.dtypes.clear()
    require_near(ours(**given)[0], theirs(**given)[0], given["attention_mask"])
    assert not rows.lean
    sparse = build("BertModel")
    layer = sparse.encoder.layer[0].output.dense
    layer.weight = nn.Parameter(layer.weight.to_sparse_csr(), requires_grad=False)
    expected = sparse(**given)[0]
    clearhead.upgrade(sparse, unpad=True, linears=False)
    require_near(sparse(**given)[0], expected, given["attention_mask"])


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.LayerNorm(64)])
@torch.no_grad()
def test_norms_of_another_size_are_refused_as_by_the_model(norm: nn.Module) -> None:
    theirs, ours = pair(build("BertModel"))
    ours(**inputs_of("right"))
    for model in (theirs, ours):
        model.encoder.layer[0].output.LayerNorm = copy.deepcopy(norm).eval()
        with pytest.raises(RuntimeError):
            model(**inputs_of("right"))


def hold_back(model: Any) -> Callable[[], object]:
    """A hook that refers to its model, and how it is removed."""
    return model.encoder.layer[0].register_forward_hook(lambda *_: model.config and None).remove


def add_adapter(model: Any) -> Callable[[], object]:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["query"])).eval().unload


def transpose(model: Any) -> Callable[[], object]:
    weight = model.encoder.layer[0].attention.self.key.weight
    square = weight.data
    weight.data = square.t()
    return lambda: setattr(weight, "data", square)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("change", [hold_back, add_adapter, transpose])
@torch.no_grad()
def test_a_refusal_is_kept_until_something_changes(
    rows: Rows, change: Callable[[Any], Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = pair(build("BertModel"))
    readings: list[str] = []
    read = _lean._read
    monkeypatch.setattr(_lean, "_read", lambda *args: readings.append("") or read(*args))
    given, undo = inputs_of("right"), change(ours)
    change(theirs)
    for _ in range(3):
        require_near(ours(**given)[0], theirs(**given)[0], given["attention_mask"])
    assert len(readings) == 1
    assert not rows.lean
    undo()
    ours(**given)
    assert len(readings) == 2
    assert rows.lean
    if change is hold_back:
        change(ours)
        ours(**given)
        gone = weakref.ref(ours)
        del ours, undo
        gc.collect()
        assert gone() is None


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is nn.functional.linear else output


@torch.no_grad()
def test_modes_see_every_function(rows: Rows) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    ours(**given)
    clearhead.downgrade(copy.deepcopy(ours))
    rows.batches.clear(), rows.dtypes.clear()
    with Doubled(), clearhead.use_linear("pytorch"):
        actual = ours(**given)[0]
    assert not rows.dtypes
    with Doubled():
        ours(**given)
    assert not rows.dtypes
    assert actual.shape == theirs(**given)[0].shape


@torch.no_grad()
def test_a_forward_that_was_replaced_on_the_class_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair(build("BertModel"))
    given = inputs_of("right")
    ours(**given)
    own = type(theirs).forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output["last_hidden_state"] = output["last_hidden_state"] * 2
        return output

    monkeypatch.setattr(type(theirs), "forward", doubled)
    require_near(ours(**given)[0], theirs(**given)[0], given["attention_mask"])


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
def test_gradients_that_begin_inside_are_kept(name: str) -> None:
    theirs, ours = pair(build(name).requires_grad_(False))
    given, gradients = inputs_of("right"), []
    with torch.no_grad():
        ours(**given)
    for model in (theirs, ours):
        started: list[Tensor] = []

        def begin(module: nn.Module, args: Any, output: Tensor, started: list[Tensor] = started) -> Tensor:
            started.append(output.detach().requires_grad_())
            return started[-1]

        model.embeddings.register_forward_hook(begin)
        output = model(**given)[0]
        (gradient,) = torch.autograd.grad(output[0, 0, :3].sum(), started[-1])
        gradients.append(gradient)
    assert relative_error(gradients[1], gradients[0]) <= 2e-5


@torch.no_grad()
def test_boundaries_that_the_layers_refuse_are_refused() -> None:
    _, ours = pair(build("BertModel"))
    row = {"input_ids": torch.randint(3, 20, (1, 9)), "position_ids": torch.arange(9)[None]}
    first, second = torch.tensor([0, 4, 9]), torch.tensor([0, 5, 9])
    for boundaries in ({"cu_seq_lens_k": first}, {"cu_seq_lens_q": first, "cu_seq_lens_k": second}):
        with pytest.raises(clearhead.errors.ShapeError):
            ours(**row, **boundaries)


@torch.no_grad()
def test_positions_that_the_user_has_changed() -> None:
    model = build("BertModel")
    model.embeddings.position_ids = model.embeddings.position_ids.flip(1)
    theirs, ours = pair(model)
    for given in (inputs_of("right"), {"input_ids": inputs_of("right")["input_ids"]}):
        require_near(ours(**given)[0], theirs(**given)[0], given.get("attention_mask"))


@pytest.mark.parametrize("name", ["DebertaModel", "DebertaV2Model", "XLMModel", "FlaubertModel"])
@torch.no_grad()
def test_masks_that_scale_embeddings(name: str) -> None:
    theirs, ours = pair(build(name))
    given = inputs_of("right")
    given["attention_mask"] = given["attention_mask"] * 2
    require_near(ours(**given)[0], theirs(**given)[0], given["attention_mask"])


@torch.no_grad()
def test_a_part_may_be_downgraded_by_itself() -> None:
    theirs, ours = pair(build("BertModel", "ForSequenceClassification", num_labels=3))
    clearhead.upgrade(ours.bert, unpad=True)
    clearhead.downgrade(ours.bert)
    clearhead.downgrade(ours)
    assert "forward" not in vars(ours) | vars(ours.bert)
    given = inputs_of("right")
    assert torch.equal(ours(**given).logits, theirs(**given).logits)


@torch.no_grad()
def test_stacks_see_changes_and_any_layout() -> None:
    for kind in ("post-norm", "pre-norm"):
        model = STACKS[kind]()
        ours, x = upgraded(model), torch.randn(7, 2, 24).transpose(0, 1)
        assert relative_error(ours(x), model(x)) <= 1e-5
        for stack in (ours, model):
            stack.layers = stack.layers[:1]
        assert relative_error(ours(x), model(x)) <= 1e-5
        torch.manual_seed(0)
        norm = nn.LayerNorm(24).eval()
        nn.init.normal_(norm.weight)
        ours.norm = model.norm = norm
        assert relative_error(ours(x), model(x)) <= 1e-5


def test_stacks_check_arguments_as_before_and_learn_biases() -> None:
    ours = upgraded(STACKS["post-norm"]())
    with torch.no_grad():
        for x, mask in (([1, 2], None), (torch.randn(2, 7, 24), "x"), (torch.randn(2, 7, 25), None)):
            with pytest.raises(clearhead.errors.ClearheadError):
                ours(x, mask=mask)
    model = STACKS["post-norm"]().requires_grad_(False)
    bias = torch.randn(1, 4, 7, 7, requires_grad=True)
    model.layers[0].self_attention.mask = clearhead.masks.bias(bias)
    clearhead.upgrade(model, unpad=True)
    (gradient,) = torch.autograd.grad(model(torch.randn(2, 7, 24)).sum(), bias)
    assert gradient.abs().max() > 0
    rms = Encoder(STACKS["like Llama"]().layers, norm=nn.RMSNorm((7, 24))).eval()
    x = torch.randn(2, 7, 24)
    expected = rms(x)
    assert "several dimensions" in str(clearhead.upgrade(rms, unpad=True))
    assert relative_error(rms(x), expected) <= 1e-6
