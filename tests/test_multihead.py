"""`MultiHeadAttention`: what it computes, what its projections are, and how it lives as a module."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import MultiHeadAttention, masks, merge_heads, split_heads
from clearhead.positions import RelativeBias, Rotary
from tests.support.exact import exact_attention

B, L, S, E, H = 2, 5, 7, 12, 3


def test_key_defaults_to_query_and_value_to_key() -> None:
    module = MultiHeadAttention(E, H)
    x, memory = torch.randn(B, L, E), torch.randn(B, S, E)
    assert torch.equal(module(x), module(x, x, x))
    assert torch.equal(module(x, memory), module(x, memory, memory))
    assert module(x, memory).shape == (B, L, E)


def test_inputs_and_heads_of_other_sizes() -> None:
    module = MultiHeadAttention(E, 4, num_kv_heads=2, head_dim=5, qdim=11, kdim=13, vdim=17)
    sizes = [module.q_proj, module.k_proj, module.v_proj, module.out_proj]
    assert [(p.in_features, p.out_features) for p in sizes] == [(11, 20), (13, 10), (17, 10), (20, E)]
    query, key, value = torch.randn(B, L, 11), torch.randn(B, S, 13), torch.randn(B, S, 17)
    output, weights = module(query, key, value, need_weights=True, average_attn_weights=False)
    q, k, v = (split_heads(p(x), n) for p, x, n in zip(sizes, (query, key, value), (4, 2, 2), strict=False))
    expected = exact_attention(q, k, v)
    torch.testing.assert_close(weights.double(), expected.weights, rtol=0, atol=1e-5)
    torch.testing.assert_close(output, module.out_proj(merge_heads(expected.output.float())))


def test_a_plain_tensor_comes_back_unless_weights_are_asked_for() -> None:
    module, x = MultiHeadAttention(E, H), torch.randn(B, L, E)
    alone = module(x)
    assert isinstance(alone, Tensor)
    output, averaged = module(x, need_weights=True)
    same, per_head = module(x, need_weights=True, average_attn_weights=False)
    assert torch.equal(output, alone)
    assert torch.equal(same, alone)
    assert averaged.shape == (B, L, L)
    assert per_head.shape == (B, H, L, L)
    torch.testing.assert_close(per_head.mean(1), averaged)
    torch.testing.assert_close(averaged.sum(-1), torch.ones(B, L))


def test_without_a_batch() -> None:
    module = MultiHeadAttention(E, H)
    query, memory = torch.randn(L, E), torch.randn(S, E)
    output, weights = module(query, memory, mask=masks.causal(), need_weights=True)
    batched = module(query[None], memory[None], mask=masks.causal(), need_weights=True)
    assert output.shape == (L, E)
    assert weights.shape == (L, S)
    torch.testing.assert_close((output[None], weights[None]), batched)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, L, S), (B, 0, S), (B, L, 0), (0, 0, 0)])
def test_sizes_of_zero(batch: int, queries: int, keys: int) -> None:
    module = MultiHeadAttention(E, H)
    query, memory = torch.randn(batch, queries, E, requires_grad=True), torch.randn(batch, keys, E)
    output, weights = module(query, memory, need_weights=True)
    assert output.shape == (batch, queries, E)
    assert weights.shape == (batch, queries, keys)
    assert module(query).shape == query.shape
    output.sum().backward()
    assert not query.grad.any()


@pytest.mark.parametrize("sizes", [{}, {"num_kv_heads": 1, "head_dim": 7, "qdim": 5, "kdim": 11, "vdim": 13}])
def test_each_projection_starts_xavier_uniform_with_zero_bias(sizes: dict[str, int]) -> None:
    for projection in MultiHeadAttention(96, 3, **sizes).children():
        bound = math.sqrt(6 / (projection.in_features + projection.out_features))
        assert projection.weight.abs().max() <= bound
        assert projection.weight.abs().max() > 0.95 * bound
        assert abs(projection.weight.std().item() - bound / math.sqrt(3)) < 0.06 * bound
        assert not projection.bias.any()


@pytest.mark.parametrize(("bias", "out_bias", "expected"), [(True, None, 4), (False, None, 0), (True, False, 3)])
def test_biases_can_be_left_out(bias: bool, out_bias: bool | None, expected: int) -> None:
    module = MultiHeadAttention(E, H, bias=bias, out_bias=out_bias)
    assert sum(projection.bias is not None for projection in module.children()) == expected
    assert (MultiHeadAttention(E, H, bias=False, out_bias=True).out_proj.bias is None) is False


def test_the_names_in_a_checkpoint() -> None:
    names = [f"{p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")]
    assert list(MultiHeadAttention(E, H).state_dict()) == names


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_computes_the_same_and_shares_nothing(duplicate: Any) -> None:
    module, x = MultiHeadAttention(E, H, num_kv_heads=1, dropout=0.1).eval(), torch.randn(B, L, E)
    expected, twin = module(x), duplicate(module)
    nn.init.zeros_(module.q_proj.weight)
    assert torch.equal(twin(x), expected)
    assert repr(twin) == repr(module)


def test_parameters_are_made_where_and_as_asked() -> None:
    module = MultiHeadAttention(E, H, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    output, weights = module(torch.randn(B, L, E, dtype=torch.bfloat16), need_weights=True)
    assert output.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    assert MultiHeadAttention(E, H).double()(torch.randn(B, L, E).double()).dtype == torch.float64


def test_it_prints_its_sizes() -> None:
    first = repr(MultiHeadAttention(E, H)).splitlines()[1]
    assert first == "  embed_dim=12, num_heads=3, head_dim=4"
    first = repr(MultiHeadAttention(E, H, num_kv_heads=1, head_dim=5, dropout=0.1)).splitlines()[1]
    assert first == "  embed_dim=12, num_heads=3, num_kv_heads=1, head_dim=5, dropout=0.1"
    parts = made(position=Rotary(4), softcap=2.0, sinks=True, mask=masks.sliding_window(3, 0))
    assert "softcap=2.0, sinks=True, mask=sliding_window(3, 0)" in repr(parts)


def made(**parts: Any) -> MultiHeadAttention:
    torch.manual_seed(4)
    return MultiHeadAttention(E, 6, num_kv_heads=3, head_dim=4, dtype=torch.float64, **parts)


@pytest.mark.parametrize("combined", [False, True])
def test_a_bias_that_learns_belongs_to_the_module(combined: bool) -> None:
    bias = RelativeBias(6, 8, 16).double()
    module = made(mask=bias & masks.sliding_window(3, 3) if combined else bias)
    twin = copy.deepcopy(module)
    nn.init.normal_(bias.weight)
    x = torch.randn(B, L, E, dtype=torch.float64)
    output = module(x)
    assert not torch.allclose(output, twin(x))
    twin.load_state_dict(module.state_dict())
    torch.testing.assert_close(twin(x), output)
    output.square().sum().backward()
    gradients = [x.grad for x in module.parameters() if x is bias.weight]
    assert len(gradients) == 1
    assert gradients[0].abs().sum() > 0


def test_a_position_part_rotates_keys_by_the_positions_of_the_queries() -> None:
    """Also if key and query are two tensors of the same tokens, as after separate norms."""
    module, x = made(position=Rotary(4)), torch.randn(2, L, E, dtype=torch.float64)
    padded = torch.stack((torch.arange(L), torch.arange(L) - 3)).clamp(min=-1)
    for positions in (1000, padded):
        expected = module(x, mask=masks.causal(), positions=positions)
        assert torch.equal(module(x, x.clone(), mask=masks.causal(), positions=positions), expected)
