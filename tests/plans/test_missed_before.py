"""Faults that a suite once did not notice: each of them, put back, fails a test here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.errors import DTypeError, KernelError, ShapeError
from tests.support.attending import attend
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.derivatives import derivatives
from tests.support.exact import exact_attention
from tests.support.models import VIT

B, H, KV, L, S, D = 2, 6, 3, 5, 7, 11
KERNELS = (None, "native", "sdpa", "chunked", "reference")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def numbers(function: Callable[..., Tensor], inputs: Sequence[Tensor], learns: Sequence[int]) -> list[Tensor]:
    """The result of a function of copies of the inputs, and its derivatives in those that learn.

    Skips the test if the forced kernel refuses the call.
    """
    leaves = [x.detach().requires_grad_(n in learns) for n, x in enumerate(inputs)]
    try:
        result = function(*leaves)
    except KernelError as error:
        pytest.skip(str(error))
    return derivatives(result, [leaves[n] for n in learns], unused=True) if learns else [result]


def doubles(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().double() for x in inputs]


@in_turn({"kernel": KERNELS, "learns": [(0, 1, 2), (0,), (1, 2), ()]}, {"dtype": [torch.float32, torch.float64]})
def test_nan_in_a_fully_masked_query(kernel: str | None, dtype: torch.dtype, learns: tuple[int, ...]) -> None:
    marks = torch.ones(L, S, dtype=torch.bool)
    marks[1] = False
    inputs = [drawn(B, H, L, D, dtype=dtype), drawn(B, KV, S, D, dtype=dtype), drawn(B, KV, S, D, dtype=dtype)]
    inputs[0][:, :, 1] = torch.nan
    result = numbers(lambda *x: attend(*x, masks.keep(marks), kernel=kernel), inputs, learns)
    require_near(result, numbers(lambda *x: exact_attention(*x, marks[None, None]).output, doubles(inputs), learns))


@pytest.mark.parametrize("kernel", ["native", "chunked", "reference", None])
@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}, {"sinks": True}], ids=str)
def test_a_loss_of_the_log_sum_exp_alone(kernel: str | None, extras: dict[str, Any]) -> None:
    inputs = [drawn(B, H, L, D), drawn(B, KV, S, D), drawn(B, KV, S, D), *([drawn(H)] if "sinks" in extras else [])]
    marks = (torch.arange(L)[:, None] >= torch.arange(S))[None, None]

    def options(sinks: Sequence[Tensor]) -> dict[str, Any]:
        return extras | ({"sinks": sinks[0]} if sinks else {})

    result = numbers(
        lambda q, k, v, *sinks: attend(q, k, v, masks.causal(), kernel=kernel, return_lse=True, **options(sinks))[1],
        inputs,
        range(len(inputs)),
    )
    expected = numbers(
        lambda q, k, v, *sinks: exact_attention(q, k, v, marks, **options(sinks)).lse,
        doubles(inputs),
        range(len(inputs)),
    )
    assert result[1].abs().max() > 0.01
    require_near(result, expected)


@in_turn({"kernel": KERNELS, "more": [1, 3], "learns": [False, True]}, {"poison": [torch.nan, torch.inf]})
def test_nan_in_keys_after_the_last_query(kernel: str | None, poison: float, more: int, learns: bool) -> None:
    """Under a causal mask no query sees key S − 1 where S = L + 1."""
    inputs = [drawn(B, H, L, D), drawn(B, KV, L + more, D), drawn(B, KV, L + more, D)]
    for x in inputs[1:]:
        x[:, :, L:] = poison
    marks = (torch.arange(L)[:, None] >= torch.arange(L))[None, None]
    learning, seen = range(3 if learns else 0), [x[:, :, :L] for x in doubles(inputs)]
    result = numbers(lambda *x: attend(*x, masks.causal(), kernel=kernel), inputs, learning)
    require_near([x[:, :, :L] for x in result], numbers(lambda *x: exact_attention(*x, marks).output, seen, learning))
    assert not any(x[:, :, L:].any() for x in result)


@pytest.mark.parametrize("place", range(3))
def test_a_sparse_tensor_after_an_expanded_one(place: int) -> None:
    """PyTorch says of both that their strides are zero."""
    inputs = [drawn(1, 1, 1, 1).expand(B, H, L, D) for _ in range(3)]
    require_near(clearhead.attention(*inputs), inputs[2])
    inputs[place] = drawn(B, H, L, D).to_sparse()
    name = ("query", "key", "value")[place]
    with pytest.raises(DTypeError, match=rf"^{name}: expected a torch.Tensor, got a tensor of layout torch.sparse_coo"):
        clearhead.attention(*inputs)


def test_a_key_projection_that_fits_no_input_beside_one_for_queries_and_values() -> None:
    module = clearhead.MultiHeadAttention(12, 4)
    module.v_proj = module.q_proj
    module.k_proj = nn.Linear(13, 12)
    x = drawn(2, 5, 12)
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"^key: expected .*13"):
            module(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_top_keys_of_an_item_that_sees_none(dtype: torch.dtype) -> None:
    query, key = drawn(B, H, L, D, dtype=dtype), drawn(B, KV, S, D, dtype=dtype)
    mask = masks.lengths(torch.tensor([0, S]))
    result = clearhead.attention_statistics(query, key, mask, statistics=("top_k",), top_k=3).top_k
    assert result is not None
    assert (result.indices[0] == -1).all()
    assert (result.weights[0] == 0).all()
    assert (result.indices[1] >= 0).all()


@pytest.mark.parametrize("pooling", ["mass", "max"])
def test_the_map_of_no_query(pooling: Any) -> None:
    query, key = drawn(B, H, 0, D, dtype=torch.float64), drawn(B, KV, S, D, dtype=torch.float64)
    result = clearhead.attention_statistics(query, key, statistics=("map",), map_size=3, map_pooling=pooling).map
    assert result is not None
    assert not result.any()


def test_the_length_of_patches_in_a_grid_that_is_not_square() -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**VIT | {"image_size": (12, 20)})).eval()
    with torch.no_grad(), clearhead.record(model) as rec:
        model(torch.randn(1, 3, 12, 20))
    assert rec.patches(0).grid == (3, 5)
    assert rec.patches(0).length == 16
