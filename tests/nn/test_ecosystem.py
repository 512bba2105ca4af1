"""What people do to an `nn.MultiheadAttention` from outside: copy, load, hook, prune, adapt and shrink it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import clearhead
from tests.support.randomised import randomised

E, H, N, L = 12, 3, 2, 5

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kdim without bias": {"kdim": 5, "bias": False},
    "all": {
        **{"kdim": 5, "vdim": 7, "add_bias_kv": True, "add_zero_attn": True},
        **{"batch_first": True, "dtype": torch.float64},
    },
}


@pytest.fixture
def module() -> clearhead.nn.MultiheadAttention:
    return randomised(clearhead.nn.MultiheadAttention(E, H, batch_first=True), 0.3)


def test_signatures_are_pytorchs() -> None:
    for name in ("__init__", "forward"):
        ours, theirs = (
            {p.name: p.default for p in inspect.signature(getattr(c, name)).parameters.values()}
            for c in (clearhead.nn.MultiheadAttention, nn.MultiheadAttention)
        )
        assert list(ours.items()) == list(theirs.items())
    assert issubclass(clearhead.nn.MultiheadAttention, nn.MultiheadAttention)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_seed_gives_the_same_parameters(options: dict[str, Any]) -> None:
    states, following = [], []
    for module_class in (clearhead.nn.MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(5)
        made = module_class(E, H, **options)
        states.append(made.state_dict())
        following.append(torch.rand(1))
        made._reset_parameters()
        states.append(made.state_dict())
    first, _, other, _ = states
    assert list(first) == list(other)
    for ours, theirs in zip(states[:2], states[2:], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)
    assert torch.equal(*following)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(options: dict[str, Any], duplicate: Callable[[nn.Module], nn.Module]) -> None:
    made = clearhead.nn.MultiheadAttention(E, H, **options).eval()
    copied = duplicate(made)
    assert type(copied) is clearhead.nn.MultiheadAttention
    dtype, kdim, vdim = options.get("dtype"), options.get("kdim", E), options.get("vdim", E)
    query, key, value = (torch.randn(N, N, features, dtype=dtype) for features in (E, kdim, vdim))
    for x, y in zip(copied(query, key, value), made(query, key, value), strict=True):
        assert torch.equal(x, y)
    assert not {id(p) for p in made.parameters()} & {id(p) for p in copied.parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(module: clearhead.nn.MultiheadAttention, dtype: torch.dtype, autocast: bool) -> None:
    """PyTorch's dtypes, errors of the size of its own, and gradients in the parameters' dtype."""
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    theirs.load_state_dict(module.state_dict())
    x, exact = torch.randn(N, L, E).to(dtype), copy.deepcopy(theirs).double()
    inputs = x.float() if autocast else x
    with torch.autocast("cpu", dtype, enabled=autocast):
        results = [(m if autocast else m.to(dtype))(inputs, inputs, inputs) for m in (module, theirs)]
    for ours, pytorchs, right in zip(*results, exact(x.double(), x.double(), x.double()), strict=True):
        assert ours.dtype == pytorchs.dtype
        assert (ours - right).abs().max() <= 2 * (pytorchs - right).abs().max()
    results[0][0].float().sum().backward()
    expected = torch.float32 if autocast else dtype
    assert all(p.grad.dtype == expected and bool(p.grad.isfinite().all()) for p in module.parameters())


def test_gradients_per_sample(module: clearhead.nn.MultiheadAttention) -> None:
    """`vmap` over `grad`, the usual way to them, against one backward pass for each sample."""
    x = torch.randn(N, L, E)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(module, parameters, (sample, sample, sample), {"is_causal": True})[0].square().sum()

    parameters = dict(module.named_parameters())
    result = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for index, sample in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, sample), list(parameters.values()))
        for name, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(result[name][index], gradient)


class Block(nn.Module):
    """A model that calls its attention itself, as peft's wrapper for parameters needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(E, H, batch_first=True)
        self.head = nn.Linear(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attend(x, x, x)[0])


class Reader(nn.Module):
    """A model whose attention is inside PyTorch's encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(E, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


LORA = {
    "the attention module": (Reader, {"target_modules": ["self_attn"]}, 8),
    "out_proj": (Reader, {"target_modules": ["out_proj"]}, 4),
    "the attention module of a block": (Block, {"target_modules": ["attend"]}, 4),
    "in_proj_weight as a parameter": (Block, {"target_modules": [], "target_parameters": ["attend.in_proj_weight"]}, 2),
}


@pytest.mark.parametrize("name", LORA)
def test_lora(name: str) -> None:
    """peft's adapters act, in eval under `no_grad` too, learn, and can be merged into weights PyTorch runs with."""
    from peft import LoraConfig, get_peft_model

    model_class, targets, count = LORA[name]
    model = model_class()
    assert clearhead.upgrade(model).changed
    x = torch.randn(N, L, E)
    before = model.eval()(x).detach()
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **targets)).eval()
    adapters = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert len(adapters) == count
    assert all("lora_" in n for n in adapters)
    torch.testing.assert_close(adapted(x), before, atol=1e-5, rtol=0)  # B starts at zero

    with torch.no_grad():
        for n, parameter in adapters.items():
            if "lora_B" in n:
                parameter.normal_()
        after = adapted(x)
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(adapted(x), after, atol=1e-5, rtol=0)

    adapted.train()(x).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in adapters.values())

    merged = adapted.eval().merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(x), after, atol=1e-5, rtol=0)
        clearhead.downgrade(merged)
        torch.testing.assert_close(merged(x), after, atol=1e-5, rtol=0)
    assert not any("lora" in key for key in merged.state_dict())


def test_torchao_quantises_the_linears_of_our_own_module() -> None:
    """int8 weights: half of their step of 1/127 of a row's largest weight, through two projections."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    module = clearhead.MultiHeadAttention(64, 4).eval()
    x = torch.randn(N, L, 64)
    linears = ("q_proj", "k_proj", "v_proj", "out_proj")
    with torch.no_grad():
        exact = module(x, mask=clearhead.masks.causal())
        quantize_(module, Int8WeightOnlyConfig())
        for name in linears:
            weight = getattr(module, name).weight
            assert type(weight).__module__.startswith("torchao")
            assert weight.qdata.dtype == torch.int8
        result = module(x, mask=clearhead.masks.causal())
    assert result.dtype == exact.dtype
    assert 0 < (result - exact).norm() / exact.norm() < 0.02
