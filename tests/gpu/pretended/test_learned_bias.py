"""A bias that learns: FlexAttention computes its gradient where it is large enough, and `explain` says why not else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.kernels import _flex_choice
from clearhead.positions import RelativeBias
from tests.support.pretended_cuda.comparing import require_half_as_good
from tests.support.pretended_cuda.mode import PretendedDevice

B, H, HKV, L, D = 2, 4, 2, 300, 16
CUDA = torch.device("cuda:0")


@pytest.fixture(name="small")
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls stand for large ones, and no check of the device is remembered from another test."""
    monkeypatch.setattr(_flex_choice, "FEWEST_SCORES", 1)
    for check in (_flex_choice.CHECK, _flex_choice.BIAS_CHECK):
        monkeypatch.setattr(check, "_passed", {})


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, heads, L, D, generator=generator).bfloat16() for heads in (H, HKV, HKV)]


def with_gradients(
    inputs: list[Tensor],
    bias: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    make: Callable[..., Any],
    **options: Any,
) -> list[Tensor]:
    """The output and the gradients of query, key, value and bias."""
    leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
    leaves.append(bias.to(device).to(torch.promote_types(dtype, torch.float32)).requires_grad_())
    output = clearhead.attention(*leaves[:3], make(leaves[3]), **options)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output))]


#: The shape of a bias, its mask and options.
CALLS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any], dict[str, Any]]] = {
    "of each score": ((1, H, L, L), masks.bias, {}),
    "causal": ((1, H, L, L), lambda bias: masks.bias(bias) & masks.causal(), {}),
    "of keys, as forgetting": ((B, H, 1, L), lambda bias: masks.bias(bias) & masks.causal(), {}),
    "of heads, soft-cap": ((1, H, 1, 1), lambda bias: masks.bias(bias) & masks.sliding_window(70, 3), {"softcap": 3.0}),
    "two": ((L, L), lambda bias: masks.bias(bias) & masks.bias(bias * 2) & masks.causal(), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_its_gradient_comes_from_one_kernel(cuda: PretendedDevice, small: None, name: str) -> None:
    shape, make, options = CALLS[name]
    inputs, bias = operands(), torch.randn(shape, generator=torch.Generator().manual_seed(3))
    exact = with_gradients(inputs, bias, torch.device("cpu"), torch.float64, make, **options)
    with clearhead.use_kernel("reference"):
        same = with_gradients(inputs, bias, torch.device("cpu"), torch.bfloat16, make, **options)
    with_gradients(inputs, bias, CUDA, torch.bfloat16, make, **options)  # checks the device
    found: list[Tensor] = []
    seen = cuda.count(lambda: found.extend(with_gradients(inputs, bias, CUDA, torch.bfloat16, make, **options)))
    assert seen.backends == ["flex"]
    assert seen.values == seen.shapes == []
    require_half_as_good(found, same, exact, 1e-6)


def _explain(mask: Any, **options: Any) -> clearhead.Explanation:
    query, key, value = (x.to(CUDA) for x in operands())
    return clearhead.explain(query, key, value, mask, **options)


def _bias() -> Tensor:
    return torch.zeros(1, H, L, L, device=CUDA, requires_grad=True)


def test_explain_says_what_keeps_it_on_chunked(cuda: PretendedDevice, small: None) -> None:
    found = _explain(masks.bias(_bias()))
    assert (found.kernel, found.reasons["flex"]) == ("flex", ())
    assert found.reasons["chunked"] == ("`flex` computes the gradient of a bias in one kernel",)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "it has no dropout": (masks.bias(_bias()), {"dropout_p": 0.5}),
        "the mask is a tensor or a function": (masks.bias(_bias()) & masks.mask_mod(lambda b, h, q, k: q > k), {}),
        "a computed bias would have to be built whole": (RelativeBias(H).to(CUDA), {}),
        "it has no sinks": (masks.bias(_bias()), {"sinks": torch.zeros(H, device=CUDA)}),
    }
    for reason, (mask, options) in cases.items():
        found = _explain(mask, **options)
        assert found.kernel == "chunked", reason
        assert any(each.startswith(reason) for each in found.reasons["flex"]), (reason, found.reasons["flex"])


def test_few_scores_stay_on_chunked(cuda: PretendedDevice) -> None:
    found = _explain(masks.bias(_bias()))
    assert found.kernel == "chunked"
    assert found.reasons["flex"] == ("the call is smaller than those for which compiling it pays",)


def test_sums_in_any_order_are_not_deterministic(cuda: PretendedDevice, small: None) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert _explain(masks.bias(_bias())).reasons["flex"] == ("it sums the gradient of a bias in any order",)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_wrong_gradient_is_found_by_the_check(
    cuda: PretendedDevice, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_flex_choice.BIAS_CHECK, "_compare", lambda device, dtype: "its numbers are wrong by 1")
    with pytest.warns(RuntimeWarning, match="FlexAttention with a learned bias failed the check on cuda:0"):
        assert _explain(masks.bias(_bias())).kernel == "chunked"
