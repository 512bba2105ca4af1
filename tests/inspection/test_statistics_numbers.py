"""Errors of statistics do not grow with the length, on inputs whose rounding errors add up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead._native import instruction_sets, use_instruction_set
from clearhead._statistics import compute

from ..kernels.adversarial import Adversary

STATISTICS = ("entropy", "received", "confidence", "map", "output", "output_norm", "head_average", "top_k")


@pytest.fixture(name="path", params=["blocks", *instruction_sets()])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Statistics block by block in PyTorch, and from the native kernel on each instruction set of this machine."""
    if request.param == "blocks":
        monkeypatch.setattr(compute, "refuses", lambda _: True)
        yield "blocks"
        return
    with use_instruction_set(request.param):
        yield request.param


def gathered(case: Adversary, dtype: torch.dtype) -> dict[str, Tensor]:
    query, key, value, _ = (x.to(dtype) for x in case.inputs())
    found = clearhead.attention_statistics(
        query, key, value=value, scale=case.scale * case.dim**-0.5, statistics=STATISTICS, map_size=4
    )
    results = {name: getattr(found, name) for name in STATISTICS if name != "top_k"}
    return {**results, "top weights": found.top_k.weights}


@pytest.mark.parametrize("size", [(8209, 1031), (5, 32768)], ids=str)
@pytest.mark.parametrize("keys", ["equal", "rising"])
def test_errors_stay_below_the_tolerance(keys: str, size: tuple[int, int], path: str) -> None:
    case = Adversary(keys, "equal", *size)
    exact = gathered(case, torch.float64)
    for name, found in gathered(case, torch.float32).items():
        error, largest = (found.double() - exact[name]).abs().max(), exact[name].abs().max()
        assert error <= 1e-5 * largest, f"{name}: off by {error:.3g} of {largest:.3g}"
