"""Attention that cannot be recorded is named, and an empty record is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention, softmax

import clearhead
from clearhead.errors import ArgumentError, RecordError, UnseenAttentionWarning

from .conftest import Stack, recorded

HEADS, LENGTH, HEAD_DIM = 3, 7, 5


@torch.library.custom_op("clearhead_tests::flash_attn_forward", mutates_args=())
def others_kernel(query: Tensor) -> Tensor:
    return query + 1


class Run(nn.Module):
    """A module that runs a function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def sdpa(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x, x)


def tensor() -> Tensor:
    return torch.randn(2, HEADS, LENGTH, HEAD_DIM)


def jagged(_: Tensor) -> Tensor:
    shards = [torch.randn(length, HEADS, HEAD_DIM) for length in (4, LENGTH)]
    return torch.nested.nested_tensor(shards, layout=torch.jagged).transpose(1, 2)


NESTED, VMAP, SOFTMAX = "attention over nested tensors", "attention under torch.vmap", "a softmax over four dimensions"
#: A function of a module, and its description in the error and in the warning.
UNREADABLE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "jagged": (lambda x: sdpa(jagged(x)), NESTED),
    "nested": (lambda x: sdpa(torch.nested.nested_tensor(list(x.unbind(0)))), NESTED),
    "batched": (lambda x: torch.func.vmap(sdpa)(x[None]), VMAP),
    "batched, Clearhead's": (lambda x: torch.func.vmap(lambda y: clearhead.attention(y, y, y))(x[None]), VMAP),
    "another library's kernel": (lambda x: others_kernel(x), "the kernel clearhead_tests.flash_attn_forward.default"),
    "below PyTorch's function": (
        lambda x: torch.ops.aten.scaled_dot_product_attention(x, x, x),
        "the kernel aten.scaled_dot_product_attention",
    ),
    "torch.softmax": (lambda x: torch.softmax(x, -1), SOFTMAX),
    "torch.softmax by keyword": (lambda x: torch.softmax(input=x, dim=-1), SOFTMAX),
    "functional": (lambda x: softmax(x, dim=-1), SOFTMAX),
    "method": (lambda x: x.softmax(dim=-1), SOFTMAX),
}


class Both(nn.Module):
    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.odd, self.plain = odd, Run(sdpa)

    def forward(self, x: Tensor) -> Tensor:
        self.odd(x)
        return self.plain(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", [*UNREADABLE, "module"])
def test_it_is_an_error_alone_and_a_warning_beside_others(case: str) -> None:
    function, what = UNREADABLE.get(case, (nn.Softmax(-1), SOFTMAX))
    model, x = Both(Run(function)), tensor()
    name = "odd.function (Softmax)" if case == "module" else "odd (Run)"
    model.plain.function = lambda x: x
    error = re.escape(f"{what[0].upper()}{what[1:]} was computed by {name}. ")
    with pytest.raises(RecordError, match=f"no attention was seen.*{error}"):
        recorded(model, x)
    model.plain.function = sdpa
    expected = model(x)
    warning = re.escape(f"record: {what} that is not in the record was computed by {name}.")
    with pytest.warns(UnseenAttentionWarning, match=warning), clearhead.record(model) as rec:
        assert torch.equal(model(x), expected)
    assert list(rec) == ["plain"]


def test_a_softmax_over_classes_is_no_attention(model: Stack, x: Tensor) -> None:
    recorded(nn.Sequential(model, nn.Softmax(-1)), x)


def test_an_empty_record_is_an_error(model: Stack, x: Tensor) -> None:
    text = r"no attention was seen\. Attention is seen in Clearhead's modules"
    for runs in (nn.Identity(), Stack(1)):
        with pytest.raises(RecordError, match=text), clearhead.record(model):
            runs(x)


def test_gradients_of_functions_are_recorded() -> None:
    """`torch.func.grad` wraps tensors without a batch. The native pass refuses them, so rounding differs."""
    model, x = Run(sdpa), tensor()
    with clearhead.record(model) as rec:
        torch.func.grad(lambda y: model(y).sum())(x)
    torch.testing.assert_close(rec[""].entropy, recorded(model, x)[""].entropy, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo")
@pytest.mark.parametrize("where", ["function", "forward", "class", "around", "in place"])
def test_compiled_code_is_recorded_uncompiled(where: str) -> None:
    def compiled(function: Any) -> Any:
        return torch.compile(function, backend="eager")

    class Attend(nn.Module):
        forward = compiled(lambda self, x: sdpa(x)) if where == "class" else lambda self, x: sdpa(x)

    model = nn.Sequential(Run(compiled(sdpa)) if where == "function" else Attend(), Run(sdpa))
    if where == "forward":
        model[0].forward = compiled(model[0].forward)
    if where == "in place":
        model.compile(backend="eager")
    runs = compiled(model) if where == "around" else model
    x = tensor()
    expected, before = runs(x), dict(vars(model[0]))
    with clearhead.record(runs) as rec:
        torch.testing.assert_close(runs(x), expected)
    assert {name.removeprefix("_orig_mod."): len(calls) for name, calls in rec.items()} == {"0": 1, "1": 1}
    assert vars(model[0]) == before
    counter = CompileCounter()
    torch.compile(lambda y: y + 1, backend=counter)(x)
    assert counter.frame_count == 1, "the compiler is on again"


def test_a_full_graph_cannot_be_recorded() -> None:
    torch._dynamo.reset()  # code that was compiled with graph breaks before would run with them again
    full_graph = torch.compile(sdpa, backend="eager", fullgraph=True)
    model = nn.Sequential(Run(lambda x: full_graph(x)), Run(sdpa))
    with pytest.raises(RecordError, match=r"set_stance\('force_eager'\)"):
        recorded(model, tensor())
    with torch.compiler.set_stance("force_eager"):
        assert list(recorded(model, tensor())) == ["0", "1"]


def test_torchscript_is_refused_by_name() -> None:
    model = nn.Sequential(Run(sdpa), torch.jit.trace(Run(sdpa), tensor()))
    with pytest.raises(
        ArgumentError, match="model: expected modules that run in Python, got '1', which is TorchScript"
    ):
        recorded(model)
    assert not model[0]._forward_hooks
