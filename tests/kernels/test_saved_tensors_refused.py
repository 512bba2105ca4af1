"""Saved tensors that come back without the saved numbers: an error says what came back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import clearhead
from clearhead._call.saved import restored
from clearhead.errors import ArgumentError, ClearheadError, DeviceError, DTypeError, ShapeError
from tests.support.native import needs_native
from tests.support.saved_calls import KERNELS, B, D, H, L, derived, leaf, leaves, output_of
from tests.support.saving import LOSING, of_floats, returning

ERRORS = {"shape": ShapeError, "a tensor on meta": DeviceError}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("change", LOSING)
def test_what_holds_other_numbers_is_an_error(change: str, kernel: str) -> None:
    change_one, got = LOSING[change]
    inputs = leaves("none", kernel)
    with of_floats(change_one)():
        output = output_of("none", kernel, inputs)
    with pytest.raises(ERRORS.get(got, DTypeError), match=r"^saved .*: expected .*, got .*\. A hook on saved tensors"):
        derived(output, inputs)


def test_integers_are_no_rounded_numbers() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(DTypeError, match=r"^saved lse: expected numbers of torch.float64, .*got torch.int32"):
        restored("saved lse", x.int(), x.shape, torch.float64, x.device)


@needs_native
def test_memory_that_was_freed() -> None:
    """As libraries that shard parameters free them between the passes."""
    query = leaf(B, H, L, D, seed=1)
    output = clearhead.attention(query, query * 1, query * 1)
    query.untyped_storage().resize_(0)
    with pytest.raises(
        DeviceError, match=r"^saved query: expected the numbers that were saved, got a tensor whose memory"
    ):
        output.sum().backward()


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
    number = ["output", "lse", *inputs, "mask"].index(which)
    count = 0

    def pack(x: Tensor) -> tuple[int, Tensor]:
        nonlocal count
        count += 1
        return count - 1, x

    def unpack(packed: tuple[int, Tensor]) -> Tensor:
        index, x = packed
        return x[..., 1:] if index == number or (which == "mask" and index > number) else x

    with saved_tensors_hooks(pack, unpack):
        output = output_of("bias", "native", inputs)
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
