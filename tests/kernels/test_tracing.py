"""`torch.compile` and `torch.export`: one graph for all lengths, the same numbers, and `use_kernel` obeyed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import clearhead
from clearhead import masks
from tests.support.budgets import slow

from .graphs import BATCH, HEAD_DIM, HEADS, LENGTHS, VARIANTS, Counting, check_compiled, random


@pytest.fixture(autouse=True)
def _without_native(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    """The native kernel's graphs have tests of their own."""
    monkeypatch.setattr("clearhead.kernels._native_support.extension", None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_graph_for_all_lengths_of_self_attention(variant: str) -> None:
    calls = ((random(length),) for length in LENGTHS)
    assert check_compiled(lambda x: clearhead.attention(x, x, x, **VARIANTS[variant]), calls).graphs == 1


@pytest.mark.parametrize("variant", ["bottom right", "lengths", *slow("plain", "causal", "scale", "lse")])
def test_one_graph_for_all_lengths_of_cross_attention(variant: str) -> None:
    calls = ((random(length), random(count)) for length, count in [(11, 13), (17, 29), (23, 19)])
    # Shorter and longer queries may need a graph each; a pair of lengths may not.
    assert check_compiled(lambda x, y: clearhead.attention(x, y, y, **VARIANTS[variant]), calls).graphs <= 2


def test_tensors_of_masks_are_inputs_of_the_graph() -> None:
    def attend(x: Tensor, padding: Tensor, bias: Tensor) -> Tensor:
        return clearhead.attention(x, x, x, masks.keep(keys=padding) & masks.bias(bias) & masks.causal())

    calls = ((random(n), torch.rand(BATCH, n) > 0.5, torch.randn(n, n)) for n in LENGTHS)
    assert check_compiled(attend, calls).graphs == 1


@pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
@pytest.mark.parametrize("variant", ["sinks", *slow("plain", "window", "scale")])
def test_gradients(variant: str, backend: str) -> None:
    options = VARIANTS[variant]
    function = torch.compile(
        lambda x: clearhead.attention(x, x, x, **options), backend=backend, fullgraph=True, dynamic=True
    )
    for length in LENGTHS[:2]:
        x = random(length, grad=True)
        (found,) = torch.autograd.grad(function(x).square().sum(), x)
        (expected,) = torch.autograd.grad(clearhead.attention(x, x, x, **options).square().sum(), x)
        torch.testing.assert_close(found, expected)


def test_hidden_rows_and_poisoned_padding() -> None:
    def attend(x: Tensor, y: Tensor, padding: Tensor) -> Tensor:
        return clearhead.attention(x, y, y, masks.keep(keys=padding))

    padding = torch.ones(BATCH, 13, dtype=torch.bool)
    padding[0, 4:], padding[1] = False, False
    y = random(13).masked_fill(~padding[:, None, :, None], torch.nan).requires_grad_()
    x = random(11, grad=True)
    function = torch.compile(attend, backend="aot_eager", fullgraph=True)
    output = function(x, y, padding)
    torch.testing.assert_close(output, attend(x, y, padding))
    assert not output[1].any()
    for gradient in torch.autograd.grad(output.square().sum(), (x, y)):
        assert gradient.isfinite().all()


def test_dropout_keeps_the_mean() -> None:
    def attend(x: Tensor) -> Tensor:
        return clearhead.attention(x, x, torch.ones_like(x), softcap=50.0, dropout_p=0.25)

    output = torch.compile(attend, backend="eager", fullgraph=True)(torch.randn(7, 5, 53, 3))
    assert output.unique().numel() > 100
    assert abs(float(output.mean()) - 1) < 0.01


@pytest.mark.parametrize("average", [True, *slow(False)])
def test_weights(average: bool) -> None:
    def weigh(x: Tensor, y: Tensor) -> Tensor:
        return clearhead.attention_weights(x, y, masks.causal("bottom_right"), average_attn_weights=average)

    calls = ((random(length), random(count)) for length, count in [(11, 13), (17, 23)])
    assert check_compiled(weigh, calls).graphs == 1


def test_weights_of_chosen_queries() -> None:
    calls = [(random(11), torch.tensor([10, 0, -1]))]
    check_compiled(lambda x, rows: clearhead.attention_weights(x, x, queries=rows), calls)


def test_use_kernel_inside_the_compiled_function() -> None:
    def attend(x: Tensor) -> Tensor:
        with clearhead.use_kernel("reference"):
            return clearhead.attention(x, x, x)

    assert check_compiled(attend, [(random(11),)]).operators == 0


def test_use_kernel_after_compiling_takes_effect() -> None:
    backend, x = Counting("scaled_dot_product_attention"), random(11)
    function = torch.compile(lambda x: clearhead.attention(x, x, x), backend=backend, fullgraph=True)
    expected = function(x)
    assert (backend.graphs, backend.operators) == (1, 1)
    with clearhead.use_kernel("reference"):
        torch.testing.assert_close(function(x), expected)
    assert (backend.graphs, backend.operators) == (2, 0)
    function(x)
    assert backend.graphs == 2, "the first graph is still good"
    with clearhead.use_kernel("chunked"), pytest.raises(Exception, match="loop over blocks would tie a traced graph"):
        function(x)


class Padded(nn.Module):
    """A module with a padding mask as an input, exported as people export encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(HEADS * HEAD_DIM, HEADS, num_kv_heads=1)

    def forward(self, x: Tensor, padding: Tensor, need_weights: bool) -> Tensor | tuple[Tensor, Tensor]:
        return self.attend(x, mask=masks.drop(keys=padding) & masks.causal(), need_weights=need_weights)


@pytest.mark.parametrize("need_weights", [False, True])
def test_exported_module_takes_any_batch_and_length(need_weights: bool) -> None:
    def arguments(*size: int) -> tuple[Tensor, Tensor, bool]:
        return torch.randn(*size, HEADS * HEAD_DIM), torch.rand(*size) > 0.7, need_weights

    module = Padded().eval()
    sizes = {0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=512)}
    program = export(module, arguments(BATCH, LENGTHS[0]), dynamic_shapes=(sizes, sizes, None))
    for size in ((3, 11), (7, 29), (2, 2), (64, 5)):
        call = arguments(*size)
        torch.testing.assert_close(program.module()(*call), module(*call))
