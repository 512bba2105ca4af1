"""Jagged nested tensors through `MultiHeadAttention`: every row as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import MultiHeadAttention, masks
from clearhead.errors import ArgumentError, ClearheadError, ShapeError
from clearhead.masks import Mask
from clearhead.positions import ALiBi, Rotary

E, LENGTHS, OTHERS = 11, [5, 1, 7], [3, 8, 2]


def rows(lengths: list[int], features: int = E) -> list[Tensor]:
    torch.manual_seed(sum(lengths))
    return [torch.randn(n, features, dtype=torch.float64) for n in lengths]


def jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def made(**parts: Any) -> MultiHeadAttention:
    torch.manual_seed(7)
    return MultiHeadAttention(E, 6, num_kv_heads=3, head_dim=4, dtype=torch.float64, **parts)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(1, 2)], ids=["none", "causal", "window"])
def test_each_row_is_alone(mask: Mask | None) -> None:
    """Outputs and gradients of inputs and parameters."""
    attend = made(position=Rotary(4), mask=ALiBi(6))
    parts = rows(LENGTHS)
    together = jagged(parts)
    output = attend(together, mask=mask)
    assert output.is_nested
    assert output.shape == together.shape
    assert (output + together).shape == together.shape  # the same lengths, as a residual needs
    output.values().square().sum().backward()
    gradients = [parameter.grad for parameter in attend.parameters()]
    attend.zero_grad()
    alone = [part.clone().requires_grad_() for part in parts]
    expected = [attend(part, mask=mask) for part in alone]
    sum(part.square().sum() for part in expected).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(output.values(), torch.cat(expected), rtol=0, atol=1e-10)
    assert together.grad is not None
    torch.testing.assert_close(
        together.grad.values(), torch.cat([part.grad for part in alone if part.grad is not None]), rtol=0, atol=1e-10
    )
    for mine, parameter in zip(gradients, attend.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["none", "causal"])
def test_a_memory_with_lengths_of_its_own(mask: Mask | None) -> None:
    attend = made()
    queries, keys = rows(LENGTHS), rows(OTHERS)
    result = attend(jagged(queries), jagged(keys), mask=mask)
    expected = [attend(query, key, mask=mask) for query, key in zip(queries, keys, strict=True)]
    torch.testing.assert_close(result.values(), torch.cat(expected), rtol=0, atol=1e-10)


def test_a_position_part_needs_keys_beside_queries() -> None:
    """As many in all is not enough: each row has lengths of its own."""
    attend, queries = made(position=Rotary(4)), rows(LENGTHS)
    with pytest.raises(ShapeError, match="key: expected the query's lengths: a position part rotates both"):
        attend(jagged(queries), jagged(rows(LENGTHS[::-1])))
    keys = rows(LENGTHS)
    result = attend(jagged(queries), jagged(keys), mask=masks.causal())
    expected = [attend(query, key, mask=masks.causal()) for query, key in zip(queries, keys, strict=True)]
    torch.testing.assert_close(result.values(), torch.cat(expected), rtol=0, atol=1e-10)


BAD: dict[str, tuple[dict[str, Any], type[ClearheadError], str]] = {
    "padded key": ({"key": torch.zeros(3, 7, E).double()}, ShapeError, "key: expected a jagged .*got a padded tensor"),
    "rows": ({"key": jagged(rows([4, 4]))}, ShapeError, "key: expected the query's 3 rows, got 2"),
    "value": (
        {"key": jagged(rows(OTHERS)), "value": jagged(rows([3, 8, 4]))},
        ShapeError,
        "value: .*the key's lengths",
    ),
    "features": ({"key": jagged(rows(LENGTHS, 4))}, ShapeError, "key: expected"),
    "weights": ({"need_weights": True}, ArgumentError, "need_weights: .*jagged.*to_padded_tensor"),
    "positions": ({"positions": 3}, ArgumentError, "positions: .*jagged"),
    "mask": ({"mask": masks.causal("bottom_right")}, ArgumentError, r"mask: expected causal\(\)"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit(case: str) -> None:
    inputs, kind, text = BAD[case]
    with pytest.raises(kind, match=text):
        made()(jagged(rows(LENGTHS)), **inputs)
    with pytest.raises(ShapeError, match=r"expected the layout torch.jagged, got torch.strided"):
        made()(torch.nested.nested_tensor(rows(LENGTHS)))
