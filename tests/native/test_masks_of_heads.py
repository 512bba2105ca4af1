"""The native kernel where one tile has rows that see other keys: of several heads, beside NaN, and without any."""

from __future__ import annotations

import pytest
import torch

import clearhead
from clearhead import masks

B, HEADS, S, D = 2, 6, 131, 8


def attended(kernel: str, length: int, mask: masks.Mask, dtype: torch.dtype, last: float = 0.0) -> torch.Tensor:
    """Six query heads of one key/value head; its last key is `last`, if that is not 0."""
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(B, HEADS, length, D, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(B, 1, S, D, generator=generator, dtype=torch.float64) for _ in range(2))
    if last:
        key[:, :, -1] = last
    with clearhead.use_kernel(kernel):
        return clearhead.attention(query.to(dtype), key.to(dtype), value.to(dtype), mask)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("first_head", ["everything", "nothing"])
def test_heads_of_one_tile_see_other_keys(length: int, first_head: str) -> None:
    """The first head sees all keys, or none; each other head sees other keys."""
    visible = torch.arange(S) % torch.arange(2, HEADS + 2)[:, None] == 0  # (H, S)
    visible[0] = first_head == "everything"
    mask = masks.keep(visible[None, :, None].expand(B, HEADS, length, S))
    expected = attended("reference", length, mask, torch.float64)
    found = attended("native", length, mask, torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_key_of_nan_that_a_bias_hides_from_some_rows(number: float) -> None:
    """The first query sees the key, and no other query does."""
    bias = torch.linspace(-1, 1, S).repeat(5, 1)
    bias[1:, -1] = float("-inf")
    expected = attended("reference", 5, masks.bias(bias), torch.float64)
    found = attended("native", 5, masks.bias(bias), torch.float32, last=number)
    torch.testing.assert_close(found[:, :, 1:].double(), expected[:, :, 1:], rtol=0, atol=1e-6)
    assert not found[:, :, 0].isfinite().any()
