"""Faults that a suite once did not notice: each of them, put back, fails a test here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.errors import DTypeError, KernelError, ShapeError
from tests.support.budgets import in_turn
from tests.support.exact import exact_attention, near
from tests.support.models import VIT

B, H, KV, L, S, D = 2, 6, 3, 5, 7, 11
KERNELS = (None, "native", "sdpa", "chunked", "reference")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def attend(kernel: str | None, *operands: Tensor, **options: Any) -> Any:
    """Skips the test if the forced kernel refuses the call."""
    try:
        with torch.enable_grad() if kernel is None else clearhead.use_kernel(kernel):
            return clearhead.attention(*operands, **options)
    except KernelError as error:
        pytest.skip(str(error))


@in_turn({"kernel": KERNELS, "learns": [(0, 1, 2), (0,), (1, 2), ()]}, {"dtype": [torch.float32, torch.float64]})
def test_nan_in_a_fully_masked_query(kernel: str | None, dtype: torch.dtype, learns: tuple[int, ...]) -> None:
    marks = torch.ones(L, S, dtype=torch.bool)
    marks[1] = False
    inputs = [drawn(B, H, L, D, dtype=dtype), drawn(B, KV, S, D, dtype=dtype), drawn(B, KV, S, D, dtype=dtype)]
    inputs[0][:, :, 1] = torch.nan
    leaves = [x.requires_grad_(n in learns) for n, x in enumerate(inputs)]
    doubles = [x.detach().double().requires_grad_(n in learns) for n, x in enumerate(inputs)]
    expected = exact_attention(*doubles, marks[None, None]).output
    output = attend(kernel, *leaves, mask=masks.keep(marks))
    near(output, expected)
    if learns:
        result = torch.autograd.grad(output.square().sum(), [leaves[n] for n in learns])
        wanted = torch.autograd.grad(expected.square().sum(), [doubles[n] for n in learns])
        for mine, theirs in zip(result, wanted, strict=True):
            near(mine, theirs)


@pytest.mark.parametrize("kernel", ["native", "chunked", "reference", None])
@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}, {"sinks": True}], ids=str)
def test_a_loss_of_the_log_sum_exp_alone(kernel: str | None, extras: dict[str, Any]) -> None:
    inputs = [drawn(B, H, L, D), drawn(B, KV, S, D), drawn(B, KV, S, D)]
    sinks = {"sinks": drawn(H).requires_grad_()} if "sinks" in extras else {}
    options = {**extras, **sinks}
    leaves = [x.requires_grad_() for x in inputs]
    doubles = [x.detach().double().requires_grad_() for x in (*leaves, *sinks.values())]
    again = {**options, **({"sinks": doubles[3]} if sinks else {})}
    marks = (torch.arange(L)[:, None] >= torch.arange(S))[None, None]
    expected = torch.autograd.grad(
        exact_attention(*doubles[:3], marks, **again).lse.sin().sum(), doubles, materialize_grads=True
    )
    _, lse = attend(kernel, *leaves, mask=masks.causal(), return_lse=True, **options)
    result = torch.autograd.grad(
        lse.sin().sum(), [*leaves, *sinks.values()], allow_unused=True, materialize_grads=True
    )  # fmt: skip
    assert result[0].abs().max() > 0.01
    for mine, theirs in zip(result, expected, strict=True):
        near(mine, theirs)


@in_turn({"kernel": KERNELS, "more": [1, 3], "learns": [False, True]}, {"poison": [torch.nan, torch.inf]})
def test_nan_in_keys_after_the_last_query(kernel: str | None, poison: float, more: int, learns: bool) -> None:
    """Under a causal mask no query sees key S − 1 where S = L + 1."""
    inputs = [drawn(B, H, L, D), drawn(B, KV, L + more, D), drawn(B, KV, L + more, D)]
    for x in inputs[1:]:
        x[:, :, L:] = poison
    leaves = [x.requires_grad_(learns) for x in inputs]
    doubles = [x.detach().double()[:, :, :L].requires_grad_(learns) for x in inputs]
    marks = (torch.arange(L)[:, None] >= torch.arange(L))[None, None]
    expected = exact_attention(*doubles, marks).output
    output = attend(kernel, *leaves, mask=masks.causal())
    near(output, expected)
    if learns:
        result = torch.autograd.grad(output.square().sum(), leaves)
        wanted = torch.autograd.grad(expected.square().sum(), doubles)
        for mine, theirs in zip(result, wanted, strict=True):
            near(mine[:, :, :L], theirs)
            assert not mine[:, :, L:].any()


E = 96


class Cross(nn.Module):
    """Queries from one text, keys from another that is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(E, H)

    def forward(self, x: Tensor, memory: Tensor, marks: Tensor) -> Tensor:
        return self.attend(x, memory, mask=masks.keep(keys=marks))


def _divergence(one: Tensor, other: Tensor) -> Tensor:
    """½ KL(p, m) + ½ KL(q, m) of each row."""
    middle = (one + other) / 2
    parts = [torch.where(p > 0, p * (p.clamp_min(1e-300) / middle).log(), 0.0).sum(-1) for p in (one, other)]
    return sum(parts) / 2  # type: ignore[return-value]


@pytest.mark.parametrize("side", ["left", "right"])
def test_compare_of_cross_attention(side: str) -> None:
    """Queries of another length than the padded keys are all compared, whichever side the padding is on."""
    model, x = Cross().eval(), drawn(2, L, E)
    marks = torch.tensor([[True] * S, [False] * 3 + [True] * (S - 3)])
    marks = marks if side == "left" else marks.flip(1)
    recs = []
    for _ in range(2):
        memory = drawn(2, S, E)
        with torch.no_grad(), clearhead.record(model, keep="queries_keys") as rec:
            model(x, memory, marks)
        recs.append(rec)
    left, right = (rec.weights(0).double() for rec in recs)
    result = recs[0].compare(recs[1]).divergence["attend"]
    torch.testing.assert_close(result, _divergence(left, right).mean((0, 2)).to(result.dtype), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("place", range(3))
def test_a_sparse_tensor_after_an_expanded_one(place: int) -> None:
    """PyTorch says of both that their strides are zero."""
    inputs = [drawn(1, 1, 1, 1).expand(B, H, L, D) for _ in range(3)]
    near(clearhead.attention(*inputs), inputs[2])
    inputs[place] = drawn(B, H, L, D).to_sparse()
    name = ("query", "key", "value")[place]
    with pytest.raises(DTypeError, match=rf"^{name}: expected a torch.Tensor, got a tensor of layout torch.sparse_coo"):
        clearhead.attention(*inputs)


def test_a_key_projection_that_fits_no_input_beside_one_for_queries_and_values() -> None:
    attend = clearhead.MultiHeadAttention(12, 4)
    attend.v_proj = attend.q_proj
    attend.k_proj = nn.Linear(13, 12)
    x = drawn(2, 5, 12)
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"^key: expected .*13"):
            attend(x)


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
