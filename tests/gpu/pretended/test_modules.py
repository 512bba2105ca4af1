"""Modules, decoding and upgraded models on a CUDA device: how many operators they take, and that none waits.

`test_checks.py` compares their outputs and gradients.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.masks import Mask
from tests.support.pretended_cuda.mode import PretendedDevice, Seen


def module(**options: Any) -> clearhead.MultiHeadAttention:
    torch.manual_seed(0)
    return clearhead.MultiHeadAttention(256, 4, **options)


@pytest.mark.parametrize(
    ("mask", "most"), [(None, 30), (masks.causal(), 30), (masks.lengths(torch.tensor([512, 300])), 50)], ids=str
)
def test_forward_and_backward(cuda: PretendedDevice, mask: Mask | None, most: int) -> None:
    attend = module().to("cuda").bfloat16()
    x = torch.randn(2, 512, 256).bfloat16().cuda().requires_grad_()
    gradient = torch.ones_like(x)

    def step() -> None:
        torch.autograd.grad(attend(x, mask=mask), (x, *attend.parameters()), gradient)

    step()
    seen = cuda.count(step)
    assert seen.count <= most
    assert seen.waits == []
    assert len(seen.backends) == 1


@pytest.mark.parametrize(("rotary", "most"), [(False, 11), (True, 20)])
def test_a_decoding_step_takes_the_same_operators_at_every_position(
    cuda: PretendedDevice, rotary: bool, most: int
) -> None:
    attend = module(position=clearhead.positions.Rotary(64) if rotary else None).to("cuda").bfloat16().eval()
    token = torch.randn(2, 1, 256, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        cache = attend.make_cache(2, 128)
        steps = [cuda.count(lambda: attend(token, mask=masks.causal(), cache=cache)) for _ in range(6)]
    # PyTorch takes another of its fused kernels for the one key of the first step.
    assert {step.count for step in steps} == {steps[0].count}
    assert steps[0].count <= most
    assert all(step.waits == [] and len(step.backends) == 1 for step in steps)


@pytest.mark.parametrize("length", [1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_positions_are_those_of_the_cpu(cuda: PretendedDevice, length: int, dtype: torch.dtype) -> None:
    rotary = clearhead.positions.Rotary(16)
    q, k = torch.randn(2, 3, length, 16).to(dtype), torch.randn(2, 1, length, 16).to(dtype)
    expected = rotary(q, k, 1000)
    got = rotary.to("cuda")(q.cuda(), k.cuda(), 1000)
    assert all(torch.equal(ours.cpu(), judge) for ours, judge in zip(got, expected, strict=True))


@pytest.mark.parametrize("kept", [40, 0], ids=["padded", "nothing but padding"])
@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_an_upgraded_model_takes_no_more_operators_than_transformers(
    cuda: PretendedDevice, name: str, kept: int
) -> None:
    model, ids, real = padded_model(name, kept)
    expected = on_the_cpu(model, ids, real)
    output = torch.empty(0)
    seen: list[Seen] = []
    with torch.no_grad():
        for upgraded in (False, True):
            if upgraded:
                clearhead.upgrade(model)
            output = model(input_ids=ids, attention_mask=real).last_hidden_state.cpu()
            seen.append(cuda.count(lambda: model(input_ids=ids, attention_mask=real)))
    stock, ours = seen
    assert len(ours.backends) == len(stock.backends) == 2
    assert len(ours.waits) <= len(stock.waits)
    # In an item of padding alone, Clearhead masks rows that transformers leaves as they are.
    assert ours.count <= stock.count + (0 if kept else 1)
    assert float((output.float() - expected)[real.cpu().bool()].abs().max()) <= 0.05


def test_an_encoder_without_padding_reads_its_boundaries_once(cuda: PretendedDevice) -> None:
    model, ids, real = padded_model("Bert", 40)
    expected = on_the_cpu(model, ids, real)
    with torch.no_grad():
        stock = cuda.count(lambda: model(input_ids=ids, attention_mask=real))
        clearhead.upgrade(model, unpad=True)
        output = model(input_ids=ids, attention_mask=real).last_hidden_state.cpu()
        seen = cuda.count(lambda: model(input_ids=ids, attention_mask=real))
    assert seen.backends == ["flash, variable lengths"] * 2
    assert len(seen.waits) == 1
    assert seen.count <= stock.count
    assert float((output.float() - expected)[real.cpu().bool()].abs().max()) <= 0.05
    assert not output[~real.cpu().bool()].any()


@pytest.mark.parametrize("reason", ["float32", "dropout", "labels"])
def test_an_encoder_keeps_its_padding_where_no_kernel_takes_packed_texts(cuda: PretendedDevice, reason: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, ids, real = padded_model("Bert", 40, transformers.BertForMaskedLM if reason == "labels" else None)
    model = model.float() if reason == "float32" else model.train(reason == "dropout")
    clearhead.upgrade(model, unpad=True)
    labels = {"labels": ids} if reason == "labels" else {}
    with torch.no_grad():
        seen = cuda.count(lambda: model(input_ids=ids, attention_mask=real, **labels))
    assert "_varlen_attn" not in seen.operators
    assert len(seen.backends) == 2


def on_the_cpu(model: Any, ids: Tensor, real: Tensor) -> Tensor:
    """The output of a model before its upgrade, in float32 on the CPU, with the formula of transformers."""
    same = type(model)._from_config(deepcopy(model.config), attn_implementation="eager").eval()
    same.load_state_dict({name: tensor.cpu().float() for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        return same(input_ids=ids.cpu(), attention_mask=real.cpu()).last_hidden_state


def padded_model(name: str, kept: int, kind: Any = None) -> tuple[Any, Tensor, Tensor]:
    """A model of two layers, ids and an attention mask of two texts. The first is whole, the second has `kept` tokens.

    Bert pads on the right, and Llama on the left.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = getattr(transformers, f"{name}Config")(vocab_size=100, **sizes)
    model = (kind or getattr(transformers, f"{name}Model"))(config).eval().to("cuda").bfloat16()
    columns = torch.arange(64) if name == "Bert" else torch.arange(64).flip(0)
    return model, torch.randint(0, 100, (2, 64)).cuda(), (columns < torch.tensor([[64], [kept]])).long().cuda()
