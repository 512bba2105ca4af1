"""The projections' product: oneDNN's and PyTorch's give the same, in everything that hangs on a `Linear`."""

from __future__ import annotations

import copy
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import clearhead
import clearhead._layer.linear
from clearhead import use_linear
from clearhead._layer.linear import describe_backend, linear
from clearhead._native import instruction_sets
from clearhead.errors import ArgumentError, ClearheadError, KernelError
from clearhead.nn import Linear
from tests.support.derivatives import derivatives, squares
from tests.support.saving import EXACT, LOSING, returning

#: rows, in_features, out_features
SIZES = [(37, 41, 43), (1, 7, 5), (5, 1, 3), (3, 5, 1), (131, 257, 67)]

MAKER = clearhead._layer.linear.processor_maker

needs_onednn = pytest.mark.skipif(
    not clearhead._layer.linear.has_onednn_linear(), reason="this build of PyTorch has no oneDNN"
)


@pytest.fixture
def onednn_preferred(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The rule of a machine where oneDNN is faster, for every size; holds the shapes that went there."""
    seen: list[tuple[int, ...]] = []
    multiply = clearhead._layer.linear.onednn_linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append((*x.shape, weight.shape[0]))
        return multiply(x, weight, bias)

    monkeypatch.setattr(clearhead._layer.linear, "_why_pytorchs", lambda: None)
    monkeypatch.setattr(clearhead._layer.linear, "_FEWEST_MULTIPLICATIONS", 1)
    monkeypatch.setattr(clearhead._layer.linear, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(clearhead._layer.linear, "onednn_linear", counted)
    return seen


def error(got: Tensor, exact: Tensor) -> float:
    return float(((got.double() - exact).abs().max() / exact.abs().max()).detach())


def numbers(product: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output, gradients, and the gradients of their squares."""
    return derivatives(product(*inputs), inputs, (squares, squares))


@needs_onednn
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_derivatives_against_float64(sizes: tuple[int, int, int], bias: bool) -> None:
    rows, inner, outer = sizes
    # Positive numbers, so that no sum cancels out and errors are relative to what was added up.
    inputs = [torch.rand(rows, inner), torch.rand(outer, inner), torch.rand(outer)][: 3 if bias else 2]
    exact = numbers(F.linear, [x.double().requires_grad_() for x in inputs])
    with use_linear("onednn"):
        got = numbers(linear, [x.clone().requires_grad_() for x in inputs])
    for mine, theirs in zip(got, exact, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == torch.float32
        assert error(mine, theirs) < 1e-5


@needs_onednn
def test_inputs_and_gradients_that_are_views() -> None:
    x = torch.randn(11, 7, 2)[..., 0].t()  # (7, 11), nothing in it is contiguous
    weight, gradient = torch.randn(22, 13)[::2].t().requires_grad_(), torch.randn(13, 7).t()
    with use_linear("onednn"):
        (got,) = torch.autograd.grad(linear(x, weight), weight, gradient)
    torch.testing.assert_close(got, gradient.t() @ x)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("sizes", [(1, 1), (3, 70), (16, 64), (129, 130)])
def test_transposed_inputs_are_written_out(sizes: tuple[int, int], isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearhead._layer.linear, "instruction_set_number", lambda: instruction_sets()[isa])
    x = torch.randn(sizes)
    written = clearhead._layer.linear._in_rows(x.t())
    assert written.is_contiguous()
    assert torch.equal(written, x.t())


@needs_onednn
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_only_the_gradients_that_are_wanted(frozen: str, onednn_preferred: list[Any]) -> None:
    inputs = {"x": torch.randn(5, 7), "weight": torch.randn(3, 7), "bias": torch.randn(3)}
    wanted = [tensor.requires_grad_() for name, tensor in inputs.items() if name != frozen]
    linear(*inputs.values()).sum().backward()
    assert all(tensor.grad is not None for tensor in wanted)
    assert inputs[frozen].grad is None
    assert len(onednn_preferred) == (3 if frozen == "bias" else 2)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_pytorchs(dtype: torch.dtype, onednn_preferred: list[Any]) -> None:
    layer, x = Linear(7, 5), torch.randn(3, 7)
    twin = nn.Linear(7, 5)
    twin.load_state_dict(layer.state_dict())
    outputs = []
    for module in (layer, twin):
        with torch.autocast("cpu", dtype=dtype):
            outputs.append(module(x))
        outputs[-1].float().sum().backward()
    assert outputs[0].dtype == dtype
    assert torch.equal(*outputs)
    assert layer.weight.grad is not None
    assert twin.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    assert onednn_preferred == []


def test_a_backward_pass_under_autocast_stays_in_float32(onednn_preferred: list[Any]) -> None:
    layer, x = Linear(7, 5), torch.randn(3, 7)
    output = layer(x).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output.backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(5, 7))


def forward_mode(layer: Linear, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert tangent is not None
        return tangent


def counted_flops(layer: Linear, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        layer(x)
    return torch.tensor(counter.get_total_flops())


OTHER_WAYS: dict[str, Callable[[Linear, Tensor], Tensor]] = {
    "float64": lambda layer, x: copy.deepcopy(layer).double()(x.double()),
    "bfloat16": lambda layer, x: copy.deepcopy(layer).bfloat16()(x.bfloat16()),
    "meta": lambda layer, x: torch.zeros(copy.deepcopy(layer).to("meta")(x.to("meta")).shape),
    "no rows": lambda layer, x: layer(x[:0]),
    "wrapper subclass": lambda layer, x: layer(TwoTensor(x, x.clone())).a,
    "vmap": lambda layer, x: torch.vmap(layer)(x),
    "jacrev": lambda layer, x: torch.func.jacrev(layer)(x[0]),
    "jacfwd": lambda layer, x: torch.func.jacfwd(layer)(x[0]),
    "forward mode": forward_mode,
    "flops": counted_flops,
    "jit.trace": lambda layer, x: torch.jit.trace(layer, x, check_trace=False)(x),
    "compile": lambda layer, x: torch.compile(layer, backend="eager", fullgraph=True)(x),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_what_only_pytorchs_product_knows_goes_there(way: str, onednn_preferred: list[Any]) -> None:
    layer, x = Linear(7, 5), torch.randn(3, 7)
    twin = copy.deepcopy(layer)
    twin.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(OTHER_WAYS[way](layer, x), OTHER_WAYS[way](twin, x))  # pyright: ignore[reportArgumentType]
    assert onednn_preferred == []


@needs_onednn
def test_a_gradient_that_is_a_subclass_goes_to_pytorchs_product(onednn_preferred: list[Any]) -> None:
    x, weight, gradient = torch.randn(3, 7), torch.randn(5, 7, requires_grad=True), torch.randn(3, 5)
    output = linear(x, weight)
    onednn_preferred.clear()
    (got,) = torch.autograd.grad(output, weight, TwoTensor(gradient, gradient.clone()))
    torch.testing.assert_close(got.a, gradient.t() @ x)
    assert onednn_preferred == []


@needs_onednn
@pytest.mark.parametrize("hooks", EXACT)
def test_saved_tensors_that_come_back_otherwise(hooks: str, onednn_preferred: list[Any]) -> None:
    inputs = [torch.rand(*sizes, requires_grad=True) for sizes in ((37, 41), (43, 41), (43,))]

    def with_hooks(*tensors: Tensor) -> Tensor:
        with EXACT[hooks]():
            return linear(*tensors)

    exact = numbers(F.linear, [x.detach().double().requires_grad_() for x in inputs])
    for mine, theirs in zip(numbers(with_hooks, inputs), exact, strict=True):
        assert mine.dtype == torch.float32
        assert error(mine, theirs) < 1e-5
    assert len(onednn_preferred) > 2


@needs_onednn
@pytest.mark.parametrize("change", LOSING)
def test_saved_tensors_that_hold_other_numbers(change: str, onednn_preferred: list[Any]) -> None:
    x, weight = torch.rand(5, 7, requires_grad=True), torch.rand(3, 7, requires_grad=True)
    with returning(LOSING[change][0])():
        output = linear(x, weight)
    with pytest.raises(ClearheadError, match=r"^saved input: expected .*, got .*\. A hook on saved tensors"):
        output.sum().backward()


@needs_onednn
@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer])
def test_parameters_and_buffers_are_plain_tensors(kind: type[Tensor], onednn_preferred: list[Any]) -> None:
    layer, x = Linear(7, 5), torch.randn(3, 7)
    torch.testing.assert_close(layer(kind(x)), F.linear(x, layer.weight, layer.bias))
    assert onednn_preferred == [(3, 7, 5)]


def test_export_holds_pytorchs_operator(onednn_preferred: list[Any]) -> None:
    program = torch.export.export(Linear(7, 5), (torch.randn(3, 7),))
    assert "aten.linear.default" in str(program.graph)
    assert "mkldnn" not in str(program.graph)


def test_small_products_stay_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Tensor:
        raise AssertionError("this product is too small")

    monkeypatch.setattr(clearhead._layer.linear, "_why_pytorchs", lambda: None)
    monkeypatch.setattr(clearhead._layer.linear, "onednn_linear", never)
    Linear(16, 48)(torch.randn(10, 16))
    Linear(1024, 1024)(torch.randn(15, 1024))
    with pytest.raises(AssertionError, match="too small"):
        Linear(1024, 1024)(torch.randn(16, 1024))


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "dtype": (lambda: linear(torch.ones(2, 3).double(), torch.ones(5, 3).double()), "of float32 and on the CPU"),
    "sizes": (lambda: linear(torch.ones(2, 3), torch.ones(5, 7)), r"an input \(…, in_features\)"),
    "bias": (lambda: linear(torch.ones(2, 3), torch.ones(5, 3), torch.ones(3)), r"a bias \(out_features,\)"),
    "vmap": (lambda: torch.vmap(lambda x: linear(x, torch.ones(5, 3)))(torch.ones(2, 3)), "torch.func"),
}


@needs_onednn
@pytest.mark.parametrize("name", REFUSED)
def test_a_forced_product_never_falls_back(name: str) -> None:
    call, said = REFUSED[name]
    with (
        use_linear("onednn"),
        pytest.raises(KernelError, match=rf'use_linear\("onednn"\): .*{said}.* Use use_linear\("pytorch"\) for it'),
    ):
        call()


def test_the_names_of_products() -> None:
    with pytest.raises(ArgumentError, match="name: expected one of pytorch, onednn, got 'mkl'"):
        use_linear("mkl")  # pyright: ignore[reportArgumentType]


def test_the_choice_is_undone_and_belongs_to_one_thread(onednn_preferred: list[Any]) -> None:
    layer, x = Linear(7, 5), torch.randn(3, 7)
    with use_linear("pytorch"):
        layer(x)
        with use_linear("onednn"):
            assert describe_backend() == "oneDNN's, forced by use_linear"
            other = threading.Thread(target=lambda: onednn_preferred.append((describe_backend(),)))  # type: ignore[arg-type]
            other.start()
            other.join()
        assert describe_backend() == "PyTorch's, forced by use_linear"
    assert len(onednn_preferred) == 1
    assert "forced" not in str(onednn_preferred[0])
    layer(x)
    assert len(onednn_preferred) == 2


RULES = [
    ("AuthenticAMD", True, True, "AVX512", "oneDNN's for float32 from 16 rows and 8388608 multiplications on"),
    ("AuthenticAMD", True, True, "AVX2", "oneDNN's for float32"),
    ("AuthenticAMD", True, True, "DEFAULT", "PyTorch's: oneDNN is not known to be faster without AVX2"),
    ("AuthenticAMD", False, True, "AVX512", "PyTorch's: this build of PyTorch has no MKL to be faster than"),
    ("AuthenticAMD", True, False, "AVX512", "PyTorch's: this build of PyTorch has no oneDNN"),
    ("GenuineIntel", True, True, "AVX512", "PyTorch's: oneDNN is not known to be faster than MKL on this processor"),
    ("aarch64", True, True, "DEFAULT", r"PyTorch's: .* \(aarch64\)"),
]


@pytest.mark.parametrize(("maker", "mkl", "onednn", "capability", "said"), RULES)
def test_the_rule(
    maker: str, mkl: bool, onednn: bool, capability: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearhead._layer.linear, "processor_maker", lambda: maker)
    monkeypatch.setattr(clearhead._layer.linear, "has_onednn_linear", lambda: onednn)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    rule = clearhead._layer.linear._why_pytorchs
    rule.cache_clear()
    try:
        assert re.match(said, describe_backend())
    finally:
        rule.cache_clear()


@needs_onednn
def test_the_modules_use_it(onednn_preferred: list[Any]) -> None:
    x = torch.randn(2, 5, 12)
    for module in (clearhead.MultiHeadAttention(12, 3), clearhead.nn.MultiheadAttention(12, 3, batch_first=True)):
        inputs = (x,) if isinstance(module, clearhead.MultiHeadAttention) else (x, x, x)
        with use_linear("pytorch"):
            expected = module(*inputs)
        assert onednn_preferred == []
        got = module(*inputs)
        assert onednn_preferred != []
        torch.testing.assert_close(got, expected)
        onednn_preferred.clear()


def test_explain_and_doctor_name_the_rule() -> None:
    from clearhead.cli._doctor import examine

    x = torch.randn(1, 2, 3, 4)
    with use_linear("pytorch"):
        explanation = clearhead.explain(x, x, x)
        assert examine()["machine"]["projections"] == "PyTorch's, forced by use_linear"
    assert explanation.projections == "PyTorch's, forced by use_linear"
    assert str(explanation).endswith("\nprojections: PyTorch's, forced by use_linear")
    on_another_device = x.to("meta")
    assert clearhead.explain(on_another_device, on_another_device, on_another_device).projections == ""


@pytest.mark.skipif("CLEARHEAD_TEST_VENDOR" in os.environ, reason="another processor is pretended")
def test_the_processor_of_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr("builtins.open", missing)
    monkeypatch.setattr("platform.processor", lambda: "AMD64 Family 25 Model 80, AuthenticAMD")
    assert MAKER() == "AuthenticAMD"
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert MAKER() == "riscv64"
