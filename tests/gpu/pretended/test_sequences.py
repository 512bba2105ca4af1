"""Packed sequences run in one kernel, whose count of operators does not depend on how many there are.

`test_checks.py` compares outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.kernels import _flex_choice
from clearhead.masks import Mask
from clearhead.positions import ALiBi
from tests.support.pretended_cuda.comparing import error, require_half_as_good
from tests.support.pretended_cuda.mode import PretendedDevice, Seen

TOKENS, H, D = 640, 4, 64
MASKS = {"none": None, "causal": masks.causal(), "window": masks.sliding_window(3, 2)}


def packed(count: int, device: str, dtype: torch.dtype = torch.bfloat16, kv_heads: int = H) -> list[Tensor]:
    """Query, key, value and boundaries of `count` sequences."""
    generator = torch.Generator().manual_seed(1)
    rounded = [torch.randn(TOKENS, heads, D, generator=generator).bfloat16() for heads in (H, kv_heads, kv_heads)]
    bounds = torch.linspace(0, TOKENS, count + 1).long()
    bounds[1:-1] += 3  # no two alike
    return [*(x.to(dtype).to(device).requires_grad_() for x in rounded), bounds.int().to(device)]


def with_gradients(inputs: list[Tensor], mask: Mask | None) -> list[Tensor]:
    """The output and its gradients."""
    query, key, value, bounds = inputs
    output = clearhead.attention_varlen(
        query, key, value, bounds, bounds, mask, max_seqlen_q=TOKENS, max_seqlen_k=TOKENS
    )
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(output)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), gradient)]


@pytest.mark.parametrize("name", MASKS)
def test_one_kernel_computes_all_sequences(cuda: PretendedDevice, name: str) -> None:
    seen: list[Seen] = []
    for count in (2, 64):
        inputs = packed(count, "cuda")
        with_gradients(inputs, MASKS[name])
        seen.append(cuda.count(lambda inputs=inputs: with_gradients(inputs, MASKS[name])))
    assert [each.backends for each in seen] == [["flash, variable lengths"]] * 2
    assert seen[0].operators == seen[1].operators
    # The gradient that the test draws is moved to the device.
    assert [wait[:2] for wait in seen[1].waits] == [("cpu", "cuda:0")]


def test_other_boundaries_of_keys_are_another_plan(cuda: PretendedDevice) -> None:
    query, key, value, bounds = (x.detach() for x in packed(9, "cuda"))
    backends: list[list[str]] = []
    for of_keys in (bounds, bounds.clone(), bounds):
        seen = cuda.count(lambda k=of_keys: clearhead.attention_varlen(query, key, value, bounds, k, masks.causal()))
        backends.append(seen.backends)
    assert backends[0] == backends[2] == ["flash, variable lengths"]
    assert backends[1] in (["cuDNN"], ["efficient"])


def test_wrong_boundaries_stay_within_the_tensors(cuda: PretendedDevice) -> None:
    query, key, value, _ = (x.detach() for x in packed(2, "cuda"))
    wrong = torch.tensor([0, 300, 200, 900], dtype=torch.int32).cuda()
    right = torch.tensor([0, 300, 300, TOKENS], dtype=torch.int32).cuda()
    got = clearhead.attention_varlen(query, key, value, wrong, wrong)
    assert torch.equal(got.cpu(), clearhead.attention_varlen(query, key, value, right, right).cpu())


def test_lse_and_sequences_without_keys(cuda: PretendedDevice) -> None:
    query, key, value, _ = (x.detach() for x in packed(2, "cuda"))
    of_queries, of_keys = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 5, 640], [0, 0, 640]))
    output, lse = clearhead.attention_varlen(query, key, value, of_queries.cuda(), of_keys.cuda(), return_lse=True)
    q, k, v = (x.cpu() for x in (query, key, value))
    expected, expected_lse = clearhead.attention_varlen(q, k, v, of_queries, of_keys, return_lse=True)
    assert output[:5].cpu().abs().max() == 0
    assert bool((lse[:5].cpu() == float("-inf")).all())
    assert error(output, expected.double()) <= 1e-2
    assert error(lse[5:], expected_lse[5:].double()) <= 1e-5


#: As the page has them: the call, and its kernel in half precision and in float32. Blocks have no fused kernel.
_ONE, _FUSED, _BLOCKS = {"flash, variable lengths"}, {"cuDNN", "efficient"}, set[str]()
TABLE: dict[str, tuple[Callable[[], Mask | None], dict[str, Any], set[str], set[str]]] = {
    "window": (lambda: masks.sliding_window(3, 2), {}, _ONE, _FUSED),
    "prefix": (lambda: masks.prefix(3), {}, _FUSED, _FUSED),
    "keep": (lambda: masks.keep(torch.ones(TOKENS, TOKENS, dtype=torch.bool).cuda()), {}, _FUSED, _FUSED),
    "dropout": (lambda: None, {"dropout_p": 0.5}, _FUSED, _FUSED),
    "lse": (lambda: None, {"return_lse": True}, _ONE, _BLOCKS),
    "lse, gradients": (lambda: None, {"return_lse": True}, _BLOCKS, _BLOCKS),
    "bias": (lambda: masks.bias(zeros()), {}, _FUSED, _FUSED),
    "bias per head": (lambda: masks.bias(zeros(1, H)), {}, _FUSED, _FUSED),
    "bias that learns": (lambda: masks.bias(zeros().requires_grad_()), {}, _BLOCKS, _BLOCKS),
    "heads differ": (lambda: masks.mask_mod(lambda b, h, q, k: (q + k + h) % 3 > 0), {}, _BLOCKS, _BLOCKS),
    "ALiBi": (lambda: ALiBi(H), {}, _BLOCKS, _BLOCKS),
    "softcap": (lambda: None, {"softcap": 2.0}, _BLOCKS, _BLOCKS),
    "sinks": (lambda: None, {"sinks": True}, _FUSED, _FUSED),
}


def zeros(*outer: int) -> Tensor:
    return torch.zeros(*outer, TOKENS, TOKENS, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", TABLE)
def test_the_kernel_is_the_one_in_the_table_of_the_page(cuda: PretendedDevice, name: str, dtype: torch.dtype) -> None:
    make, options, *kernels = TABLE[name]
    allowed = kernels[0] if dtype == torch.bfloat16 else kernels[1]
    query, key, value, bounds = (x.detach() for x in packed(9, "cuda", dtype))
    query.requires_grad_(name.endswith("gradients"))
    more: Any = {"sinks": torch.zeros(H, device="cuda")} if "sinks" in options else options
    mask = make()
    clearhead.attention_varlen(query, key, value, bounds, bounds, mask, **more)  # the first call checks some kernels
    seen = cuda.count(lambda: clearhead.attention_varlen(query, key, value, bounds, bounds, mask, **more))
    assert set(seen.backends) <= allowed
    assert len(seen.backends) == bool(allowed)
    assert seen.waits == []


#: Those that FlexAttention computes, which skips blocks of other sequences, where there are scores enough.
SCORED: dict[str, tuple[Callable[[Tensor], Mask | None], dict[str, Any]]] = {
    "lse": (lambda bias: None, {"return_lse": True}),
    "soft-cap, window": (lambda bias: masks.sliding_window(30, 4), {"softcap": 2.0}),
    "ALiBi, causal": (lambda bias: ALiBi(H) & masks.causal(), {}),
    "bias that learns": (lambda bias: masks.bias(bias) & masks.causal(), {}),
}


@pytest.mark.parametrize("name", SCORED)
def test_scores_are_changed_in_one_kernel(cuda: PretendedDevice, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flex_choice, "FEWEST_SCORES", 1)
    make, options = SCORED[name]
    numbers = torch.randn(1, H, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3))

    def results(device: str, dtype: torch.dtype, bounds: Tensor | None = None) -> list[Tensor]:
        query, key, value, own = (x.detach() for x in packed(9, "cpu", kv_heads=2))
        bounds = own if bounds is None else bounds
        leaves = [x.to(device, dtype).requires_grad_() for x in (query, key, value)]
        bias = numbers.to(device, torch.promote_types(dtype, torch.float32)).requires_grad_()
        found = clearhead.attention_varlen(*leaves, bounds, bounds, make(bias), **options)
        outputs = found if isinstance(found, tuple) else (found,)
        upstream = [torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(x) for x in outputs]
        gradients = torch.autograd.grad(outputs, [*leaves, bias], upstream, allow_unused="bias" not in name)
        return [x.detach() for x in (*outputs, *gradients) if x is not None]

    exact = results("cpu", torch.float64)
    with clearhead.use_kernel("reference"):
        same = results("cpu", torch.bfloat16)
    bounds = packed(9, "cuda")[3]
    results("cuda", torch.bfloat16, bounds)  # the first call checks FlexAttention
    got: list[Tensor] = []
    seen = cuda.count(lambda: got.extend(results("cuda", torch.bfloat16, bounds)))
    assert seen.backends == ["flex"]
    assert seen.values == seen.shapes == []
    require_half_as_good(got, same, exact, 1e-6)


def test_masks_of_absolute_positions_count_within_sequences(cuda: PretendedDevice) -> None:
    query, key, value, bounds = (x.detach() for x in packed(9, "cpu", torch.float32))
    on_device = [x.cuda() for x in (query, key, value)]
    for mask in (masks.prefix(5), masks.block_causal(7), masks.causal() & masks.lengths(torch.tensor([40]))):
        got = clearhead.attention_varlen(*on_device, bounds.cuda(), bounds.cuda(), mask)
        exact = clearhead.attention_varlen(query.double(), key.double(), value.double(), bounds, bounds, mask)
        assert error(got, exact) <= 1e-5


_BANDS = {
    "none": (None, 37),
    "causal": (masks.causal(), 37),
    "window": (masks.sliding_window(5, 2), 37),
    "other keys": (None, 21),
    "one query": (masks.causal("bottom_right"), 1),
}


@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize("name", _BANDS)
def test_a_batch_and_its_lse_take_one_kernel(cuda: PretendedDevice, name: str, kv_heads: int) -> None:
    (mask, length), generator = _BANDS[name], torch.Generator().manual_seed(1)
    sizes = ((H, length), (kv_heads, 37), (kv_heads, 37))
    q, k, v = (torch.randn(3, heads, count, D, generator=generator).bfloat16() for heads, count in sizes)
    query, key, value = q.cuda(), k.cuda(), v.cuda()
    output, lse = clearhead.attention(query, key, value, mask, return_lse=True)
    seen = cuda.count(lambda: clearhead.attention(query, key, value, mask, return_lse=True))
    assert seen.backends == ["flash, variable lengths"]
    assert seen.waits == []
    exact, exact_lse = clearhead.attention(q.double(), k.double(), v.double(), mask, return_lse=True)
    with clearhead.use_kernel("reference"):
        same = clearhead.attention(q, k, v, mask)
    require_half_as_good([output], [same], [exact])
    assert error(lse, exact_lse) <= 1e-5


@pytest.mark.parametrize("reason", ["padding", "gradients", "float32"])
def test_other_calls_with_lse_run_in_blocks(cuda: PretendedDevice, reason: str) -> None:
    x = torch.randn(2, H, 16, D, device="cuda").to(torch.float32 if reason == "float32" else torch.bfloat16)
    mask = masks.lengths(torch.tensor([16, 9])) if reason == "padding" else None
    query = x.requires_grad_(reason == "gradients")
    assert clearhead.explain(query, query, query, mask, return_lse=True).kernel == "chunked"
