"""Packed sequences, each as if it were called alone, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from tests.support.closeness import require_near
from tests.support.comparing import require_half_as_good
from tests.support.native import SETS, NativeArguments, needs_native, plan_of

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 3, 13, 7
ROWS = [61, 0, 1, 211, 5, 7, 3, 0]
KEYS = [61, 3, 17, 307, 2, 0, 1301, 0]

pytestmark = needs_native

MASKS = {"all": None, "causal": masks.causal(), "window": masks.sliding_window(31, 5)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft-cap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
}


def starts(lengths: list[int], before: int = 0) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).add(before)


def numbers(
    kernel: str, dtype: torch.dtype, mask: masks.Mask | None, exact: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Output, lse and gradients; `exact` in float64, from inputs rounded to the dtype."""
    random = torch.Generator().manual_seed(3)
    shapes = {
        "query": (sum(ROWS), HEADS, DIM),
        "key": (sum(KEYS), KV_HEADS, DIM),
        "value": (sum(KEYS), KV_HEADS, VALUE_DIM),
    }
    rounded = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
    inputs = {name: (x.double() if exact else x).requires_grad_() for name, x in rounded.items()}
    options = {name: x.to(inputs["query"].dtype) if isinstance(x, Tensor) else x for name, x in options.items()}
    with clearhead.use_kernel(kernel):
        output, lse = clearhead.attention_varlen(
            *inputs.values(), starts(ROWS), starts(KEYS), mask, return_lse=True, **options
        )
    upstream = torch.randn(output.shape, generator=random).to(dtype).to(output.dtype)
    loss = (output * upstream).sum() + lse[lse.isfinite()].sum() / 3
    gradients = torch.autograd.grad(loss, tuple(inputs.values()))
    return {"output": output.detach(), "lse": lse.detach(), **dict(zip(inputs, gradients, strict=True))}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equal_a_loop_over_the_sequences(mask: masks.Mask | None, options: dict[str, Any], instructions: str) -> None:
    require_near(
        numbers("native", torch.float32, mask, **options),
        numbers("reference", torch.float32, mask, exact=True, **options),
        together=True,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("instructions", SETS, indirect=True)
def test_half_precision(dtype: torch.dtype, instructions: str) -> None:
    found, reference = (numbers(kernel, dtype, masks.causal()) for kernel in ("native", "reference"))
    require_half_as_good(found, reference, numbers("reference", dtype, masks.causal(), exact=True), dtype)


def test_starts_that_do_not_rise() -> None:
    shapes = ((HEADS, sum(ROWS), DIM), (KV_HEADS, sum(KEYS), DIM), (KV_HEADS, sum(KEYS), VALUE_DIM))
    tensors = (torch.randn(1, *shape) for shape in shapes)
    arguments = NativeArguments(*tensors, cu_seqlens_q=starts(ROWS), cu_seqlens_k=starts(KEYS))
    plan = plan_of(arguments)
    too_short = starts([*ROWS[:-2], ROWS[-2] - 1, 0])
    text = "cu_seqlens: starts of sequences have to rise from 0 to the number of all"
    for wrong in (starts(ROWS, before=1), starts(ROWS).flip(0), starts(ROWS, before=-1), too_short, None):
        with pytest.raises(ValueError, match=text):
            plan.forward(arguments._replace(cu_seqlens_q=wrong))


def test_the_same_as_a_batch() -> None:
    """Bits and all, dropout too."""
    batch = [torch.randn(4, HEADS, 61, DIM) for _ in range(3)]
    packed = [tensor.transpose(0, 1).reshape(1, HEADS, 4 * 61, DIM) for tensor in batch]
    cu_seqlens, options = torch.arange(5) * 61, {"seed": torch.tensor(3), "scale": 0.4, "high": 0, "dropout_p": 0.2}
    of_batch = NativeArguments(*batch, **options)
    of_packed = NativeArguments(*packed, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **options)
    expected, output = (plan_of(arguments).forward(arguments) for arguments in (of_batch, of_packed))
    assert torch.equal(output.view(HEADS, 4, 61, DIM).transpose(0, 1), expected)
