"""Tools that count what a call does: `FlopCounterMode` and the profiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import clearhead
from clearhead import masks
from tests.support.native import SETS

B, H, HKV, L, S, D, DV = 2, 6, 3, 7, 11, 5, 13
PAIRS = 2 * B * H * L * S * (D + DV)

with_native = pytest.mark.skipif(not SETS, reason="the extension was not built here")


def operands(*, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, H, L, D), (B, HKV, S, D), (B, HKV, S, DV)
    query, key, value = (torch.randn(shape, requires_grad=grad) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("need_weights", [True, pytest.param(False, marks=with_native)])
@pytest.mark.parametrize("padded", [False, True])
def test_an_upgraded_module_has_pytorchs_count(need_weights: bool, padded: bool) -> None:
    module, x = nn.MultiheadAttention(512, 4, batch_first=True), torch.randn(2, 53, 512)
    padding = torch.arange(53) >= torch.tensor([[53], [7]]) if padded else None

    def count(weights: bool) -> int:
        with FlopCounterMode(display=False) as counter:
            module(x, x, x, key_padding_mask=padding, need_weights=weights)[0].sum().backward()
        return counter.get_total_flops()

    expected = count(True)  # PyTorch does not count its fused kernel on the CPU
    clearhead.upgrade(module)
    assert count(need_weights) == expected


@with_native
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.lengths(torch.tensor([11, 4]))], ids=str)
def test_native_counts_all_pairs_forward_and_twice_as_many_backward(mask: masks.Mask | None) -> None:
    with FlopCounterMode(display=False) as counter:
        output = clearhead.attention(*operands(), mask)
        assert counter.get_total_flops() == PAIRS
        output.sum().backward()
    assert counter.get_total_flops() == 3 * PAIRS


@with_native
def test_packed_sequences_count_their_own_pairs() -> None:
    x, ends = torch.randn(10, H, D), torch.tensor([0, 3, 10])
    with FlopCounterMode(display=False) as counter:
        clearhead.attention_varlen(x, x, x, ends, ends)
    assert counter.get_total_flops() == 4 * H * D * (3 * 3 + 7 * 7)


def test_reference_counts_its_products_and_weights_add_none() -> None:
    with clearhead.use_kernel("reference"), FlopCounterMode(display=False) as counter:
        clearhead.attention(*operands()).sum().backward()
    assert counter.get_total_flops() == 3 * PAIRS


@with_native
def test_a_formula_of_the_user_stays() -> None:
    mapping = {torch.ops.clearhead.attention: lambda *_, **__: 17}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        clearhead.attention(*operands(grad=False))
    assert counter.get_total_flops() == 17


def test_the_profiler_counts_and_records_shapes() -> None:
    with torch.profiler.profile(with_flops=True, record_shapes=True) as profile:
        clearhead.attention(*operands()).sum().backward()
        clearhead.MultiHeadAttention(12, 3)(torch.randn(2, 5, 12)).sum().backward()
    assert profile.key_averages(group_by_input_shape=True)
