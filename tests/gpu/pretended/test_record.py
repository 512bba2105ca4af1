"""Records, statistics and weights on a CUDA device: their operators, that none waits, and their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.masks import Mask
from tests.support.pretended_cuda.mode import PretendedDevice

FOUR = ("entropy", "received", "max_logit", "top_k")
ALL = (
    *FOUR,
    "raw_max_logit",
    "confidence",
    "sink",
    "distance",
    "offset",
    "map",
    "head_average",
    "output",
    "output_norm",
)
MASKS: dict[str, Callable[[str], Mask | None]] = {
    "none": lambda device: None,
    "causal": lambda device: masks.causal(),
    "window": lambda device: masks.sliding_window(7, 3),
    "lengths": lambda device: masks.lengths(torch.tensor([29, 0])),
    "causal and lengths": lambda device: masks.causal() & masks.lengths(torch.tensor([29, 11])),
    "keep": lambda device: masks.keep(torch.arange(37 * 41, device=device).view(37, 41) % 3 == 0),
    "bias": lambda device: masks.bias(torch.linspace(-2, 2, 37 * 41, device=device).view(37, 41)),
}


class Stack(nn.Module):
    """Layers of attention, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(clearhead.MultiHeadAttention(256, 4) for _ in range(count))

    def forward(self, x: Tensor, mask: Mask | None = None, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x


def stack(count: int = 2) -> Stack:
    torch.manual_seed(0)
    return Stack(count)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; NaN in the last keys of the first batch item, which `lengths` hides."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 37, 16, dtype=dtype), torch.randn(2, 2, 41, 16, dtype=dtype)
    return query, key, torch.randn(2, 2, 41, 8, dtype=dtype)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.lengths(torch.tensor([1024, 700]))], ids=str)
def test_a_record_reads_nothing(cuda: PretendedDevice, mask: Mask | None) -> None:
    model, x = stack().to("cuda").bfloat16().eval(), torch.randn(2, 1024, 256).bfloat16().cuda()
    padding = (torch.arange(1024) < torch.tensor([[1024], [700]])).cuda()

    def run() -> None:
        model(x, mask, attention_mask=padding)

    def recorded() -> None:
        with clearhead.record(model, statistics=FOUR, heads=[0, 2], queries=[3, -1], keep="queries_keys"):
            run()

    with torch.no_grad():
        recorded()
        plain, seen = cuda.count(run), cuda.count(recorded)
    assert seen.values == seen.shapes == []
    assert seen.copies == plain.copies
    # One block of all rows in each layer, whatever the length.
    assert seen.count - plain.count <= 2 * 120


@pytest.mark.parametrize("name", MASKS)
def test_statistics_are_those_of_the_cpu(cuda: PretendedDevice, name: str) -> None:
    query, key, value = inputs()
    counted = torch.arange(37) < torch.tensor([[37], [20]])
    if "lengths" in name:
        key[1, :, 11:] = value[1, :, 11:] = torch.nan
    expected = clearhead.attention_statistics(
        query.double(), key.double(), MASKS[name]("cpu"), value=value.double(), statistics=ALL, query_mask=counted
    )
    mask = MASKS[name]("cuda")
    got: list[Any] = []

    def run() -> None:
        arguments = {"value": value.cuda(), "statistics": ALL, "query_mask": counted.cuda()}
        got.append(clearhead.attention_statistics(query.cuda(), key.cuda(), mask, **arguments))

    run()
    seen = cuda.count(run)
    assert seen.values == seen.shapes == []
    for result in expected.names:
        ours, judge = getattr(got[-1], result), getattr(expected, result)
        if result == "top_k":
            assert torch.equal(ours.indices.cpu(), judge.indices)
            ours, judge = ours.weights, judge.weights
        torch.testing.assert_close(ours.cpu().double(), judge.double(), rtol=1e-5, atol=1e-5, msg=result)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("average", [False, True])
def test_weights_and_their_gradients_are_those_of_the_cpu(cuda: PretendedDevice, name: str, average: bool) -> None:
    query, key, _ = inputs()

    def results(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        query, key = query.requires_grad_(), key.requires_grad_()
        weights = clearhead.attention_weights(query, key, MASKS[name](query.device.type), average_attn_weights=average)
        slope = torch.linspace(-1, 1, 41, device=weights.device, dtype=weights.dtype)
        return weights.detach(), *torch.autograd.grad((weights * slope).sum(), (query, key))

    expected, got = results(query.double(), key.double()), results(query.cuda(), key.cuda())
    for ours, judge in zip(got, expected, strict=True):
        assert float((ours.cpu() - judge).abs().max()) <= 1e-5 * max(1.0, float(judge.abs().max()))
