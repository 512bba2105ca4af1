"""Values on a CUDA device are checked under `check_values` alone; unchecked wrong ones stay within the tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import caches, masks
from clearhead.errors import ClearheadError
from tests.support.pretended_cuda.mode import PretendedDevice

B, H, L, D = 2, 4, 16, 32


def x(device: str = "cuda") -> Tensor:
    return torch.randn(B, H, L, D, generator=torch.Generator().manual_seed(1)).to(device)


def numbers(values: list[int], device: str) -> Tensor:
    return torch.tensor(values).to(device)


def _attended(mask: Callable[[], masks.Mask], device: str, **options: Tensor) -> Tensor:
    return clearhead.attention(x(device), x(device), x(device), mask(), **options)


def _documents(places: list[int], device: str) -> Tensor:
    positions = numbers(places * (L // len(places)), device)
    ids = (torch.arange(L) // 5).to(device)
    return _attended(
        lambda: masks.documents(ids), device, query_positions=positions, key_positions=torch.arange(L).to(device)
    )


def _reordered(rows: list[int], device: str) -> Tensor:
    cache = caches.KVCache(B, H, L, D, device=device)
    cache.update(x(device), x(device))
    cache.reorder(numbers(rows, device))
    return cache.key


def _varlen(bounds: list[int], device: str) -> Tensor:
    tokens = x(device)[0].transpose(0, 1)  # (T, H, D)
    boundaries = numbers(bounds, device)
    return clearhead.attention_varlen(tokens, tokens, tokens, boundaries, boundaries)


#: Each with a wrong value, and what it counts as.
WRONG: dict[str, tuple[Callable[[str], Tensor], Callable[[str], Tensor]]] = {
    "lengths": (
        lambda device: _attended(lambda: masks.lengths(numbers([L + 9, -3], device)), device),
        lambda device: _attended(lambda: masks.lengths(numbers([L, 0], device)), device),
    ),
    "keep": (
        lambda device: _attended(lambda: masks.keep(keys=numbers([1, 2] * L, device).view(B, L)), device),
        lambda device: _attended(lambda: masks.keep(keys=numbers([1, 0] * L, device).view(B, L)), device),
    ),
    "documents": (
        lambda device: _documents([3, L + 70, 2, -5], device),
        lambda device: _documents([3, L - 1, 2, 0], device),
    ),
    "reorder": (lambda device: _reordered([7, -2], device), lambda device: _reordered([1, 0], device)),
    "boundaries": (
        lambda device: _varlen([0, 9, 4, 99], device),
        lambda device: _varlen([0, 9, 9, L], device),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_counts_as_the_page_says(cuda: PretendedDevice, name: str) -> None:
    wrong, right = WRONG[name]
    seen = cuda.count(lambda: wrong("cuda"))
    assert not seen.values
    assert not seen.shapes
    assert torch.equal(wrong("cuda").cpu(), right("cuda").cpu())


@pytest.mark.parametrize("name", WRONG)
def test_check_values_raises_what_the_cpu_raises(cuda: PretendedDevice, name: str) -> None:
    wrong, right = WRONG[name]
    with pytest.raises(ClearheadError) as on_the_cpu:
        wrong("cpu")
    with clearhead.check_values():
        assert torch.allclose(right("cuda").cpu(), right("cpu"), atol=1e-5)
        with pytest.raises(ClearheadError) as on_the_device:
            wrong("cuda")
    assert str(on_the_device.value) == str(on_the_cpu.value)


def test_a_mask_that_was_made_unchecked_is_checked_in_a_call(cuda: PretendedDevice) -> None:
    mask = masks.lengths(torch.tensor([L + 9, 3]).cuda())
    with clearhead.check_values(), pytest.raises(ClearheadError, match="lengths of at most S = 16"):
        clearhead.attention(x(), x(), x(), mask)
