"""Ranges of columns, which the kernel reads as they are: of any integer dtype, with gaps, and beyond the keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from tests.support.closeness import require_near
from tests.support.native import needs_native

B, H, L, S, D = 2, 3, 5, 7, 11
RANGES: dict[str, masks.Mask] = {
    **{
        str(dtype): masks.lengths(torch.tensor([3, 7], dtype=dtype))
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    },
    "with gaps": masks.lengths(torch.tensor([3, 0, 7, 0])[::2]),
    "with gaps in rows": masks.lengths(torch.arange(L * B).view(L, B).t() % (S + 1)),
    "of no key": masks.lengths(torch.tensor([0, 7])),
    "beyond the keys": masks.prefix(torch.tensor([2**40, 3])),
    "beyond 32 bits in rows that are cut": masks.causal() & masks.prefix(torch.tensor([2**33 + 1, 2])),
    "of padded queries": masks.lengths(torch.tensor([4, 6]), torch.tensor([2, 4])),
    "with a first key": masks.documents(torch.tensor([[0, 0, 1, 1, 2], [3, 3, 3, 4, 4]])) & masks.causal(),
}


def drawn(keys: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, L, D), (B, H, keys, D), (B, H, keys, D))
    query, key, value = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return query, key, value


@needs_native
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("shift", [0, 2])
def test_ranges_hide_what_reference_hides(name: str, shift: int) -> None:
    keys = L if "first key" in name else S
    inputs, exact = drawn(keys), [x.detach().double().requires_grad_() for x in drawn(keys)]
    positions = shift if "first key" not in name else 0
    for _ in range(2):
        with clearhead.use_kernel("native"):
            output, lse = clearhead.attention(*inputs, RANGES[name], key_positions=positions, return_lse=True)
            with torch.no_grad():
                require_near(clearhead.attention(*inputs, RANGES[name], key_positions=positions), output)
        with clearhead.use_kernel("reference"):
            expected, of_lse = clearhead.attention(*exact, RANGES[name], key_positions=positions, return_lse=True)
        require_near([output, lse], [expected, of_lse])
        found = torch.autograd.grad(output.square().sum() + lse.clamp(min=-9).sum(), inputs)
        require_near(found, torch.autograd.grad(expected.square().sum() + of_lse.clamp(min=-9).sum(), exact))


@needs_native
@pytest.mark.parametrize("name", RANGES)
def test_nan_outside_the_ranges_stays_there(name: str) -> None:
    inputs = drawn(L if "first key" in name else S)
    seen = RANGES[name].dense(L, inputs[1].shape[2], batch_size=B)[:, 0]
    rows, keys = (seen.any(dim)[:, None, :, None] for dim in (2, 1))
    poisoned = [x.detach().clone().where(of, torch.nan) for x, of in zip(inputs, (rows, keys, keys), strict=True)]
    poisoned = [x.requires_grad_() for x in poisoned]
    results = []
    for operands in (inputs, poisoned):
        with clearhead.use_kernel("native"):
            output = clearhead.attention(*operands, RANGES[name])
        results.append([output, *torch.autograd.grad(output.square().sum(), operands)])
    require_near(results[1], results[0])
