"""Cutting features into heads and laying them side by side again."""

from __future__ import annotations

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


def test_head_h_reads_the_h_th_run_of_features(features: Tensor) -> None:
    split = split_heads(features, H)
    assert split.shape == (B, H, L, D)
    for head in range(H):
        assert torch.equal(split[:, head], features[:, :, head * D : (head + 1) * D])


def test_merging_undoes_splitting(features: Tensor) -> None:
    assert torch.equal(merge_heads(split_heads(features, H)), features)
    assert torch.equal(merge_heads(split_heads(features[0], H)), features[0])


def test_without_a_batch(features: Tensor) -> None:
    assert torch.equal(split_heads(features[0], H), split_heads(features, H)[0])


def test_splitting_copies_nothing(features: Tensor) -> None:
    assert split_heads(features, H).data_ptr() == features.data_ptr()


def test_tensors_that_are_not_contiguous(features: Tensor) -> None:
    strided = features.transpose(0, 1)  # (L, B, H·D)
    assert torch.equal(split_heads(strided, H), split_heads(strided.contiguous(), H))
    assert torch.equal(merge_heads(split_heads(strided, H)), strided)


@pytest.mark.parametrize("shape", [(0, L, H * D), (B, 0, H * D), (B, L, 0)], ids=str)
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape)
    assert split_heads(empty, H).shape == (shape[0], H, shape[1], shape[2] // H)
    assert merge_heads(split_heads(empty, H)).shape == shape


def test_gradients_pass_through(features: Tensor) -> None:
    features.requires_grad_()
    merge_heads(split_heads(features, H) * 2).sum().backward()
    assert torch.equal(features.grad, torch.full_like(features, 2))


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


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_that_is_not_positive_is_refused(count: int) -> None:
    with pytest.raises(ArgumentError, match=rf"num_heads: expected an int ≥ 1, got {count}\."):
        split_heads(torch.zeros(B, L, 6), count)


@pytest.mark.parametrize("count", [2.0, "2", True, None], ids=repr)
def test_a_count_that_is_no_int_is_refused(count: object) -> None:
    with pytest.raises(DTypeError, match=rf"num_heads: expected an int ≥ 1, got {type(count).__name__}\."):
        split_heads(torch.zeros(B, L, 6), count)  # pyright: ignore


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(DTypeError, match=r"x: expected a torch\.Tensor, got list"):
        split_heads([[1.0, 2.0]], 2)  # pyright: ignore
    with pytest.raises(DTypeError, match=r"x: expected a torch\.Tensor, got list"):
        merge_heads([[1.0, 2.0]])  # pyright: ignore


def test_query_heads_are_folded_under_the_key_head_they_share() -> None:
    x = torch.randn(B, 6, L, D)
    folded = fold_group(x, 2)  # two key heads, each for three query heads
    assert folded.shape == (B, 2, 3 * L, D)
    for head in range(6):
        assert torch.equal(folded[:, head // 3].unflatten(1, (3, L))[:, head % 3], x[:, head])
    assert torch.equal(unfold_group(folded, 6), x)


def test_folding_copies_nothing() -> None:
    x = torch.randn(B, 6, L, D)
    assert fold_group(x, 2).data_ptr() == x.data_ptr()
    assert unfold_group(fold_group(x, 2), 6).data_ptr() == x.data_ptr()
