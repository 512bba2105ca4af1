"""Backward passes under hooks on saved tensors: right gradients, or an error that says what came back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import clearhead
from clearhead import masks
from clearhead._call.saved import restored
from clearhead.errors import ArgumentError, ClearheadError, DeviceError, DTypeError, ShapeError
from tests.support.native import needs_native
from tests.support.saving import EXACT, LOSING, ROUNDED, Tagged, of_floats, returning

B, H, HKV, L, S, D = 2, 6, 3, 7, 11, 5
Hooks = Callable[[], AbstractContextManager[Any]]

KERNELS = [pytest.param("native", marks=needs_native), "chunked", "sdpa"]
exact_hooks = pytest.mark.parametrize("hooks", EXACT)


def leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Laid out (B, L, H, D), as a projection gives it."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float().to(dtype)
    return (x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x).requires_grad_()


MASKS: dict[str, Callable[[Tensor], masks.Mask | None]] = {
    "none": lambda bias: None,
    "causal": lambda bias: masks.causal(),
    "lengths": lambda bias: masks.lengths(torch.tensor([S, 4])),
    "keep": lambda bias: masks.keep((torch.arange(L)[:, None] + 2 * torch.arange(S)) % 5 > 0),
    "bias": lambda bias: masks.bias(bias) & masks.keep(keys=torch.arange(S) < torch.tensor([[S], [8]])),
}


def leaves(name: str, kernel: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    heads = HKV if kernel != "sdpa" else H
    inputs = {
        "query": leaf(B, H, L, D, seed=1, dtype=dtype),
        "key": leaf(B, heads, S, D, seed=2, dtype=dtype),
        "value": leaf(B, heads, S, D, seed=3, dtype=dtype),
    }
    if kernel != "sdpa":
        inputs["sinks"] = leaf(H, seed=4, dtype=dtype)
        if name == "bias":
            inputs["bias"] = leaf(1, H, L, S, seed=5, dtype=dtype)
    return inputs


def attend(name: str, kernel: str, inputs: dict[str, Tensor]) -> Tensor:
    options: dict[str, Any] = {"sinks": inputs["sinks"]} if "sinks" in inputs else {}
    mask = MASKS[name](inputs.get("bias", torch.zeros(1, H, L, S)))
    with clearhead.use_kernel(kernel):
        return clearhead.attention(inputs["query"], inputs["key"], inputs["value"], mask, **options)


def derived(output: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad((output * factors(output)).sum(), list(inputs.values()))
    return dict(zip(inputs, found, strict=True))


def factors(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)


@cache
def exact(name: str, kernel: str) -> dict[str, Tensor]:
    inputs = leaves(name, kernel, torch.float64)
    return derived(attend(name, "reference", inputs), inputs)


def near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(x.double(), expected[name].double(), rtol=0, atol=tolerance * largest, msg=name)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("hooks", [*EXACT, *ROUNDED])
def test_gradients(hooks: str, name: str, kernel: str) -> None:
    inputs = leaves(name, kernel)
    with {**EXACT, **ROUNDED}[hooks]():
        output = attend(name, kernel, inputs)
    found = derived(output, inputs)
    near(found, exact(name, kernel), 1e-5 if hooks in EXACT else 5e-3)
    assert all(x.dtype == torch.float32 for x in found.values())


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hooks", ["save_on_cpu", "permuted", "gaps", "float64"])
def test_half_precision_is_what_it_is_without_hooks(hooks: str, dtype: torch.dtype) -> None:
    inputs = leaves("causal", "native", dtype)
    plain = derived(attend("causal", "native", inputs), inputs)
    with EXACT[hooks]():
        output = attend("causal", "native", inputs)
    found = derived(output, inputs)
    assert all(x.dtype == dtype for x in found.values())
    near(found, plain, 2e-2)


@exact_hooks
@pytest.mark.parametrize("kernel", [None, "chunked"])
def test_packed_sequences(kernel: str | None, hooks: str) -> None:
    inputs = [leaf(1, H, 13, D, seed=n)[0].transpose(0, 1) for n in range(3)]
    bounds = torch.tensor([0, 5, 6, 13])

    def gradients(around: AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        with around, clearhead.use_kernel(kernel) if kernel else nullcontext():
            output = clearhead.attention_varlen(*inputs, cu_seqlens_q=bounds, cu_seqlens_k=bounds, mask=masks.causal())
        return torch.autograd.grad((output * factors(output)).sum(), inputs)

    for found, plain in zip(gradients(EXACT[hooks]()), gradients(nullcontext()), strict=True):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)


@exact_hooks
@pytest.mark.parametrize("average", [False, True])
def test_weights_and_lse(average: bool, hooks: str) -> None:
    """Gradients through returned weights and through the log-sum-exp."""
    query, key, value = (leaf(B, H, L, D, seed=n) for n in range(3))
    bias = leaf(1, H, L, L, seed=7)

    def gradients(around: AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        mask = masks.bias(bias) & masks.causal()
        with around:
            weights = clearhead.attention_weights(query, key, mask, average_attn_weights=average)
            output, lse = clearhead.attention(query, key, value, mask, return_lse=True)
        total = sum((x * factors(x)).sum() for x in (weights, output, lse))
        return torch.autograd.grad(total, (query, key, value, bias))

    for found, plain in zip(gradients(EXACT[hooks]()), gradients(nullcontext()), strict=True):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)


@exact_hooks
def test_a_module_that_returns_weights(hooks: str) -> None:
    module, x = clearhead.MultiHeadAttention(24, 3), torch.randn(B, L, 24, requires_grad=True)

    def gradients(around: AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        with around:
            output, weights = module(x, need_weights=True, mask=masks.causal())
        total = (output * factors(output)).sum() + (weights * factors(weights)).sum()
        return torch.autograd.grad(total, (x, *module.parameters()))

    # PyTorch's own functions between the projections and attention refuse another dtype.
    around = nullcontext() if hooks == "float64" else EXACT[hooks]()
    for found, plain in zip(gradients(around), gradients(nullcontext()), strict=True):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@exact_hooks
def test_second_derivatives(hooks: str, kernel: str) -> None:
    if hooks == "float64":
        pytest.skip("PyTorch's own operations refuse what they saved in another dtype")
    inputs = leaves("causal", kernel)

    def second(around: AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        with around:
            output = attend("causal", kernel, inputs)
        first = torch.autograd.grad((output * factors(output)).sum(), list(inputs.values()), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), list(inputs.values()))

    for found, plain in zip(second(EXACT[hooks]()), second(nullcontext()), strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_batched_gradients(kernel: str) -> None:
    inputs = leaves("causal", kernel)
    with EXACT["gaps"]():
        output = attend("causal", kernel, inputs)
    vectors = torch.stack([factors(output), factors(output).flip(0)])
    found = torch.autograd.grad(output, inputs["query"], vectors, is_grads_batched=True, retain_graph=True)[0]
    for gradient, vector in zip(found, vectors, strict=True):
        (plain,) = torch.autograd.grad(output, inputs["query"], vector, retain_graph=True)
        torch.testing.assert_close(gradient, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("hooks", ["save_on_cpu", "gaps"])
def test_with_activation_checkpointing(hooks: str, kernel: str, reentrant: bool) -> None:
    inputs = leaves("bias", kernel)

    def block(*tensors: Tensor) -> Tensor:
        with EXACT[hooks]():
            return attend("bias", kernel, dict(zip(inputs, tensors, strict=True)))

    with save_on_cpu():
        output = checkpoint(block, *inputs.values(), use_reentrant=reentrant)
    near(derived_by_backward(output, inputs), exact("bias", kernel))


def derived_by_backward(output: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    (output * factors(output)).sum().backward()
    return {name: x.grad for name, x in inputs.items()}


@pytest.mark.parametrize("kernel", KERNELS)
def test_where_hooks_are_forbidden(kernel: str) -> None:
    inputs = leaves("bias", kernel)
    with disable_saved_tensors_hooks("no hooks here"):
        output = attend("bias", kernel, inputs)
    near(derived(output, inputs), exact("bias", kernel))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["lengths", "keep", "bias"])
def test_masks_that_are_written_to_after_the_forward_pass(name: str, kernel: str) -> None:
    """Hooks keep copies, so that autograd counts no writes: gradients are those of the forward pass."""
    inputs = leaves(name, kernel)
    mask = MASKS[name](inputs.get("bias", torch.zeros(1, H, L, S)))
    written = [x for x in mask.tensors() if not x.requires_grad]
    options: dict[str, Any] = {"sinks": inputs["sinks"]} if "sinks" in inputs else {}
    with clearhead.use_kernel(kernel), saved_tensors_hooks(Tensor.clone, lambda x: x):
        output = clearhead.attention(inputs["query"], inputs["key"], inputs["value"], mask, **options)
    for x in written:
        x.copy_(torch.zeros_like(x) if name == "keep" else x.flip(0))
    near(derived(output, inputs), exact(name, kernel))


def test_writes_are_refused_without_hooks() -> None:
    query, visible = leaf(1, H, 13, D, seed=1), torch.ones(13, 13, dtype=torch.bool)
    output = clearhead.attention(query, query, query, masks.keep(visible))
    visible[1] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@needs_native
@exact_hooks
def test_the_operator_of_dispatch_modes(hooks: str) -> None:
    inputs = leaves("bias", "native")
    with EXACT[hooks](), FlopCounterMode(display=False):
        output = attend("bias", "native", {**inputs, "bias": inputs["bias"].detach()})
    del inputs["bias"]
    found = derived(output, inputs)
    near(found, {name: x for name, x in exact("bias", "native").items() if name != "bias"})


@needs_native
@pytest.mark.parametrize("hooks", ["save_on_cpu", "permuted", "gaps", "float64", "half, returned as float32"])
def test_compiled_graphs(hooks: str) -> None:
    inputs = leaves("keep", "native")
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x: attend("keep", "native", dict(zip(inputs, x, strict=True))), backend="aot_eager"
    )
    with {**EXACT, **ROUNDED}[hooks]():
        output = compiled(*inputs.values())
    near(derived(output, inputs), exact("keep", "native"), 1e-5 if hooks in EXACT else 5e-3)


ERRORS = {"shape": ShapeError, "a tensor on meta": DeviceError}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("change", LOSING)
def test_what_holds_other_numbers_is_an_error(change: str, kernel: str) -> None:
    change_one, got = LOSING[change]
    inputs = leaves("none", kernel)
    with of_floats(change_one)():
        output = attend("none", kernel, inputs)
    with pytest.raises(ERRORS.get(got, DTypeError), match=r"^saved .*: expected .*, got .*\. A hook on saved tensors"):
        derived(output, inputs)


def test_integers_are_no_rounded_numbers() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(DTypeError, match=r"^saved lse: expected numbers of torch.float64, .*got torch.int32"):
        restored("saved lse", x.int(), x.shape, torch.float64, x.device)


def test_the_text_of_an_error() -> None:
    query = leaf(B, H, L, D, seed=1)
    with returning(lambda x: x[:, :, :-1] if x.shape == query.shape else x)():
        output = clearhead.attention(query, query, query)
    with pytest.raises(ShapeError) as raised:
        output.sum().backward()
    assert str(raised.value) == (
        "saved query: expected the shape (2, 6, 7, 5) that was saved, got (2, 6, 6, 5). A hook on saved tensors "
        "(torch.autograd.graph.saved_tensors_hooks) may return other strides, another precision or another device, and "
        "nothing else."
    )


@needs_native
@pytest.mark.parametrize("which", ["query", "key", "value", "sinks", "bias", "output", "lse", "mask"])
def test_every_tensor_counts(which: str) -> None:
    """One of the saved tensors comes back with another shape, the others as they were saved."""
    inputs = leaves("bias", "native")
    number = 1 + ["output", "lse", *inputs, "mask"].index(which)  # the first is PyTorch's, of the sinks' limit
    count = 0

    def pack(x: Tensor) -> tuple[int, Tensor]:
        nonlocal count
        count += 1
        return count - 1, x

    def unpack(packed: tuple[int, Tensor]) -> Tensor:
        index, x = packed
        return x[..., 1:] if index == number or (which == "mask" and index > number) else x

    with saved_tensors_hooks(pack, unpack):
        output = attend("bias", "native", inputs)
    with pytest.raises(ShapeError, match=f"^saved {which}"):
        derived(output, inputs)


@needs_native
@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("cu_seqlens_q", lambda x: x + 1 if x.dtype == torch.int64 and x.dim() == 1 else x, ArgumentError),
        ("cu_seqlens_q", lambda x: x[:-1] if x.dtype == torch.int64 and x.dim() == 1 else x, ArgumentError),
        ("key", lambda x: x[:, :-1] if x.dim() == 4 and x.shape[2] == 13 else x, ShapeError),
    ],
    ids=["numbers", "fewer", "heads"],
)
def test_the_backward_operator_checks_what_it_reads(
    name: str, change: Callable[[Tensor], Tensor], error: type[ClearheadError]
) -> None:
    """A graph's autograd saves the tensors, and the operator gets what came back."""
    from clearhead.kernels._native_arguments import NativeArguments
    from clearhead.kernels._native_plan import plan_of

    query = torch.randn(1, H, 13, D)
    bounds = torch.tensor([0, 5, 13])
    call = NativeArguments(query, query, query, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    plan = plan_of(call, differentiable=True)
    lse = plan.empty_lse(query)
    output = plan.forward(call, lse)
    position = call._fields.index(name)
    changed = [change(x) if number == position else x for number, x in enumerate(call)]
    with pytest.raises(error, match=f"^saved {name}"):
        torch.ops.clearhead.attention_backward(*changed, output, lse, torch.ones_like(output), None)


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda g: g[:1, :1, :1, :1].expand(g.shape),
    "rows with gaps": lambda g: torch.stack([g, g.new_full(g.shape, torch.nan)], -1)[..., 0],
    "transposed": lambda g: g.transpose(1, 3).contiguous().transpose(1, 3),
    "reversed": lambda g: g.flip(2),
    "negated": lambda g: torch._neg_view(-g),
    "conjugated": lambda g: torch.complex(torch.zeros_like(g), -g).conj().imag,
    "in larger": lambda g: torch.nn.functional.pad(g, (1, 2, 3, 1))[:, :, 3:-1, 1:-2],
    "subclass": lambda g: g.as_subclass(Tagged),
    "float64": Tensor.double,
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("change", GRADIENTS)
def test_incoming_gradients(change: str, kernel: str) -> None:
    inputs = leaves("causal", kernel)
    output = attend("causal", kernel, inputs)
    gradient = GRADIENTS[change](factors(output))
    written = torch.zeros(output.shape).copy_(gradient)
    found = torch.autograd.grad(output, list(inputs.values()), gradient, retain_graph=True)
    for x, plain in zip(found, torch.autograd.grad(output, list(inputs.values()), written), strict=True):
        torch.testing.assert_close(torch.as_tensor(x).as_subclass(Tensor), plain, rtol=0, atol=1e-5)
