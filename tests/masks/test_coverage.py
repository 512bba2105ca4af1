"""The coverage of masks with tensors, by the native extension and by PyTorch's operations alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import and_

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.masks import Mask
from clearhead.masks._coverage import coverage
from clearhead.masks._grid import Grid
from tests.support.native import needs_native

B, H, L, S = 2, 3, 67, 83  # more than are looked at in one go
paths = pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])


def sparse(*shape: int) -> Tensor:
    """Few marks, so that some rows and some columns have none."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.03


def band() -> Tensor:
    return torch.ones(L, S, dtype=torch.bool).tril(-5).triu(-9)


def added(shown: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(shown.shape, torch.finfo(dtype).min, dtype=dtype).masked_fill(~shown, -torch.inf)


MASKS: dict[str, Callable[[], Mask]] = {
    "one of each batch item and head": lambda: masks.keep(sparse(B, H, L, S)),
    "(B·H, L, S)": lambda: masks.drop(~sparse(B * H, L, S)),
    "keys": lambda: masks.keep(keys=sparse(B, S)),
    "queries": lambda: masks.keep(sparse(B, 1, L, 1)),
    "a band": lambda: masks.keep(band()),
    "transposed": lambda: masks.keep(sparse(S, L).mT),
    "every other column": lambda: masks.keep(sparse(L, 2 * S)[:, ::2]),
    "everything": lambda: masks.keep(torch.ones(L, S)),
    "the last key": lambda: masks.keep(torch.arange(S).expand(L, S) == S - 1),
    "NaN": lambda: masks.bias(torch.full((L, S), torch.nan)),
    "infinity": lambda: masks.bias(torch.full((L, S), torch.inf)),
    "negated": lambda: masks.bias(torch.where(sparse(L, S), 1j, complex(0, torch.inf)).conj().imag),
    "several": lambda: masks.keep(sparse(L, S)) & masks.keep(keys=sparse(B, S).logical_not()) & masks.causal(),
    "a band of several": lambda: masks.sliding_window(3, 1) & masks.bias(added(band(), torch.float32)),
    "more than there is room for": lambda: functools.reduce(and_, (masks.keep(~each) for each in sparse(7, L, S))),
    **{
        f"numbers of {dtype}": lambda dtype=dtype: masks.bias(added(sparse(B, 1, L, S), dtype))
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    },
}


@paths
@pytest.mark.parametrize("name", MASKS)
def test_fully_masked_rows_and_keys(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("clearhead.masks._native_coverage.extension", None)
    mask, grid = MASKS[name](), Grid(B, H, L, S, torch.device("cpu"))
    cells, covered = mask.dense(L, S, batch_size=B, num_heads=H), coverage(mask, grid)
    visible = cells if cells.dtype == torch.bool else cells != -torch.inf
    for axis, expected in ((covered.queries, visible.any(-1)), (covered.keys, visible.any(-2))):
        assert (axis is None) == bool(expected.all())
        if axis is not None:
            assert torch.equal(axis.squeeze(-1).expand(expected.shape), expected)


@needs_native
@paths
def test_a_mask_that_is_changed_between_two_calls(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where PyTorch does not know of the change."""
    if not native:
        monkeypatch.setattr("clearhead.masks._native_coverage.extension", None)
    query, key = torch.randn(1, H, L, 5), torch.randn(1, H, S, 5)
    numbers = torch.zeros(L, S)
    mask = masks.bias(numbers)
    with clearhead.use_kernel("native" if native else "chunked"):
        assert clearhead.attention(query, key, key, mask)[:, :, 11].any()
        numbers.numpy()[11] = -torch.inf
        assert not clearhead.attention(query, key, key, mask)[:, :, 11].any()
        numbers.data[:, 31] = -torch.inf
        key[:, :, 31] = torch.nan
        assert clearhead.attention(query, key, key, mask).isfinite().all()
