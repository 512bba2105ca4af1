"""Sinks run on PyTorch's fused kernels, whose outputs and gradients are rescaled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.masks import Mask
from tests.support.pretended_cuda.comparing import error, require_half_as_good, with_gradients
from tests.support.pretended_cuda.mode import PretendedDevice

from .test_masks import CAPABILITY, KEY_PADDING, B, D, H, L, mask_of, operands

#: In bfloat16, which has 8 significant bits, the output is rounded by PyTorch's kernel, and again when it is rescaled.
#: The gradient of a sink is a sum over it, whose terms cancel.
ROUNDED_TWICE, SUM_OF_ROUNDED = 2**-7, 2**-6
SINKS = torch.tensor([0.7, -2.0, 5.0, -torch.inf])


def sinks_of_queries(length: int) -> Tensor:
    """Sinks (B, H, L), some of them none."""
    sinks = torch.randn(B, H, length, generator=torch.Generator().manual_seed(5)) * 2
    return sinks.masked_fill(torch.arange(length) % 6 == 2, -torch.inf)


#: Those that become tensors of another shape, and none.
MASKS = ("none", "lengths", "window", "bias", "rows")


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("causal", "of_queries"), [(False, False), (True, False), (True, True)])
def test_a_prepared_mask_takes_one_fused_kernel_and_few_operators(
    cuda: PretendedDevice, name: str, causal: bool, of_queries: bool
) -> None:
    device = torch.device("cuda:0")
    query, key, value = inputs = [x.to(device).requires_grad_() for x in operands(L, torch.bfloat16)]
    sinks = (sinks_of_queries(L) if of_queries else SINKS).to(device).requires_grad_()
    mask = mask_of(name, causal, L, device)
    if mask is not None:
        mask = mask.prepare(L, L, batch_size=B, num_heads=H, device=device)
    clearhead.attention(query, key, value, mask, sinks=sinks)  # the first call checks the kernels
    outputs: list[Tensor] = []
    forward = cuda.count(lambda: outputs.append(clearhead.attention(query, key, value, mask, sinks=sinks)))
    backward = cuda.count(lambda: torch.autograd.grad(outputs[0].sum(), [*inputs, sinks]))
    assert forward.backends == ["cuDNN" if CAPABILITY == "9" else "flash" if name == "none" else "efficient"]
    assert forward.waits == backward.waits == []
    assert forward.count <= 8
    assert max(forward.largest, backward.largest) <= 4 * inputs[0].numel()  # float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("length", [75, 13])  # 13 rows of a group become rows of one head
def test_values_and_gradients_are_those_of_the_cpu(
    cuda: PretendedDevice, length: int, name: str, kv_heads: int, causal: bool, dtype: torch.dtype
) -> None:
    require_values_of_the_cpu(cuda, length, name, kv_heads, causal, dtype, SINKS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize("name", ["none", "lengths", "bias"])
@pytest.mark.parametrize(("length", "causal"), [(75, True), (13, False)])
def test_sinks_of_queries(
    cuda: PretendedDevice, length: int, name: str, kv_heads: int, causal: bool, dtype: torch.dtype
) -> None:
    require_values_of_the_cpu(cuda, length, name, kv_heads, causal, dtype, sinks_of_queries(length))


def require_values_of_the_cpu(
    cuda: PretendedDevice,
    length: int,
    name: str,
    kv_heads: int,
    causal: bool,
    dtype: torch.dtype,
    logits: Tensor,
) -> None:
    inputs, device = operands(length, dtype, kv_heads), torch.device("cuda:0")
    if name in KEY_PADDING:
        for x in inputs[1:]:
            x[1, :, 437 * length // L :] = torch.nan
    on_cpu, mask = (mask_of(name, causal, length, torch.device(each)) for each in ("cpu", "cuda:0"))
    exact = with_gradients(inputs, on_cpu, torch.float64, "reference", sinks=logits)
    same = with_gradients(inputs, on_cpu, dtype, "reference", sinks=logits)
    got: list[Tensor] = []
    on_device, sinks = [x.to(device) for x in inputs], logits.to(device)
    seen = cuda.count(lambda: got.extend(with_gradients(on_device, mask, dtype, sinks=sinks)))
    assert seen.backends
    if dtype == torch.bfloat16:
        require_half_as_good(got[:-1], same[:-1], exact[:-1], ROUNDED_TWICE)
        assert error(got[-1], exact[-1]) <= SUM_OF_ROUNDED
    else:
        assert all(error(ours, judge) <= 1e-5 for ours, judge in zip(got, exact, strict=True))


def test_fully_masked_rows_are_zero_and_give_no_gradient(cuda: PretendedDevice) -> None:
    query, key, value = inputs = [x.cuda().requires_grad_() for x in operands(32, torch.float32)]
    sinks = SINKS.cuda().requires_grad_()
    output = clearhead.attention(query, key, value, masks.lengths(torch.tensor([20, 0])), sinks=sinks)
    *gradients, of_sinks = torch.autograd.grad(output[1].sum(), [*inputs, sinks])
    assert output[1].cpu().abs().max() == 0
    assert all(float(each.cpu().abs().max()) == 0 for each in (*gradients, of_sinks))


@pytest.mark.parametrize("dim", [60, 40])
def test_other_head_sizes(cuda: PretendedDevice, dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, H, 24, dim, generator=generator).bfloat16() for _ in range(3)]
    exact = with_gradients(inputs, None, torch.float64, "reference", sinks=SINKS)
    same = with_gradients(inputs, None, torch.bfloat16, "reference", sinks=SINKS)
    got = with_gradients([x.cuda() for x in inputs], None, torch.bfloat16, sinks=SINKS.cuda())
    require_half_as_good(got[:-1], same[:-1], exact[:-1], ROUNDED_TWICE)
    assert error(got[-1], exact[-1]) <= SUM_OF_ROUNDED


def test_what_explain_tells(cuda: PretendedDevice) -> None:
    x = torch.randn(B, H, L, D, dtype=torch.bfloat16, device="cuda")
    explanation = clearhead.explain(x, x, x, masks.causal(), sinks=SINKS.cuda())
    assert explanation.kernel == "sdpa"
    assert explanation.backend == ("cuDNN" if CAPABILITY == "9" else "flash")


def test_second_derivatives(cuda: PretendedDevice) -> None:
    def second(device: str, dtype: torch.dtype, mask: Mask) -> list[Tensor]:
        tensors = *operands(24, torch.float32), SINKS.clamp_min(-9)
        query, key, value, sinks = leaves = [x.to(device, dtype).requires_grad_() for x in tensors]
        output = clearhead.attention(query, key, value, mask, sinks=sinks)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves))

    exact = second("cpu", torch.float64, masks.causal())
    for ours, judge in zip(second("cuda", torch.float32, masks.causal()), exact, strict=True):
        assert error(ours, judge) <= 1e-4
