"""Hooks on saved tensors that move them between a CUDA device and the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import clearhead
from clearhead import masks
from tests.support.pretended_cuda.mode import PretendedDevice
from tests.support.saving import EXACT, returning

H, L, D = 2, 24, 16
#: Hooks that return tensors on the other device, and hooks that return them where they were.
HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "another device": returning(lambda x: x.cpu() if x.is_cuda else x.to("cuda")),
    "save_on_cpu": save_on_cpu,
    "gaps": EXACT["gaps"],
}


@pytest.mark.parametrize("kernel", [None, "chunked"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("hooks", HOOKS)
def test_gradients(cuda: PretendedDevice, hooks: str, device: str, kernel: str | None) -> None:
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(1, L, H, D, generator=generator).transpose(1, 2) for _ in range(3)]

    def gradients(device: str, dtype: torch.dtype, around: AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        leaves = [x.to(device, dtype).requires_grad_() for x in given]
        # PyTorch's own operations, such as those that hide padding, need what they saved where it was.
        mask = masks.causal()
        with around, clearhead.use_kernel(kernel) if kernel else nullcontext():
            output = clearhead.attention(*leaves, mask)
        return torch.autograd.grad(output.square().sum(), leaves)

    exact = gradients("cpu", torch.float64, nullcontext())
    for found, right in zip(gradients(device, torch.float32, HOOKS[hooks]()), exact, strict=True):
        assert found.device.type == device
        torch.testing.assert_close(found.cpu().double(), right, rtol=0, atol=1e-5 * float(right.abs().max()))
