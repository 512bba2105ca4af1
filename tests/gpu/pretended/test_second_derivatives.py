"""Second derivatives on a CUDA device, where PyTorch's fused kernels have none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from tests.support.pretended_cuda.mode import PretendedDevice

H, L, D = 2, 24, 16
BOUNDS = torch.tensor([0, 7, 24], dtype=torch.int32)
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bounds = BOUNDS.to(q.device)
    query, key, value = (x[0].transpose(0, 1) for x in (q, k, v))
    return clearhead.attention_varlen(query, key, value, bounds, bounds, masks.causal())


CALLS: dict[str, Call] = {
    "causal": lambda q, k, v: clearhead.attention(q, k, v, masks.causal()),
    "lengths": lambda q, k, v: clearhead.attention(q, k, v, masks.lengths(torch.tensor([17]))),
    "packed": packed,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_they_are_those_of_the_cpu(cuda: PretendedDevice, name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, H, L, D, generator=generator).bfloat16() for _ in range(3)]

    def second(device: str, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = leaves = [x.to(dtype).to(device).requires_grad_() for x in inputs]
        output = CALLS[name](q, k, v)
        first = torch.autograd.grad(output.float().square().sum(), leaves, create_graph=True)
        squares = torch.stack([x.float().square().sum() for x in first]).sum()
        return [x.cpu().double() for x in torch.autograd.grad(squares, leaves)]

    exact, got = second("cpu", torch.float64), second("cuda", dtype)
    bound = 1e-4 if dtype == torch.float32 else 0.05
    for ours, judge in zip(got, exact, strict=True):
        assert float((ours - judge).abs().max()) <= bound * float(judge.abs().max())
