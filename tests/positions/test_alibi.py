"""ALiBi: the paper's slopes and biases, on every kernel, and BLOOM's numbers after the softmax."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import clearhead
from clearhead import masks
from clearhead.positions import ALiBi
from tests.support.oracle import Problem, gradients, solve
from tests.support.positions_oracle import alibi_slope

BATCH, HEADS, KV_HEADS, LENGTH, COUNT, HEAD_DIM = 2, 6, 3, 5, 7, 11
HEAD_COUNTS = [1, 2, 3, 5, 6, 8, 12, 13, 16, 40, 71]


@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_the_slopes(heads: int) -> None:
    expected = torch.tensor([alibi_slope(heads, h) for h in range(heads)])
    torch.testing.assert_close(ALiBi(heads).slopes, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(ALiBi(heads).dense(2)[0, :, 0, 1], -expected, rtol=1e-6, atol=0)


def test_the_slopes_of_the_paper() -> None:
    assert ALiBi(8).slopes.tolist() == [2.0**-h for h in range(1, 9)]


@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_weights_are_those_of_bloom(heads: int) -> None:
    query, key = torch.randn(BATCH, heads, COUNT, HEAD_DIM), torch.randn(BATCH, heads, COUNT, HEAD_DIM)
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])  # the first item is padded on the left
    alibi = build_alibi_tensor(real, heads, torch.float32).view(BATCH, heads, 1, COUNT)
    hidden = ~(torch.ones(COUNT, COUNT).tril().bool() & real.bool()[:, None, None])
    theirs = (query @ key.transpose(-2, -1) / HEAD_DIM**0.5 + alibi).masked_fill(hidden, -torch.inf).softmax(-1)
    positions = real.cumsum(-1) - 1
    ours = clearhead.attention_weights(
        query,
        key,
        masks.causal() & masks.keep(keys=real) & ALiBi(heads),
        query_positions=positions,
        key_positions=positions,
    )
    seeing = real.bool()[:, None, :, None].expand_as(ours)
    torch.testing.assert_close(ours[seeing], theirs[seeing], rtol=0, atol=1e-5)


def problem(query_start: int, causal: bool) -> tuple[tuple[torch.Tensor, ...], Problem]:
    inputs = (
        torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64, requires_grad=True),
        torch.randn(BATCH, KV_HEADS, COUNT, HEAD_DIM, dtype=torch.float64, requires_grad=True),
        torch.randn(BATCH, KV_HEADS, COUNT, 3, dtype=torch.float64, requires_grad=True),
    )
    bias = torch.zeros(1, HEADS, LENGTH, COUNT, dtype=torch.float64)
    for h in range(HEADS):
        for i in range(LENGTH):
            for j in range(COUNT):
                bias[0, h, i, j] = -alibi_slope(HEADS, h) * abs(query_start + i - j)
    return inputs, Problem(*inputs, lambda b, h, i, j: not causal or j <= query_start + i, (bias,))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("kernel", ["reference", "chunked"])
@pytest.mark.usefixtures("small_blocks")
def test_outputs_and_gradients(kernel: str, start: int, causal: bool) -> None:
    inputs, described = problem(start, causal)
    mask = ALiBi(HEADS) & masks.causal() if causal else ALiBi(HEADS)
    positions = torch.arange(start, start + LENGTH)
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(*inputs, mask, query_positions=positions)
    answer = solve(described)
    torch.testing.assert_close(output, answer.output, rtol=0, atol=1e-10)
    upstream = torch.randn_like(output)
    found = torch.autograd.grad(output, inputs, upstream)
    for one, expected in zip(found, gradients(answer, upstream), strict=False):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-10)


def test_pytorchs_kernel_takes_it_for_one_head() -> None:
    query, key = torch.randn(BATCH, 1, LENGTH, 8), torch.randn(BATCH, 1, COUNT, 8)
    with clearhead.use_kernel("sdpa"):
        fused = clearhead.attention(query, key, key, ALiBi(1))
    with clearhead.use_kernel("reference"):
        torch.testing.assert_close(fused, clearhead.attention(query, key, key, ALiBi(1)))


@pytest.mark.usefixtures("small_blocks")
def test_keys_that_differ_between_heads() -> None:
    query, key = torch.randn(BATCH, HEADS, LENGTH, 8), torch.randn(BATCH, HEADS, COUNT, 8)
    key_positions = torch.randint(0, 50, (BATCH, HEADS, COUNT))
    distances = (torch.arange(LENGTH)[:, None] + 9 - key_positions[:, :, None]).abs()
    bias = -torch.tensor([alibi_slope(HEADS, h) for h in range(HEADS)])[:, None, None] * distances
    expected = clearhead.attention(query, key, key, masks.bias(bias))
    for kernel in ("reference", "chunked"):
        with clearhead.use_kernel(kernel):
            output = clearhead.attention(
                query, key, key, ALiBi(HEADS), query_positions=torch.arange(9, 14), key_positions=key_positions
            )
        torch.testing.assert_close(output, expected)


def test_padding_stays_finite() -> None:
    dense = ALiBi(HEADS).dense(3, query_positions=torch.tensor([-1, 0, 1]), key_positions=torch.tensor([-1, 0, 1]))
    assert dense.isfinite().all()


def test_a_picture_says_its_name() -> None:
    assert repr(ALiBi(HEADS) & masks.causal()).startswith("<mask ALiBi(6) & causal(), item")
    assert ALiBi(HEADS).describe() == "ALiBi(6)"
