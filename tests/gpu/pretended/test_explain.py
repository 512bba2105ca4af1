"""`explain` names PyTorch's kernel on a CUDA device, and what keeps a call from a faster one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead._call.call import Call, valid_call
from clearhead.kernels._sdpa import SdpaKernel
from clearhead.masks import Mask
from tests.support.pretended_cuda.mode import PretendedDevice

CAPABILITY = os.environ.get("PRETENDED_CAPABILITY", "9")
_FIRST = "cuDNN" if CAPABILITY == "9" else "flash"


def inputs(dim: int = 64, value_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.zeros(2, 4, 96, size, dtype=dtype, device="cuda") for size in (dim, dim, value_dim))  # pyright: ignore


_LENGTHS = masks.lengths(torch.tensor([96, 50]))
_NO_MASK, _HEADS = "without a mask, or with causal() alone", "with D = Dv, a multiple of 8 up to 128"


@pytest.mark.parametrize(
    ("sizes", "mask", "options", "backend", "faster"),
    [
        ({}, None, {}, _FIRST, ()),
        ({}, masks.causal(), {}, _FIRST, ()),
        (
            {},
            _LENGTHS,
            {},
            {"9": "cuDNN", "8": "efficient"},
            {"9": (), "8": (f"flash {_NO_MASK}",)},
        ),
        ({"dtype": torch.float32}, None, {}, "efficient", (f"{_FIRST} in bfloat16",)),
        (
            {"dtype": torch.float32},
            _LENGTHS,
            {},
            "efficient",
            {"9": ("cuDNN in bfloat16",), "8": (f"flash {_NO_MASK} and in bfloat16",)},
        ),
        ({"dim": 192, "value_dim": 192}, None, {}, "flash", {"9": (f"cuDNN {_HEADS}",), "8": ()}),
    ],
)
def test_the_backend_and_what_keeps_from_a_faster_one(
    cuda: PretendedDevice, sizes: dict[str, Any], mask: Mask | None, options: dict[str, Any], backend: Any, faster: Any
) -> None:
    found = clearhead.explain(*inputs(**sizes), mask, **options)
    assert found.kernel == "sdpa"
    expected = backend[CAPABILITY] if isinstance(backend, dict) else backend
    assert found.backend == expected
    assert found.faster == (faster[CAPABILITY] if isinstance(faster, dict) else faster)
    assert f"backend: {expected}" in str(found)


def test_settings_of_the_process_are_named(cuda: PretendedDevice) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        found = clearhead.explain(*inputs())
    assert found.backend == "efficient"
    assert {"cuDNN is switched off", "flash is switched off"} <= set(found.faster)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_kernels_and_the_cpu_have_no_backend(cuda: PretendedDevice, device: str) -> None:
    query = torch.zeros(1, 2, 5, 8, device=device, dtype=torch.float64)
    found = clearhead.explain(query, query, query)
    assert (found.kernel == "chunked") is (device == "cuda")
    assert (found.backend, found.faster) == ("", ())


@pytest.mark.parametrize(
    ("sizes", "mask", "fits"),
    [
        ({}, _LENGTHS, True),
        ({"dtype": torch.float32}, _LENGTHS, True),
        ({"dtype": torch.float64}, None, False),
        ({"dim": 60, "value_dim": 60}, None, True),
        ({"dim": 60, "value_dim": 60}, _LENGTHS, False),
        ({"dim": 60, "value_dim": 60, "dtype": torch.float32}, _LENGTHS, True),
        ({"dim": 62, "value_dim": 62, "dtype": torch.float32}, None, False),
        ({"value_dim": 60}, None, False),
    ],
)
def test_a_traced_call_runs_on_a_fused_kernel_or_not_on_sdpa(
    cuda: PretendedDevice, sizes: dict[str, Any], mask: Mask | None, fits: bool
) -> None:
    call = valid_call(Call(*inputs(**sizes), mask))
    traced = SdpaKernel().refusals(call.layout._replace(tracing=True), call.bound)
    assert (traced == ()) is fits
    # The same answer as outside of a graph, where PyTorch chooses.
    assert (SdpaKernel().refusals(call.layout, call.bound) == ()) is fits
