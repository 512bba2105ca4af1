"""Attention that runs through PyTorch's functions and still cannot be folded into statistics is named, not guessed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import clearhead
from clearhead.errors import ArgumentError, RecordError, UnseenAttentionWarning

HEADS, LENGTH, HEAD_DIM = 3, 7, 5


@torch.library.custom_op("clearhead_tests::flash_attn_forward", mutates_args=())
def others_kernel(query: Tensor) -> Tensor:
    return query + 1


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x)


class Run(nn.Module):
    """A module that runs any function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def tensor() -> Tensor:
    return torch.randn(2, HEADS, LENGTH, HEAD_DIM)


def jagged() -> Tensor:
    parts = [torch.randn(length, HEADS, HEAD_DIM) for length in (4, LENGTH)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


def padded(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x.unbind(0)))


def attend(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x, x)


def others(x: Tensor) -> Tensor:
    return others_kernel(x)


def low_level(x: Tensor) -> Tensor:
    return torch.ops.aten.scaled_dot_product_attention(x, x, x)


def ours(x: Tensor) -> Tensor:
    return clearhead.attention(x, x, x)


# What the odd module does with a tensor, and what the user is told that it was.
UNREADABLE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "jagged": (lambda _: attend(jagged()), "attention over nested tensors"),
    "nested": (lambda x: attend(padded(x)), "attention over nested tensors"),
    "batched": (lambda x: torch.func.vmap(attend)(x[None]), "attention under torch.vmap"),
    "batched, Clearhead's": (lambda x: torch.func.vmap(ours)(x[None]), "attention under torch.vmap"),
    "another library's kernel": (others, "the kernel clearhead_tests.flash_attn_forward.default"),
    "below PyTorch's function": (low_level, "the kernel aten.scaled_dot_product_attention"),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", UNREADABLE)
def test_it_is_an_error_alone_and_a_warning_beside_others(case: str) -> None:
    function, what = UNREADABLE[case]
    model = nn.Sequential()
    model.add_module("odd", Run(function))
    said = f"{what[0].upper()}{what[1:]} was computed by odd (Run). "
    with pytest.raises(RecordError, match=re.escape(said)), clearhead.record(model):
        model(tensor())

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.plain = Run(function), Attend()

        def forward(self, x: Tensor) -> Tensor:
            self.odd(x)
            return self.plain(x)

    both, x = Both(), tensor()
    expected = both(x)
    warning = re.escape(f"record: {what} that is not in the record was computed by odd (Run).")
    with pytest.warns(UnseenAttentionWarning, match=warning), clearhead.record(both) as rec:
        found = both(x)
    assert torch.equal(found, expected)
    assert list(rec) == ["plain"]


def test_gradients_of_functions_are_recorded() -> None:
    """`torch.func.grad` wraps tensors without batching them; the native pass, which rounds elsewhere, refuses them."""
    model, x = Attend(), tensor()
    with clearhead.record(model) as rec:
        torch.func.grad(lambda y: model(y).sum())(x)
    with clearhead.record(model) as plain:
        model(x)
    torch.testing.assert_close(rec[""].entropy, plain[""].entropy, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo")
@pytest.mark.parametrize("where", ["function", "forward", "class", "around"])
def test_compiled_parts_are_recorded_as_they_were_written(where: str) -> None:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend="eager")

    class Part(nn.Module):
        forward = compiled(lambda self, x: attend(x)) if where == "class" else lambda self, x: attend(x)

    model = nn.Sequential(Run(compiled(attend)) if where == "function" else Part(), Attend())
    if where == "forward":
        model[0].forward = compiled(model[0].forward)
    runs = compiled(model) if where == "around" else model
    x = tensor()
    expected, before = runs(x), dict(vars(model[0]))
    with clearhead.record(model) as rec:
        found = runs(x)
    torch.testing.assert_close(found, expected)
    assert {name: len(calls) for name, calls in rec.items()} == {"0": 1, "1": 1}
    assert vars(model[0]) == before, "what was compiled is compiled again"


def test_a_whole_graph_cannot_be_watched() -> None:
    torch._dynamo.reset()  # or a code path that was compiled before, in pieces, is run in pieces again
    whole = torch.compile(attend, backend="eager", fullgraph=True)
    model = nn.Sequential(Run(lambda x: whole(x)), Attend())
    with pytest.raises(RecordError, match=r"set_stance\('force_eager'\)"), clearhead.record(model):
        model(tensor())
    with torch.compiler.set_stance("force_eager"), clearhead.record(model) as rec:
        model(tensor())
    assert list(rec) == ["0", "1"]


def test_torchscript_is_refused_by_name() -> None:
    scripted = torch.jit.trace(Attend(), tensor())
    model = nn.Sequential(Attend(), scripted)
    with pytest.raises(
        ArgumentError, match="model: expected modules that run in Python, got '1', which is TorchScript"
    ):
        clearhead.record(model).__enter__()
    assert not model[0]._forward_hooks, "no hooks are left"
