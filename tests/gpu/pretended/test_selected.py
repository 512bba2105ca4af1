"""Selected keys on a device: their blocks run on FlexAttention, single keys are gathered, and nothing is waited for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.kernels import _flex_choice
from tests.support.pretended_cuda.comparing import require_half_as_good, with_gradients
from tests.support.pretended_cuda.mode import PretendedDevice

L, DIM = 384, 16
CUDA = torch.device("cuda:0")


def lists(block: int, listed: int) -> Tensor:
    return torch.randint(-1, L // block, (2, 1, L, listed), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("block", "listed", "kernel"), [(1, 9, "chunked"), (16, 3, "chunked"), (128, 1, "flex")])
def test_values_and_gradients_are_those_of_the_cpu(
    cuda: PretendedDevice, block: int, listed: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_flex_choice, "FEWEST", L)
    monkeypatch.setattr(_flex_choice.CHECK, "_passed", {})
    generator, indices = torch.Generator().manual_seed(1), lists(block, listed)
    inputs = [torch.randn(2, heads, L, DIM, generator=generator).bfloat16() for heads in (4, 2, 2)]
    exact, same = (
        with_gradients(inputs, masks.causal() & masks.selected(indices, block=block), dtype, "reference")
        for dtype in (torch.float64, torch.bfloat16)
    )
    on_device = [x.to(CUDA) for x in inputs]
    mask = masks.causal() & masks.selected(indices.to(CUDA), block=block)
    explanation = clearhead.explain(on_device[0], on_device[1], on_device[2], mask)
    assert explanation.kernel == kernel
    got: list[Tensor] = []
    seen = cuda.count(lambda: got.extend(with_gradients(on_device, mask, torch.bfloat16)))
    assert not seen.values
    require_half_as_good(got, same, exact)


def test_numbers_out_of_range_are_none(cuda: PretendedDevice) -> None:
    """They are not read before the call."""
    indices = lists(1, 9)
    inputs = [torch.randn(2, 4, L, DIM, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    expected = clearhead.attention(*inputs, masks.selected(indices.masked_fill(indices < 3, -1)))
    beyond = indices.masked_fill(indices < 3, L + 7).to(CUDA)
    output = clearhead.attention(*(x.to(CUDA) for x in inputs), masks.selected(beyond))
    torch.testing.assert_close(output.cpu(), expected, rtol=0, atol=1e-5)
