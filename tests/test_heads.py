"""Cutting features into heads and laying them side by side again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead import merge_heads, split_heads
from clearhead._call.heads import fold_group, unfold_group
from clearhead.errors import ArgumentError, DTypeError, ShapeError

B, H, L, D = 2, 3, 5, 7


@pytest.fixture
def features() -> Tensor:
    return torch.arange(B * L * H * D, dtype=torch.float32).reshape(B, L, H * D)


@pytest.mark.parametrize("batched", [True, False])
def test_head_h_reads_the_h_th_run_of_features(features: Tensor, batched: bool) -> None:
    x = features if batched else features[0]
    split = split_heads(x, H)
    assert split.shape == (*x.shape[:-2], H, L, D)
    for head in range(H):
        assert torch.equal(split.select(-3, head), x[..., head * D : (head + 1) * D])
    assert split.data_ptr() == x.data_ptr()  # nothing is copied
    assert torch.equal(merge_heads(split), x)


def test_tensors_that_are_not_contiguous(features: Tensor) -> None:
    strided = features.transpose(0, 1)  # (L, B, H·D)
    assert torch.equal(split_heads(strided, H), split_heads(strided.contiguous(), H))
    assert torch.equal(merge_heads(split_heads(strided, H)), strided)


@pytest.mark.parametrize("shape", [(0, L, H * D), (B, 0, H * D), (B, L, 0)], ids=str)
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape)
    assert split_heads(empty, H).shape == (shape[0], H, shape[1], shape[2] // H)
    assert merge_heads(split_heads(empty, H)).shape == shape


@pytest.mark.parametrize("shape", [(B, L, 20), (7,), (B, H, L, D)], ids=str)
def test_features_that_cannot_be_split_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError) as caught:
        split_heads(torch.zeros(shape), H)
    received = "(" + ", ".join(map(str, shape)) + (",)" if len(shape) == 1 else ")")
    assert str(caught.value) == f"x: expected (B, L, H·D) with H = 3 heads dividing the last size, got {received}."


@pytest.mark.parametrize("shape", [(L, D), (1, B, H, L, D)], ids=str)
def test_heads_that_cannot_be_merged_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"x: expected \(B, H, L, D\) or \(H, L, D\), got \("):
        merge_heads(torch.zeros(shape))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: split_heads(torch.zeros(B, L, 6), 0), ArgumentError, r"num_heads: expected an int ≥ 1, got 0\."),
        (lambda: split_heads(torch.zeros(B, L, 6), 2.0), DTypeError, r"num_heads: expected an int ≥ 1, got float\."),
        (lambda: split_heads(torch.zeros(B, L, 6), True), DTypeError, r"num_heads: expected an int ≥ 1, got bool\."),
        (lambda: split_heads([[1.0, 2.0]], 2), DTypeError, r"x: expected a torch\.Tensor, got list"),
        (lambda: merge_heads([[1.0, 2.0]]), DTypeError, r"x: expected a torch\.Tensor, got list"),
    ],
)
def test_other_arguments_are_refused(call: Callable[[], Tensor], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_query_heads_are_folded_under_the_key_head_they_share() -> None:
    x = torch.randn(B, 6, L, D)
    folded = fold_group(x, 2)  # two key heads, each for three query heads
    assert folded.shape == (B, 2, 3 * L, D)
    for head in range(6):
        assert torch.equal(folded[:, head // 3].unflatten(1, (3, L))[:, head % 3], x[:, head])
    assert torch.equal(unfold_group(folded, 6), x)
    assert x.data_ptr() == folded.data_ptr() == unfold_group(folded, 6).data_ptr()
