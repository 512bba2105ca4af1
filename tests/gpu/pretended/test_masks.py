"""Every mask runs on a fused kernel, with few operators and without waiting for the device."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.masks import Mask
from tests.support.pretended_cuda.comparing import error, require_half_as_good, with_gradients
from tests.support.pretended_cuda.mode import PretendedDevice

#: As short as it can be with more scores in a head than numbers in the query, so that a tensor of scores is noticed.
B, H, L, D = 2, 4, 640, 64
LENGTHS = torch.tensor([L, 437])
CAPABILITY = os.environ.get("PRETENDED_CAPABILITY", "9")


def real(length: int = L) -> Tensor:
    return torch.arange(length) < (LENGTHS * length // L)[:, None]


#: Masks of L queries and keys, whose tensors lie on a device.
MASKS: dict[str, Callable[[int, torch.device], Mask | None]] = {
    "none": lambda length, device: None,
    "lengths": lambda length, device: masks.lengths(LENGTHS * length // L),
    "window": lambda length, device: masks.sliding_window(length // 10, length // 10),
    "documents": lambda length, device: masks.documents(torch.arange(length) // (length // 7)),
    "keep": lambda length, device: masks.keep(keys=real(length).to(device)),
    "drop": lambda length, device: masks.drop(keys=~real(length).to(device)),
    "bias": lambda length, device: masks.bias(_bias(length).to(device)),
    "prefix": lambda length, device: masks.prefix(length // 10),
    # Broadcast along the keys, which PyTorch's kernels refuse.
    "rows": lambda length, device: masks.keep((torch.arange(length) % 7 > 0).view(1, 1, length, 1).to(device)),
    "bias of rows": lambda length, device: masks.bias((torch.arange(B * length).view(B, 1, -1, 1) % 5.0).to(device)),
}
KEY_PADDING = ("lengths", "keep", "drop")
#: Those that also run with fewer key/value heads than query heads.
GROUPED = ("none", "lengths", "bias", "rows", "bias of rows", "window")


def _bias(length: int) -> Tensor:
    # Numbers that bfloat16 has: PyTorch's kernels read a bias in the dtype of the query.
    return torch.randn(1, H, length, length, generator=torch.Generator().manual_seed(3)).bfloat16().float()


def mask_of(name: str, causal: bool, length: int, device: torch.device) -> Mask | None:
    mask = MASKS[name](length, device)
    if not causal:
        return mask
    return masks.causal() if mask is None else mask & masks.causal()


def operands(length: int, dtype: torch.dtype, heads: int = H) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, count, length, D, generator=generator).to(dtype) for count in (H, heads, heads)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_mask_takes_one_fused_kernel_and_no_wait(
    cuda: PretendedDevice, name: str, causal: bool, prepared: bool
) -> None:
    device = torch.device("cuda:0")
    query, key, value = (x.to(device) for x in operands(L, torch.bfloat16))
    mask = mask_of(name, causal, L, device)
    if mask is not None and prepared:
        mask = mask.prepare(L, L, batch_size=B, num_heads=H, device=device)
    with torch.no_grad():
        clearhead.attention(query, key, value, mask)
        seen = cuda.count(lambda: clearhead.attention(query, key, value, mask))
    plain = name == "none"
    fused = "cuDNN" if CAPABILITY == "9" else "flash" if plain else "efficient"
    assert seen.backends == [fused]
    assert seen.waits == []
    assert seen.count <= (1 if plain else 4 if prepared else 24)
    # What is the same for all items is not written out.
    items = H if name == "bias" else B if name in (*KEY_PADDING, "bias of rows") else 1
    cells = 0 if plain else B * L if name in KEY_PADDING and not causal else items * L * L
    assert seen.largest <= max(query.numel(), cells) * query.element_size()


@pytest.mark.parametrize(
    ("make", "hidden"),
    [
        (lambda: masks.bias(_bias(L).cuda()), 0),
        (lambda: masks.lengths(LENGTHS), 2),  # keys and values
        (lambda: masks.lengths(torch.tensor([L, 0])), 3),  # and the output of the empty item
        (lambda: masks.keep((torch.arange(L) > 0)[:, None].expand(L, L).cuda()), 1),  # the output of the first query
    ],
)
def test_a_prepared_mask_hides_no_more_than_it_has_to(
    cuda: PretendedDevice, make: Callable[[], Mask], hidden: int
) -> None:
    query, key, value = (x.to("cuda") for x in operands(L, torch.bfloat16))
    ready = make().prepare(L, L, batch_size=B, num_heads=H, device="cuda")
    with torch.no_grad():
        clearhead.attention(query, key, value, ready)
        seen = cuda.count(lambda: clearhead.attention(query, key, value, ready))
    assert seen.waits == []
    assert sum(count for name, count in seen.operators.items() if name.startswith("masked_fill")) == hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "kv_heads"),
    [*((name, H) for name in MASKS), *((name, 2) for name in GROUPED)],
)
def test_values_and_gradients_are_those_of_the_cpu(
    cuda: PretendedDevice, name: str, kv_heads: int, causal: bool, dtype: torch.dtype
) -> None:
    length, device = 75, torch.device("cuda:0")  # no multiple of 8, so that rows of masks need padding
    inputs = operands(length, dtype, kv_heads)
    if name in KEY_PADDING:  # the padding holds NaN
        for x in inputs[1:]:
            x[1, :, int(LENGTHS[1]) * length // L :] = torch.nan
    on_cpu = mask_of(name, causal, length, torch.device("cpu"))
    exact = with_gradients(inputs, on_cpu, torch.float64, "reference")
    same = with_gradients(inputs, on_cpu, dtype, "reference")
    got: list[Tensor] = []
    on_device, mask = [x.to(device) for x in inputs], mask_of(name, causal, length, device)
    seen = cuda.count(lambda: got.extend(with_gradients(on_device, mask, dtype)))
    plain = name == "none"
    if dtype == torch.bfloat16:
        assert len(seen.backends) == 1
        if kv_heads != H:
            assert seen.backends == ["cuDNN" if CAPABILITY == "9" else "flash" if plain else "efficient"]
        require_half_as_good(got, same, exact)
        return
    # No kernel takes grouped heads in float32: they become rows of one head, or there are H / Hkv calls.
    assert seen.backends == ["efficient"] * (1 if kv_heads == H or (plain and not causal) else 2)
    assert all(error(ours, judge) <= 1e-5 for ours, judge in zip(got, exact, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_fully_masked_rows_are_zero(cuda: PretendedDevice, causal: bool) -> None:
    device = torch.device("cuda:0")
    query, key, value = (x.to(device).requires_grad_() for x in operands(32, torch.float32))
    mask: Mask = masks.lengths(torch.tensor([20, 0]))
    if causal:
        mask = mask & masks.causal()
    output = clearhead.attention(query, key, value, mask)
    gradients = torch.autograd.grad(output.sum(), (query, key, value))
    assert output[1].cpu().abs().max() == 0
    assert all(each[1].cpu().abs().max() == 0 for each in gradients)
    assert output[0].cpu().abs().min() > 0


@pytest.mark.parametrize("fewest", [1, 0])
def test_rows_are_masked_only_where_one_can_be_empty(cuda: PretendedDevice, fewest: int) -> None:
    query, key, value = (x.cuda() for x in operands(32, torch.bfloat16))
    mask = masks.lengths(torch.tensor([20, fewest]))
    seen = cuda.count(lambda: clearhead.attention(query, key, value, mask))
    assert seen.operators["masked_fill_"] == (fewest == 0)
