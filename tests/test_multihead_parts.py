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

B, L, E, H, KV, D = 2, 7, 11, 6, 3, 4


def made(**parts: Any) -> MultiHeadAttention:
    torch.manual_seed(4)
    return MultiHeadAttention(E, H, num_kv_heads=KV, head_dim=D, dtype=torch.float64, **parts)


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
