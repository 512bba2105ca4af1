"""`clearhead.upgrade` and `clearhead.downgrade`: what changes in a model, and everything that must not."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from tests.support.snapshots import snapshot

E, H, N, L = 12, 2, 3, 5
LENGTHS = (5, 2, 4)
PADDING = torch.arange(L)[None] >= torch.tensor(LENGTHS)[:, None]  # (N, L)


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def transformer() -> nn.Transformer:
    return nn.Transformer(E, H, 1, 2, 16, dropout=0.0, batch_first=True)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, L, E)


@pytest.fixture
def inference() -> Iterator[None]:
    """Where PyTorch's layers leave their submodules for fused code."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        yield


def test_every_attention_module_becomes_clearheads_with_the_same_parameters() -> None:
    model = transformer()
    parameters, names_before = list(model.parameters()), list(model.state_dict())
    report = clearhead.upgrade(model)
    names = ["encoder.layers.0.self_attn"]
    names += [f"decoder.layers.{index}.{part}" for index in range(2) for part in ("self_attn", "multihead_attn")]
    assert (report.changed, report.left, report.encoders) == (tuple(names), {}, ("encoder",))
    assert {type(model.get_submodule(name)) for name in names} == {clearhead.nn.MultiheadAttention}
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names_before


class OwnAttention(nn.MultiheadAttention):
    """Stands for anybody's subclass."""


class OwnClearhead(clearhead.nn.MultiheadAttention):
    """A subclass of ours."""


def test_subclasses_are_left_alone_and_named() -> None:
    model = nn.ModuleDict(
        {
            "own": OwnAttention(E, H),
            "plain": nn.MultiheadAttention(E, H),
            "ours": clearhead.nn.MultiheadAttention(E, H),
            "own_ours": OwnClearhead(E, H),
            "linear": nn.Linear(E, E),
        }
    )
    report = clearhead.upgrade(model)
    assert report.changed == ("plain",)
    assert set(report.left) == {"own", "ours", "own_ours"}
    assert "OwnAttention" in report.left["own"]
    assert "Clearhead's already" in report.left["ours"]
    assert [type(model[name]) for name in ("own", "own_ours")] == [OwnAttention, OwnClearhead]
    assert not model["own"]._forward_pre_hooks

    report = clearhead.downgrade(model)
    assert report.changed == ("plain", "ours")
    assert set(report.left) == {"own_ours"}
    assert "OwnClearhead" in report.left["own_ours"]


def test_upgrading_twice_changes_nothing_more() -> None:
    model = encoder()
    clearhead.upgrade(model)
    once = snapshot(model, 40)
    report = clearhead.upgrade(model)
    assert report.changed == ()
    assert set(report.left) == {"layers.0.self_attn", "layers.1.self_attn"}
    assert snapshot(model, 40) == once


def count_calls(module: nn.Module) -> list[int]:
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    module.register_forward_hook(count)
    return calls


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("floats", [True, False])
def test_the_nested_tensor_path_of_the_encoder(x: Tensor, has_norm: bool, floats: bool) -> None:
    """PyTorch leaves padding out and puts zeros there before the last norm; upgraded, the outputs are the same."""
    model = encoder().eval()
    if has_norm:
        model.norm = nn.LayerNorm(E)
        nn.init.normal_(model.norm.bias)
    padding = torch.zeros(N, L).masked_fill(PADDING, -torch.inf) if floats else PADDING
    fast = model(x, src_key_padding_mask=padding)
    assert bool((fast[PADDING] == (model.norm.bias if model.norm is not None else 0)).all())

    report = clearhead.upgrade(model)
    assert report.encoders == ("",)
    calls = [count_calls(layer.self_attn.out_proj) for layer in model.layers]
    upgraded = model(x, src_key_padding_mask=padding)
    assert calls == [[1], [1]]
    torch.testing.assert_close(upgraded, fast, atol=1e-5, rtol=0)
    assert torch.equal(upgraded[PADDING], fast[PADDING])
    assert torch.equal(model(x, None, padding), upgraded)
    hooks = len(model._forward_hooks)
    clearhead.upgrade(model)
    assert len(model._forward_hooks) == hooks


SOFT = torch.linspace(-1.5, 0.5, N * L).view(N, L)
FLOATS: dict[str, Tensor] = {
    "numbers": SOFT,
    "numbers of which one is zero": SOFT.clone().index_fill_(1, torch.tensor(0), 0.0),
    "large numbers": torch.zeros(N, L).masked_fill(PADDING, -1e4),
    "numbers and padding": SOFT.masked_fill(PADDING, -torch.inf),
    "padding": torch.zeros(N, L).masked_fill(PADDING, -torch.inf),
    "holes": SOFT.masked_fill(PADDING.flip(1), -torch.inf),
    "halves": SOFT.half().masked_fill(PADDING, -torch.inf),
    "doubles": SOFT.double().masked_fill(PADDING, -torch.inf),
}


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", FLOATS)
def test_numbers_in_a_padding_mask_hide_no_token(x: Tensor, name: str, checked: bool) -> None:
    """PyTorch takes every number but 0 for padding in inference, and adds it to the scores elsewhere."""
    padding, hidden = FLOATS[name], FLOATS[name].isneginf()
    model = encoder().eval()
    model.mask_check = checked
    with torch.enable_grad():
        expected = model(x, src_key_padding_mask=padding.float()).detach()  # other dtypes are refused
        clearhead.upgrade(model)
        in_training = model(x, src_key_padding_mask=padding).detach()
    in_inference = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(in_training, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(in_inference[~hidden], expected[~hidden], atol=1e-5, rtol=0)
    is_removed = name != "holes" or not checked  # PyTorch removes padding at the ends
    assert bool((in_inference[hidden] == 0).all()) == (is_removed or not hidden.any())


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("argument", ["src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask"])
@pytest.mark.parametrize("name", ["numbers", "numbers and padding"])
def test_numbers_in_the_masks_of_a_transformer(x: Tensor, argument: str, name: str) -> None:
    model, masks = transformer().eval(), {argument: FLOATS[name]}
    with torch.enable_grad():
        expected = model(x, x, **masks).detach()
        clearhead.upgrade(model)
        torch.testing.assert_close(model(x, x, **masks).detach(), expected, atol=1e-5, rtol=0)
    if argument == "src_key_padding_mask":
        masks["memory_key_padding_mask"] = FLOATS[name]  # or the decoder attends to what inference removes
        with torch.enable_grad():
            expected = model(x, x, **masks).detach()
    torch.testing.assert_close(model(x, x, **masks), expected, atol=1e-5, rtol=0)


WITHOUT_NESTED_TENSORS = ("gradients", "training", "left padding", "a mask too", "no padding", "switched off")


@pytest.mark.parametrize("why", WITHOUT_NESTED_TENSORS)
def test_padded_outputs_stay_where_pytorch_keeps_them(x: Tensor, why: str) -> None:
    model = encoder().train(why == "training")
    options: dict[str, Any] = {} if why == "no padding" else {"src_key_padding_mask": PADDING}
    if why == "left padding":
        options["src_key_padding_mask"] = PADDING.flip(1)
    if why == "a mask too":
        options["mask"] = torch.zeros(L, L, dtype=torch.bool)
    switched_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(why != "switched off")
    try:
        with torch.set_grad_enabled(why in ("gradients", "training")), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
            expected = model(x, **options)
            clearhead.upgrade(model)
            torch.testing.assert_close(model(x, **options), expected, atol=1e-5, rtol=0)
            assert bool((expected[PADDING] != 0).all())
    finally:
        torch.backends.mha.set_fastpath_enabled(switched_on)


@pytest.mark.usefixtures("inference")
def test_an_encoder_built_from_an_upgraded_layer(x: Tensor) -> None:
    """Copying an upgraded layer keeps Clearhead's class, but the new encoder's nested-tensor path is on."""
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True)
    clearhead.upgrade(layer)
    model = nn.TransformerEncoder(layer, 2).eval()
    assert clearhead.upgrade(model).encoders == ("",)
    assert bool(model(x, src_key_padding_mask=PADDING).isfinite().all())


def test_a_stack_translates_its_masks_once_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    translated: list[Tensor] = []
    bias = clearhead.masks.bias
    monkeypatch.setattr("clearhead.nn._convention.bias", lambda x: (translated.append(x), bias(x))[1])
    layer = nn.TransformerEncoderLayer(12, 3, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False).eval()
    clearhead.upgrade(model)
    padding = torch.arange(7) >= torch.tensor([[7], [5]])
    for number in (1, 2):
        with torch.no_grad():
            model(torch.randn(2, 7, 12), src_key_padding_mask=padding)  # which the stack hands on as numbers
        assert len(translated) == number


def test_encoders_without_an_upgraded_module_keep_their_nested_tensors() -> None:
    own = encoder()
    for layer in own.layers:
        layer.self_attn.__class__ = OwnAttention
    model = nn.ModuleDict({"own": own, "plain": encoder()})
    report = clearhead.upgrade(model)
    assert report.encoders == ("plain",)
    assert own.use_nested_tensor


def test_downgrade_restores_everything(x: Tensor) -> None:
    model = transformer().eval()
    handle = model.encoder.layers[0].self_attn.register_forward_pre_hook(lambda module, args: None)
    before = snapshot(model, 40)
    expected = model(x, x)
    clearhead.upgrade(model)
    assert snapshot(model, 40) != before

    report = clearhead.downgrade(model)
    assert len(report.changed) == 5
    assert report.encoders == ("encoder",)
    assert snapshot(model, 40) == before
    assert torch.equal(model(x, x), expected)
    assert not any(isinstance(part, clearhead.nn.MultiheadAttention) for part in model.modules())
    handle.remove()
    assert not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("nested", [False, None], ids=["switched off", "pickled before nested tensors existed"])
def test_an_encoder_that_never_used_nested_tensors(x: Tensor, nested: bool | None) -> None:
    model = encoder().eval()
    model.use_nested_tensor = nested
    if nested is None:
        del model.use_nested_tensor
    expected, before = model(x, src_key_padding_mask=PADDING), snapshot(model, 40)
    assert clearhead.upgrade(model).encoders == ()
    torch.testing.assert_close(model(x, src_key_padding_mask=PADDING), expected, atol=1e-5, rtol=0)
    assert clearhead.downgrade(model).encoders == ()
    assert snapshot(model, 40) == before


def test_downgrade_of_layers_first_still_gives_the_encoder_back() -> None:
    model = encoder()
    clearhead.upgrade(model)
    for layer in model.layers:
        clearhead.downgrade(layer)
    report = clearhead.downgrade(model)
    assert report.encoders == ("",)
    assert model.use_nested_tensor


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_of_an_upgraded_model_can_be_downgraded(x: Tensor, way: str) -> None:
    model = encoder().eval()
    expected = model(x)
    clearhead.upgrade(model)
    copied = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(copied(x), expected, atol=1e-5, rtol=0)
    assert len(clearhead.downgrade(copied).changed) == 2
    assert not any(part._forward_pre_hooks for part in copied.modules())
    assert copied.use_nested_tensor
    assert all(type(layer.self_attn) is clearhead.nn.MultiheadAttention for layer in model.layers)


def test_the_options_of_a_module_survive() -> None:
    """What the constructor was given is read from attributes afterwards, so every one of them has to be there."""
    options = {"dropout": 0.3, "add_bias_kv": True, "add_zero_attn": True, "kdim": 5, "vdim": 7, "batch_first": True}
    module = nn.MultiheadAttention(E, H, **options).eval()
    query, key, value = torch.randn(N, L, E), torch.randn(N, 4, 5), torch.randn(N, 4, 7)
    expected = module(query, key, value)
    clearhead.upgrade(module)
    torch.testing.assert_close(module(query, key, value), expected, atol=1e-5, rtol=0)
    assert not module.training
    assert module.dropout == 0.3


def test_the_report_reads_well() -> None:
    model = nn.ModuleDict({"encoder": encoder(), "own": OwnAttention(E, H)})
    assert str(clearhead.upgrade(model, linears=False)) == (
        "upgraded: 2 attention module(s)\n"
        "  encoder.layers.0.self_attn\n"
        "  encoder.layers.1.self_attn\n"
        f"  left alone: own, {OwnAttention.__module__}.OwnAttention is a subclass with code of its own\n"
        "  nested tensors switched off: encoder"
    )
    assert str(clearhead.downgrade(model)) == (
        "downgraded: 2 attention module(s)\n"
        "  encoder.layers.0.self_attn\n"
        "  encoder.layers.1.self_attn\n"
        "  nested tensors switched on again: encoder"
    )
    module = nn.MultiheadAttention(E, H)
    assert str(clearhead.upgrade(module)) == "upgraded: 1 attention module(s)\n  (the model itself)"
    assert str(clearhead.upgrade(nn.Linear(2, 2), linears=False)) == "upgraded: nothing"
