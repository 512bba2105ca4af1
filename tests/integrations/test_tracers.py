"""Upgraded models of transformers under tools that trace or transform them: `torch.jit`, OpenVINO, `torch.func`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, vmap

import clearhead
from clearhead import masks
from tests.support.budgets import slow

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
VIT = {"image_size": 10, "patch_size": 5}
GPT2 = {"vocab_size": 61, "n_embd": 12, "n_layer": 2, "n_head": 3, "bos_token_id": 1, "eos_token_id": 1}
T5 = {"vocab_size": 61, "d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 2, "num_heads": 3}


def tokens(batch: int, length: int) -> tuple[Tensor, Tensor]:
    ends = torch.tensor([length, *[length - 2] * (batch - 1)])
    return torch.randint(3, 61, (batch, length)), (torch.arange(length) < ends[:, None]).long()


def images(batch: int, length: int) -> tuple[Tensor]:
    return (torch.randn(batch, 3, 10, 10),)


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def llama() -> nn.Module:
    return transformers.LlamaModel(transformers.LlamaConfig(**SIZES, num_key_value_heads=1))


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**SIZES | VIT))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, ...]]]] = {
    "bert": (bert, tokens),
    "llama": (llama, tokens),
    "vit": (vit, images),
    "gpt2": (lambda: transformers.GPT2Model(transformers.GPT2Config(**GPT2)), lambda b, n: tokens(b, n)[:1]),
    "t5": (lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)), tokens),
}


def prepared(name: str) -> Any:
    model: Any = MODELS[name][0]().eval()
    model.config.return_dict = model.config.use_cache = False
    return model


def traced(model: Any, arguments: tuple[Tensor, ...]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own code
        return torch.jit.trace(model, arguments)  # which traces twice and compares, without gradients the second time


@pytest.mark.parametrize("name", ["bert", "llama", "vit", *slow("gpt2", "t5")])
def test_a_jit_trace_of_an_upgraded_model_holds_for_other_lengths(name: str) -> None:
    model, inputs = prepared(name), MODELS[name][1]
    calls = [inputs(2, 7), inputs(3, 5), inputs(2, 11)]
    expected = [model(*call)[0] for call in calls]
    clearhead.upgrade(model)
    trace = traced(model, calls[0])
    for call, output in zip(calls, expected, strict=True):
        torch.testing.assert_close(trace(*call)[0], output)


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(12, 3, position=clearhead.positions.Rotary(4))
        self.drop_in = clearhead.nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = x + self.attend(x, mask=masks.causal() & masks.lengths(real.sum(1)))
        return x + self.drop_in(x, x, x, key_padding_mask=real == 0)[0]


def test_a_jit_trace_of_modules_holds_for_other_lengths() -> None:
    model = _Own().eval()
    calls = [(torch.randn(batch, length, 12), tokens(batch, length)[1]) for batch, length in ((2, 7), (3, 5), (2, 11))]
    trace = traced(model, calls[0])
    for call in calls:
        torch.testing.assert_close(trace(*call), model(*call))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_openvino_converts_an_upgraded_model(name: str) -> None:
    openvino = pytest.importorskip("openvino")
    model, call = prepared(name), tokens(2, 7)
    expected = model(*call)[0]
    clearhead.upgrade(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = openvino.compile_model(openvino.convert_model(model, example_input=call), "CPU")
    found = torch.from_numpy(compiled([each.numpy() for each in call])[0])
    torch.testing.assert_close(found, expected.detach(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradients_of_single_samples_with_padding(name: str) -> None:
    model = prepared(name)
    eager, (ids, padding) = copy.deepcopy(model), tokens(3, 7)
    eager.set_attn_implementation("eager")
    clearhead.upgrade(model)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], ids: Tensor, padding: Tensor) -> Tensor:
        output = functional_call(model, parameters, (ids[None], padding[None]))[0]
        return output.sin().mul(padding[None, :, None]).sum()

    found = vmap(grad(loss), (None, 0, 0))(parameters, ids, padding)
    for item in range(3):
        output = eager(ids[[item]], padding[[item]])[0]
        expected = torch.autograd.grad(
            output.sin().mul(padding[item, :, None]).sum(),
            [*eager.parameters()],
            materialize_grads=True,
            allow_unused=True,
        )
        for gradient, (key, _) in zip(expected, eager.named_parameters(), strict=True):
            scale = float(gradient.abs().max()) + 1
            torch.testing.assert_close(found[key][item], gradient, atol=1e-5 * scale, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_upgraded_model_of_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        model, call = prepared(name), tokens(2, 7)
        clearhead.upgrade(model)
        assert model(*call)[0].shape == (2, 7, 12)
