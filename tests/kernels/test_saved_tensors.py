"""Gradients under hooks on saved tensors, whatever strides, dtypes and types come back; and any incoming gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import clearhead
from clearhead import masks
from tests.support.closeness import require_near
from tests.support.native import needs_native
from tests.support.saved_calls import (
    KERNELS,
    MASKS,
    B,
    D,
    H,
    L,
    S,
    derived,
    exact,
    factors,
    leaf,
    leaves,
    output_of,
)
from tests.support.saving import EXACT, ROUNDED, Tagged

exact_hooks = pytest.mark.parametrize("hooks", EXACT)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("hooks", [*EXACT, *ROUNDED])
def test_gradients(hooks: str, name: str, kernel: str) -> None:
    inputs = leaves(name, kernel)
    with {**EXACT, **ROUNDED}[hooks]():
        output = output_of(name, kernel, inputs)
    found = derived(output, inputs)
    require_near(found, exact(name, kernel), 1e-5 if hooks in EXACT else 5e-3, least=0)
    assert all(x.dtype == torch.float32 for x in found.values())


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hooks", ["save_on_cpu", "permuted", "gaps", "float64"])
def test_half_precision_is_what_it_is_without_hooks(hooks: str, dtype: torch.dtype) -> None:
    inputs = leaves("causal", "native", dtype)
    plain = derived(output_of("causal", "native", inputs), inputs)
    with EXACT[hooks]():
        output = output_of("causal", "native", inputs)
    found = derived(output, inputs)
    assert all(x.dtype == dtype for x in found.values())
    require_near(found, plain, 2e-2, least=0)


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


# PyTorch's own operations refuse what they saved in another dtype.
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("hooks", sorted(EXACT.keys() - {"float64"}))
def test_second_derivatives(hooks: str, kernel: str) -> None:
    inputs = leaves("causal", kernel)

    def second(around: AbstractContextManager[Any]) -> tuple[Tensor, ...]:
        with around:
            output = output_of("causal", kernel, inputs)
        first = torch.autograd.grad((output * factors(output)).sum(), list(inputs.values()), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), list(inputs.values()))

    for found, plain in zip(second(EXACT[hooks]()), second(nullcontext()), strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_batched_gradients(kernel: str) -> None:
    inputs = leaves("causal", kernel)
    with EXACT["gaps"]():
        output = output_of("causal", kernel, inputs)
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
            return output_of("bias", kernel, dict(zip(inputs, tensors, strict=True)))

    with save_on_cpu():
        output = checkpoint(block, *inputs.values(), use_reentrant=reentrant)
    require_near(derived_by_backward(output, inputs), exact("bias", kernel), least=0)


def derived_by_backward(output: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    (output * factors(output)).sum().backward()
    return {name: x.grad for name, x in inputs.items()}


@pytest.mark.parametrize("kernel", KERNELS)
def test_where_hooks_are_forbidden(kernel: str) -> None:
    inputs = leaves("bias", kernel)
    with disable_saved_tensors_hooks("no hooks here"):
        output = output_of("bias", kernel, inputs)
    require_near(derived(output, inputs), exact("bias", kernel), least=0)


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
    require_near(derived(output, inputs), exact(name, kernel), least=0)


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
        output = output_of("bias", "native", {**inputs, "bias": inputs["bias"].detach()})
    del inputs["bias"]
    found = derived(output, inputs)
    require_near(found, {name: x for name, x in exact("bias", "native").items() if name != "bias"}, least=0)


@needs_native
@pytest.mark.parametrize("hooks", ["save_on_cpu", "permuted", "gaps", "float64", "half, returned as float32"])
def test_compiled_graphs(hooks: str) -> None:
    inputs = leaves("keep", "native")
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *x: output_of("keep", "native", dict(zip(inputs, x, strict=True))), backend="aot_eager"
    )
    with {**EXACT, **ROUNDED}[hooks]():
        output = compiled(*inputs.values())
    require_near(derived(output, inputs), exact("keep", "native"), 1e-5 if hooks in EXACT else 5e-3, least=0)


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
    output = output_of("causal", kernel, inputs)
    gradient = GRADIENTS[change](factors(output))
    written = torch.zeros(output.shape).copy_(gradient)
    found = torch.autograd.grad(output, list(inputs.values()), gradient, retain_graph=True)
    for x, plain in zip(found, torch.autograd.grad(output, list(inputs.values()), written), strict=True):
        torch.testing.assert_close(torch.as_tensor(x).as_subclass(Tensor), plain, rtol=0, atol=1e-5)
