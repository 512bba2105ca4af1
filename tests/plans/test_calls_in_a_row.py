"""Calls in a row: a plan made for one call computes every call of its spec, whatever came between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import masks
from clearhead._layer import plan
from clearhead._layer.plan import _plans_of
from clearhead.errors import KernelError
from clearhead.kernels._chunked import ChunkedKernel
from clearhead.kernels._reference import ReferenceKernel
from clearhead.kernels._sdpa import SdpaKernel
from clearhead.masks import Mask
from tests.support.attending import attend
from tests.support.closeness import require_near
from tests.support.derivatives import derivatives, squares
from tests.support.forgetting import forget
from tests.support.native import needs_native

B, H, L, S, D = 2, 3, 5, 7, 11

Given = Sequence[Tensor]


def drawn(seed: int = 0, dtype: torch.dtype = torch.float32, kv_heads: int = H, keys: int = S) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((B, H, L, D), (B, kv_heads, keys, D), (B, kv_heads, keys, D))
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def numbers(given: Given, mask: Any = None, **options: Any) -> list[Tensor]:
    """Output with and without a graph, first and second derivatives, and first ones from a transposed gradient."""
    leaves = [x.detach().requires_grad_() for x in given]
    output, *gradients = derivatives(attend(*leaves, mask, **options), leaves, (squares, squares))
    turned = torch.autograd.grad(attend(*leaves, mask, **options).transpose(1, 2).sum(), leaves)
    with torch.no_grad():
        return [output, attend(*leaves, mask, **options), *gradients, *turned]


def exact(given: Given, mask: Any = None, **options: Any) -> list[Tensor]:
    with clearhead.use_kernel("reference"):
        return numbers([x.double() for x in given], mask, **options)


def marks(seed: int, *shape: int) -> Tensor:
    """With odd seeds the first query is fully masked and the first key masked for every query."""
    random = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    random[..., 1:, -1] = random[..., -1, :] = True
    random[..., 0, :] = random[..., :, 0] = seed % 2 == 0
    return random


def biases(seed: int, *shape: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.masked_fill(~marks(seed, *shape), -torch.inf)


def per_item(seed: int, *values: Sequence[int]) -> Tensor:
    return torch.tensor(values[seed % len(values)])


#: Masks of one signature whose values depend on the seed.
MASKS: dict[str, Callable[[int], Mask | Tensor]] = {
    "bool tensor": lambda seed: marks(seed, L, S),
    "(B, L, S)": lambda seed: masks.drop(~marks(seed, B, L, S)),
    "(B·H, L, S)": lambda seed: masks.keep(marks(seed, B * H, L, S)),
    "keys": lambda seed: masks.keep(keys=marks(seed, B, S)),
    "transposed": lambda seed: masks.keep(marks(seed, L, S).mT.contiguous().mT),
    "bias": lambda seed: masks.bias(biases(seed, L, S)),
    "bias per head": lambda seed: masks.bias(biases(seed, B, H, L, S)),
    "strided bias": lambda seed: masks.bias(biases(seed, L, 2 * S)[:, ::2]),
    "lengths": lambda seed: masks.lengths(per_item(seed, [7, 7], [3, 0], [7, 2])),
    "query lengths": lambda seed: masks.lengths(
        per_item(seed, [7, 7], [3, 5], [7, 2]), per_item(seed, [5, 5], [0, 2], [4, 5])
    ),
    "prefix": lambda seed: masks.causal() | masks.prefix(per_item(seed, [0, 0], [3, 0], [7, 2])),
    "causal and keys": lambda seed: masks.causal("bottom_right") & masks.keep(keys=marks(seed, B, S)),
    "marks and bias": lambda seed: masks.keep(keys=marks(seed, B, S)) & masks.bias(biases(seed, L, S)),
    "two of each": lambda seed: (
        masks.keep(marks(seed, L, S))
        & masks.bias(biases(seed + 2, L, S))
        & masks.keep(keys=marks(seed, B, S))
        & masks.bias(biases(seed + 4, 1, H, 1, 1).clamp_min(-9))
    ),
    "opposite": lambda seed: ~masks.keep(marks(seed, L, S)),
    "closure": lambda seed: masks.mask_mod(lambda b, h, q, k: (q + k + seed) % 3 > 0),
    "settings": lambda seed: masks.sliding_window(seed, 1) & masks.causal(),
}
every_mask = pytest.mark.parametrize("name", MASKS)


@every_mask
@pytest.mark.parametrize("first", [2, 3], ids=["all visible first", "hidden first"])
def test_masks_of_one_signature_and_other_values(name: str, first: int) -> None:
    numbers(drawn(0), MASKS[name](first))
    for seed in (4, 5):
        inputs, mask = drawn(seed), MASKS[name](seed)
        require_near(numbers(inputs, mask), exact(inputs, mask))


@pytest.mark.parametrize("kind", ["keep", "bias", "lengths"])
@pytest.mark.parametrize("through", ["version counter", "numpy", "data"])
def test_a_mask_whose_tensor_changes_in_place(kind: str, through: str) -> None:
    inputs = drawn()
    tensor = {
        "keep": torch.ones(L, S, dtype=torch.bool),
        "bias": torch.zeros(L, S),
        "lengths": torch.tensor([S, S]),
    }[kind]
    mask = {"keep": masks.keep, "bias": masks.bias, "lengths": masks.lengths}[kind](tensor)
    require_near(numbers(inputs, mask), exact(inputs))
    target: Any = {"version counter": tensor, "numpy": tensor.numpy(), "data": tensor.data}[through]
    target[..., 1] = {"keep": False, "bias": -torch.inf, "lengths": 2}[kind]
    hidden = torch.ones(B, L, S, dtype=torch.bool)
    if kind == "lengths":
        hidden[1, :, 2:] = False
    else:
        hidden[..., 1] = False
        inputs[1][:, :, 1] = torch.nan  # the coverage changes too
    require_near(numbers(inputs, mask), exact(inputs, masks.keep(hidden)))


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "sdpa": lambda: clearhead.use_kernel("sdpa"),
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "forward mode": forward_ad.dual_level,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["none", "causal"])
def test_what_surrounds_a_call_counts_for_that_call(around: str, mask: Any) -> None:
    inputs, tolerance = drawn(), 2e-2 if around == "autocast" else 1e-5
    before = numbers(inputs, mask)
    with AROUND[around]():
        for _ in range(2):
            output = attend(*inputs, mask)
            assert output.dtype == (torch.bfloat16 if around == "autocast" else torch.float32)
            torch.testing.assert_close(output.float(), before[0], rtol=tolerance, atol=tolerance)
    assert all(torch.equal(*pair) for pair in zip(numbers(inputs, mask), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_mode_between_calls(dtype: torch.dtype) -> None:
    query, key, value = drawn(dtype=dtype)
    attend(query, key, value, masks.causal())
    with forward_ad.dual_level():
        output = attend(forward_ad.make_dual(query, torch.ones_like(query)), key, value, masks.causal())
        result = forward_ad.unpack_dual(output).tangent
    ends = [attend(query.double() + d, key.double(), value.double(), masks.causal()) for d in (1e-6, -1e-6)]
    assert result is not None
    torch.testing.assert_close(result.double(), (ends[0] - ends[1]) / 2e-6, rtol=1e-4, atol=1e-5)


@every_mask
@pytest.mark.parametrize("seed", [2, 3])
def test_recorded_and_checkpointed_calls_save_the_same(name: str, seed: int) -> None:
    """Checkpointing compares what is saved; a recorder sees the first pass and not the second."""
    leaves, mask, module = [x.requires_grad_() for x in drawn()], MASKS[name](seed), Calling()
    expected = torch.autograd.grad(attend(*leaves, mask).sum(), leaves)
    with clearhead.record(module) as seen:
        output = checkpoint(lambda *inputs: module(inputs, mask), *leaves, use_reentrant=False)
    assert [len(seen[name]) for name in seen] == [1]
    result = torch.autograd.grad(output.sum(), leaves)
    assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))


class Calling(torch.nn.Module):
    def forward(self, given: Given, mask: Any) -> Tensor:
        return attend(*given, mask)


@pytest.mark.parametrize("kernel", [None, "native", "sdpa", "chunked", "reference"])
def test_plans_hold_no_tensor_of_a_call(kernel: str | None) -> None:
    forget()
    inputs, tensors = drawn(), [marks(3, L, S), biases(2, L, S)]
    mask = masks.keep(tensors[0]) & masks.bias(tensors[1])
    outputs: list[Tensor] = []
    with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
        for item in (None, masks.causal(), mask):
            outputs.append(attend(*(x.requires_grad_() for x in inputs), item))
            attend(*(x.detach() for x in inputs), item)
    seen = [weakref.ref(item) for item in (*inputs, *tensors, mask, *outputs)]
    # Calls with gradients, with those of a bias too, and without: the plans of each by their masks.
    # Kernels that are chosen by sizes have a key with them, too.
    assert _plans_of.cache_info().currsize == (3 if kernel in (None, "native") else 6)
    del inputs, tensors, mask, outputs, item
    gc.collect()
    assert [item() for item in seen] == [None] * len(seen)


def test_a_training_plan_survives_many_decoding_lengths() -> None:
    training = drawn()
    with (
        clearhead.use_kernel("reference"),
        mock.patch.object(ReferenceKernel, "plan", autospec=True, side_effect=ReferenceKernel.plan) as planned,
    ):
        attend(*training)
        for length in range(S + 1, S + 601):
            attend(*drawn(keys=length))
            if length % 200 == 0:
                attend(*training)
        assert planned.call_count == 601
        attend(*drawn(keys=S + 1))  # whose plan made room for others
        assert planned.call_count == 602


def test_masks_that_leave_other_parts_of_the_scores_are_planned_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sdpa` leaves calls to `chunked` whose mask hides most scores, which only the lengths of each row tell."""
    monkeypatch.setattr("clearhead.kernels._sdpa._WORTH_SKIPPING", 1)
    query, key, value = drawn(dtype=torch.float64)
    for lengths, expected in ((torch.full((B, L), S), "sdpa"), (torch.ones(B, L, dtype=torch.int64), "chunked")):
        mask = masks.lengths(lengths)
        assert clearhead.explain(query, key, value, mask).kernel == expected
        kernel = {"sdpa": SdpaKernel, "chunked": ChunkedKernel}[expected]
        with mock.patch.object(kernel, "plan", autospec=True, side_effect=kernel.plan) as planned:
            found = [clearhead.attention(query, key, value, mask) for _ in range(2)]
        assert planned.call_count == 1
        with clearhead.use_kernel("reference"):
            require_near(found, [clearhead.attention(query, key, value, mask)] * 2)


@needs_native
@pytest.mark.parametrize("first", ["positions of all heads", "no keys"])
def test_what_native_refuses_is_refused_after_a_call_that_it_runs(first: str) -> None:
    """A mask that is evaluated for each head would have to be built whole."""
    x, places = torch.randn(1, 2, 5, 4), torch.arange(5)
    with clearhead.use_kernel("native"):
        if first == "no keys":
            mask: Mask = masks.causal() | masks.keep(torch.ones(1, 2, 5, 1, dtype=torch.bool))
            at: dict[str, Any] = {}
            clearhead.attention(x, x[:, :, :0], x[:, :, :0], mask)
        else:
            mask, at = masks.causal(), {"query_positions": 0, "key_positions": places.expand(1, 2, 5).contiguous()}
            clearhead.attention(x, x, x, mask, query_positions=0, key_positions=places)
        with pytest.raises(KernelError, match="differs between heads"):
            clearhead.attention(x, x, x, mask, **at)


def test_threads_share_plans() -> None:
    """More specs than fit, so that plans are put, found and dropped at once."""

    def work(number: int) -> None:
        for keys in range(1, 200):
            with clearhead.use_kernel("reference") if number % 2 else nullcontext():
                result = attend(*drawn(number, keys=keys))
            torch.testing.assert_close(result, expected[number][keys - 1], rtol=1e-5, atol=1e-5)

    expected = [
        [attend(*drawn(number, torch.float64, keys=keys)).float() for keys in range(1, 200)] for number in range(3)
    ]
    list(ThreadPoolExecutor(3).map(work, range(3)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.bias(torch.randn(5, 5)) & masks.bias(torch.randn(5, 5).double()),
        lambda: masks.bias(torch.randn(5, 5, dtype=torch.complex64).conj().imag),
    ],
    ids=["biases of two dtypes", "a negated bias"],
)
def test_biases_that_memory_does_not_show_as_they_are(make: Callable[[], Mask]) -> None:
    x, mask = torch.randn(1, 2, 5, 8), make()
    output = attend(x, x, x, mask)
    with clearhead.use_kernel("reference"):
        torch.testing.assert_close(output, attend(x, x, x, mask), rtol=0, atol=2e-6)


# The structure of a mask is computed once in each call: by the layer, or by the kernels.


@pytest.mark.parametrize("kernel", ["native", "chunked", "sdpa"])
@pytest.mark.parametrize("length", [5, 512])  # the second is long enough to leave padding out
def test_once_in_a_first_call_and_in_later_ones(kernel: str, length: int) -> None:
    module = clearhead.MultiHeadAttention(16, 2).eval()
    x, lengths = torch.randn(3, length, 16), torch.tensor([2, 4, length])
    rules = [type(masks.causal()), type(masks.lengths(lengths))]
    with torch.no_grad(), clearhead.use_kernel(kernel):
        for _ in range(3):
            mask = masks.causal() & masks.lengths(lengths)
            with (
                mock.patch.object(rules[0], "structure", autospec=True, side_effect=rules[0].structure) as of_causal,
                mock.patch.object(rules[1], "structure", autospec=True, side_effect=rules[1].structure) as of_lengths,
            ):
                module(x, mask=mask)
            assert of_lengths.call_count == 1
            assert of_causal.call_count <= 2  # packed sequences are another call


@pytest.mark.parametrize("length", [5, 512])  # the second is long enough to look for padding, of which it has little
def test_a_module_that_keeps_padding_validates_its_mask_once(length: int) -> None:
    module = clearhead.MultiHeadAttention(16, 2).eval()
    x, mask = torch.randn(3, length, 16), masks.lengths(torch.tensor([length - 1, length, length]))
    rule = type(mask)
    for _ in range(2):
        with mock.patch.object(rule, "validate", autospec=True, side_effect=rule.validate) as validated:
            module(x, mask=mask)
        assert validated.call_count == 1
    with pytest.raises(clearhead.errors.ArgumentError, match=f"at most S = {length} keys"):
        module(x, mask=masks.lengths(torch.tensor([length + 1, length, length])))


@pytest.mark.parametrize("kernel", ["sdpa", "chunked", "reference"])
@pytest.mark.parametrize("name", ["causal", "none", "window", "grouped", "lse"])
def test_a_decoding_step_that_sees_every_key_is_planned_once(kernel: str, name: str) -> None:
    forget()
    options: dict[str, Any] = {"return_lse": True} if name == "lse" and kernel != "sdpa" else {}
    of_name = {"none": None, "window": masks.causal() & masks.sliding_window(3, 0)}
    mask, kv_heads = of_name.get(name, masks.causal()), 1 if name == "grouped" else H
    planned = mock.Mock(side_effect=plan._new_plan)
    query, key, value = drawn(keys=13, kv_heads=kv_heads)
    with torch.no_grad(), mock.patch.object(plan, "_new_plan", planned):
        for keys in (1, 2, 3, 5, 8, 13):
            given, at = (query[:, :, :1], key[:, :, :keys], value[:, :, :keys]), {"query_positions": keys - 1}
            found = attend(*given, mask, kernel=kernel, **at, **options)
            exact = attend(*(x.double() for x in given), mask, kernel="reference", **at, **options)
            require_near(found, exact)
    calls = [call.args[0] for call in planned.call_args_list]
    # Of one key, and of more; the window hides keys from the fifth one on.
    seen = {call.key.shape[2] for call in calls if call.query.dtype == torch.float32}
    assert seen == ({1, 2, 5, 8, 13} if name == "window" else {1, 2})


def test_a_row_without_keys_has_a_plan_of_its_own() -> None:
    forget()
    query, key, value = drawn(dtype=torch.float64)
    for keys in (1, 0, 3, 0):
        given = query[:, :, :1], key[:, :, :keys], value[:, :, :keys]
        output = clearhead.attention(*given)
        require_near(output, attend(*given, kernel="reference"))
        assert bool(output.any()) == bool(keys)
