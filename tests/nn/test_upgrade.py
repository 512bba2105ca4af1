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

E, H, N, L = 12, 2, 3, 5
LENGTHS = (5, 2, 4)
PADDING = torch.arange(L)[None] >= torch.tensor(LENGTHS)[:, None]  # (N, L)


def encoder(dtype: torch.dtype = torch.float32) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=dtype)
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


def state(module: nn.Module) -> dict[str, Any]:
    """Everything a module holds, in a form that can be compared."""
    return {name: dict(part.__dict__) for name, part in module.named_modules()}


def test_every_attention_module_becomes_clearheads() -> None:
    model = transformer()
    report = clearhead.upgrade(model)
    names = ["encoder.layers.0.self_attn"]
    names += [f"decoder.layers.{index}.{part}" for index in range(2) for part in ("self_attn", "multihead_attn")]
    assert report.changed == tuple(names)
    assert report.left == {}
    assert report.encoders == ("encoder",)
    for name in names:
        assert type(model.get_submodule(name)) is clearhead.nn.MultiheadAttention


def test_parameters_are_the_same_objects_under_the_same_names() -> None:
    model = transformer()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    clearhead.upgrade(model)
    assert list(dict(model.named_parameters())) == list(parameters)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert dict(model.named_buffers()) == buffers
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    transformer().load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(transformer().state_dict(), strict=True)


@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_stay(x: Tensor, training: bool) -> None:
    model = transformer().train(training)
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    answers = []
    for _ in range(2):
        output = model(x, x, tgt_mask=causal, src_key_padding_mask=PADDING.float().masked_fill(PADDING, -torch.inf))
        answers.append([output, *torch.autograd.grad(output.square().sum(), list(model.parameters()))])
        clearhead.upgrade(model)
    for theirs, ours in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_an_optimizer_goes_on(x: Tensor) -> None:
    """Adam's moments belong to Parameter objects: with new ones the two runs would part."""
    runs = []
    for upgraded in (False, True):
        torch.manual_seed(1)
        model = encoder(torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(8):
            if upgraded and step == 4:
                clearhead.upgrade(model)
            optimizer.zero_grad()
            loss = (model(x.double()) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
        runs.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(runs[1], runs[0], atol=1e-8, rtol=0)


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


def test_the_model_may_be_the_attention_module(x: Tensor) -> None:
    module = nn.MultiheadAttention(E, H, batch_first=True)
    before = module(x, x, x)[0]
    report = clearhead.upgrade(module)
    assert report.changed == ("",)
    assert type(module) is clearhead.nn.MultiheadAttention
    torch.testing.assert_close(module(x, x, x)[0], before, atol=1e-5, rtol=0)
    assert clearhead.downgrade(module).changed == ("",)
    assert type(module) is nn.MultiheadAttention


def test_one_module_in_two_places_is_changed_once() -> None:
    shared = nn.MultiheadAttention(E, H)
    model = nn.ModuleDict({"first": shared, "second": shared})
    assert clearhead.upgrade(model).changed == ("first",)
    assert len(shared._forward_pre_hooks) == 1
    assert model["second"] is shared


def test_upgrading_twice_changes_nothing_more() -> None:
    model = encoder()
    clearhead.upgrade(model)
    once = state(model)
    report = clearhead.upgrade(model)
    assert report.changed == ()
    assert set(report.left) == {"layers.0.self_attn", "layers.1.self_attn"}
    assert state(model) == once


def count_calls(module: nn.Module) -> list[int]:
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    module.register_forward_hook(count)
    return calls


@pytest.mark.usefixtures("inference")
def test_the_fast_path_no_longer_goes_round(x: Tensor) -> None:
    """In eval under `no_grad` the encoder layer computes from weights it reads; a hook elsewhere is no help."""
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval()
    seen: list[Tensor] = []
    linear = layer.self_attn.out_proj
    linear.forward = lambda value: seen.append(value) or nn.functional.linear(value, linear.weight, linear.bias)
    before = layer(x)
    assert not seen

    clearhead.upgrade(layer)
    torch.testing.assert_close(layer(x), before, atol=1e-5, rtol=0)
    assert len(seen) == 1


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("norm_first", [False, True])
def test_hooks_are_called_in_encoder_and_decoder_layers(x: Tensor, norm_first: bool) -> None:
    options = {"dim_feedforward": 16, "batch_first": True, "norm_first": norm_first}
    for layer, count in (
        (nn.TransformerEncoderLayer(E, H, **options).eval(), 1),
        (nn.TransformerDecoderLayer(E, H, **options).eval(), 2),
    ):
        clearhead.upgrade(layer)
        modules = [part for part in layer.modules() if isinstance(part, nn.MultiheadAttention)]
        calls = [count_calls(part.out_proj) for part in modules]
        layer(x) if count == 1 else layer(x, x)
        assert calls == [[1]] * count


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
    assert all(type(part.self_attn) is clearhead.nn.MultiheadAttention for part in model.layers)

    report = clearhead.upgrade(model)
    assert report.encoders == ("",)
    assert bool(model(x, src_key_padding_mask=PADDING).isfinite().all())


@pytest.mark.usefixtures("inference")
def test_layers_upgraded_one_by_one(x: Tensor) -> None:
    model = encoder().eval()
    for layer in model.layers:
        clearhead.upgrade(layer)
    assert clearhead.upgrade(model).encoders == ("",)
    assert bool(model(x, src_key_padding_mask=PADDING).isfinite().all())


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
    before, parameters = state(model), list(model.parameters())
    expected = model(x, x)
    clearhead.upgrade(model)
    assert state(model) != before

    report = clearhead.downgrade(model)
    assert len(report.changed) == 5
    assert report.encoders == ("encoder",)
    assert state(model) == before
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(model(x, x), expected)
    kinds = [type(part) for part in model.modules() if isinstance(part, nn.MultiheadAttention)]
    assert kinds == [nn.MultiheadAttention] * 5
    handle.remove()
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_downgrade_leaves_an_encoder_that_never_used_nested_tensors() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    assert clearhead.upgrade(model).encoders == ()
    assert clearhead.downgrade(model).encoders == ()
    assert model.use_nested_tensor is False


def test_an_encoder_pickled_before_nested_tensors_existed(x: Tensor) -> None:
    """PyTorch's own forward allows for encoders without the attribute; so does `upgrade`."""
    model = encoder().eval()
    del model.use_nested_tensor
    expected = model(x, src_key_padding_mask=PADDING)
    report = clearhead.upgrade(model)
    assert len(report.changed) == 2
    assert report.encoders == ()
    torch.testing.assert_close(model(x, src_key_padding_mask=PADDING), expected, atol=1e-5, rtol=0)
    clearhead.downgrade(model)
    assert not hasattr(model, "use_nested_tensor")


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


def test_a_module_of_our_own_can_be_downgraded(x: Tensor) -> None:
    module = clearhead.nn.MultiheadAttention(E, H, batch_first=True)
    expected = module(x, x, x)[0]
    assert clearhead.downgrade(module).changed == ("",)
    assert type(module) is nn.MultiheadAttention
    assert not module._forward_pre_hooks
    torch.testing.assert_close(module(x, x, x)[0], expected, atol=1e-5, rtol=0)


def test_the_options_of_a_module_survive() -> None:
    """What the constructor was given is read from attributes afterwards, so every one of them has to be there."""
    options = {"dropout": 0.3, "add_bias_kv": True, "add_zero_attn": True, "kdim": 5, "vdim": 7, "batch_first": True}
    module = nn.MultiheadAttention(E, H, **options).eval()
    query, key, value = torch.randn(N, L, E), torch.randn(N, 4, 5), torch.randn(N, 4, 7)
    expected = module(query, key, value)
    clearhead.upgrade(module)
    for ours, theirs in zip(module(query, key, value), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
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
