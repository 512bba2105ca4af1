"""The parts of newer models in `MultiHeadAttention`: positions, norms, soft-cap, sinks, masks of the layer's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import clearhead
from clearhead import MultiHeadAttention, masks
from clearhead.positions import RelativeBias, Rotary

from .test_multihead import by_hand

B, L, E, H, KV, D = 2, 7, 11, 6, 3, 4


def made(**parts: Any) -> MultiHeadAttention:
    torch.manual_seed(4)
    return MultiHeadAttention(E, H, num_kv_heads=KV, head_dim=D, dtype=torch.float64, **parts)


PARTS: dict[str, Any] = {
    "nothing": dict,
    "head_dim": dict,
    "norms": lambda: {"q_norm": nn.RMSNorm(D, dtype=torch.float64), "k_norm": nn.RMSNorm(D, dtype=torch.float64)},
    "softcap": lambda: {"softcap": 0.7},
    "sinks": lambda: {"sinks": True},
    "everything": lambda: {"k_norm": nn.RMSNorm(D, dtype=torch.float64), "softcap": 1.3, "sinks": True},
}


@pytest.mark.parametrize("parts", PARTS)
def test_the_formula_and_its_gradients(parts: str) -> None:
    module = made(**PARTS[parts]())
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(B, L, E, dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.parameters()]
    found = module(x, mask=masks.causal())
    expected = by_hand(module, x, x, x, masks.causal())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    towards = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, towards), torch.autograd.grad(expected, inputs, towards), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("combined", [False, True])
def test_a_bias_that_learns_belongs_to_the_module(combined: bool) -> None:
    bias = RelativeBias(H, 8, 16).double()
    module = made(mask=bias & masks.sliding_window(3, 3) if combined else bias)
    assert any(parameter is bias.weight for parameter in module.parameters())
    twin = copy.deepcopy(module)
    nn.init.normal_(bias.weight)
    x = torch.randn(B, L, E, dtype=torch.float64)
    output = module(x)
    assert not torch.allclose(output, twin(x))
    twin.load_state_dict(module.state_dict())
    torch.testing.assert_close(twin(x), output)
    output.square().sum().backward()
    assert bias.weight.grad is not None
    assert bias.weight.grad.abs().sum() > 0


def test_keys_stand_where_a_position_part_turns_them() -> None:
    """Also when key and query are two tensors: of the same tokens, as after norms of their own."""
    module, x = made(position=Rotary(D)), torch.randn(2, L, E, dtype=torch.float64)
    padded = torch.stack((torch.arange(L), torch.arange(L) - 3)).clamp(min=-1)
    for positions in (1000, padded):
        expected = module(x, mask=masks.causal(), positions=positions)
        assert torch.equal(module(x, x.clone(), mask=masks.causal(), positions=positions), expected)


def test_every_part_is_recorded_and_shown() -> None:
    module = made(position=Rotary(D), softcap=2.0, sinks=True, mask=masks.sliding_window(3, 0))
    assert "softcap=2.0, sinks=True, mask=sliding_window(3, 0)" in repr(module)
    x = torch.randn(B, L, E, dtype=torch.float64)
    with clearhead.record(module, statistics=("rows",)) as rec:
        _, weights = module(x, mask=masks.causal(), need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(rec[""].rows, weights, rtol=0, atol=1e-10)
    assert (weights.sum(-1) < 1).all()  # a sink has its share


def test_all_of_it_compiles_in_one_graph() -> None:
    torch._dynamo.reset()
    module = made(position=Rotary(D), q_norm=nn.RMSNorm(D, dtype=torch.float64), mask=masks.sliding_window(3, 0)).eval()
    x, causal = torch.randn(B, L, E, dtype=torch.float64), masks.causal()
    compiled = torch.compile(lambda y: module(y, mask=causal), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), module(x, mask=causal), rtol=0, atol=1e-12)
