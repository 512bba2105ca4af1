"""PyTorch's `scaled_dot_product_attention` on Clearhead's kernel: numbers, layouts, and what PyTorch keeps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead.backend import _sdpa
from clearhead.errors import ArgumentError, ShapeError
from tests.backend.small_calls import compute_small_calls

B, H, L, S, D = 2, 6, 37, 53, 16
BOOL = torch.rand(B, 1, L, S, generator=torch.Generator().manual_seed(5)) > 0.3
BOOL[0, 0, 3] = False  # a fully masked row
FLOAT = torch.randn(L, S, generator=torch.Generator().manual_seed(6))
PADDING = (torch.arange(S) < torch.tensor([[S - 5], [S - 20]]))[:, None, None]
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": BOOL},
    "float mask": {"attn_mask": FLOAT},
    "padding": {"attn_mask": PADDING},
    "grouped heads": {"enable_gqa": True},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(options: dict[str, Any], dtype: torch.dtype, heads_inside: bool = False) -> list[Tensor]:
    generator, kv_heads = torch.Generator().manual_seed(7), 2 if "enable_gqa" in options else H
    shapes = (B, H, L, D), (B, kv_heads, S, D), (B, kv_heads, S, D)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if heads_inside:  # (B, L, H, D) in memory
        drawn = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn]
    return [x.requires_grad_() for x in drawn]


def results(inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    output = scaled_dot_product_attention(*inputs, **options)
    return [output, *torch.autograd.grad(output.double().sin().sum(), inputs)]


def exact(inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """In float64, by PyTorch's formula: its kernel for float64 is not Clearhead's."""
    mask = options.get("attn_mask")
    options = options | ({"attn_mask": mask.double()} if mask is not None and mask.is_floating_point() else {})
    return results([x.detach().double().requires_grad_() for x in inputs], options)


def error(found: Tensor, expected: Tensor) -> float:
    expected = expected.detach()
    return float((found.detach().double() - expected).abs().max() / max(1e-3, float(expected.abs().max())))


def options_of(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """The options of a call, with a float mask in the dtype of the operands."""
    mask = CALLS[name].get("attn_mask")
    return CALLS[name] if mask is None or mask.dtype == torch.bool else CALLS[name] | {"attn_mask": mask.to(dtype)}


def require_near(ours: Tensor, theirs: Tensor, right: Tensor) -> None:
    """As exact as float32, or at most twice as far as PyTorch's half precision."""
    assert error(ours, right) <= max(1e-5, 0 if theirs.dtype == torch.float32 else 2 * error(theirs, right))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The passes that Clearhead's kernel computes from now on, with the number of their queries."""
    passes: list[tuple[str, int]] = []

    def counting(name: str) -> Callable[..., Any]:
        kernel = getattr(_sdpa, name)

        def call(first: Tensor, *others: Any, **options: Any) -> Any:
            passes.append((name, first.shape[2]))
            return kernel(first, *others, **options)

        return call

    for name in ("_computed", "_gradients"):
        monkeypatch.setattr(_sdpa, name, counting(name))
    return passes


@pytest.mark.parametrize("heads_inside", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_numbers_and_layouts(name: str, dtype: torch.dtype, heads_inside: bool) -> None:
    options = options_of(name, dtype)
    inputs = operands(options, dtype, heads_inside)
    expected, pytorchs = exact(inputs, options), results(inputs, options)
    with clearhead.activate(), pytest.MonkeyPatch.context() as patch:
        compute_small_calls(patch)
        found = results(inputs, options)
    for ours, theirs, right in zip(found, pytorchs, expected, strict=True):
        require_near(ours, theirs, right)
        assert (ours.stride(), ours.dtype) == (theirs.stride(), theirs.dtype)
    if dtype == torch.float32:  # another kernel computed it
        assert not all(torch.equal(*pair) for pair in zip(found, pytorchs, strict=True))


MASK_SHAPES = [*itertools.product((L, 1), (S, 1)), *itertools.product((B, 1), (H, 1), (L, 1), (S, 1))]


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_that_broadcast(kind: str, active: None) -> None:
    """Query, key and value are parts of one tensor, as `nn.Linear(E, 3 · E)` leaves them."""
    draw = torch.Generator().manual_seed(8)
    features = torch.randn(B, S, 3, H, D, generator=draw)
    for shape in MASK_SHAPES:
        query, key, value = (x.requires_grad_() for x in features.detach().permute(2, 0, 3, 1, 4))
        inputs = [query[:, :, :L], key, value]
        mask = torch.randn(shape, generator=draw)
        options = {"attn_mask": mask > 0 if kind == "bool" else mask}
        for found, right in zip(results(inputs, options), exact(inputs, options), strict=True):
            assert error(found, right) <= 1e-5


def test_the_log_sum_exp_is_pytorchs(active: None) -> None:
    query, key, value = operands({}, torch.float32)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    bias = torch.zeros(L, S).masked_fill(~BOOL[0, 0], -math.inf)
    _, lse = operator(query, key, value, attn_mask=bias)
    scores = (query.double() @ key.double().mT / math.sqrt(D) + bias).logsumexp(-1)
    assert lse.dtype == torch.float32
    assert lse.stride() == (L * H, 1, H)
    assert error(lse, scores.masked_fill(scores == -math.inf, 0)) <= 1e-6


def test_nan_in_a_hidden_key_stays_there(active: None) -> None:
    query, key, value = (x.detach() for x in operands({}, torch.float32))
    visible = torch.ones(L, S, dtype=torch.bool)
    visible[:, 5] = False
    key[:, :, 5] = value[:, :, 5] = math.nan
    assert not scaled_dot_product_attention(query, key, value, visible).isnan().any()


def refused() -> dict[str, Callable[[], Tensor]]:
    """Calls that stay PyTorch's."""
    query, key, value = (x.detach() for x in operands({}, torch.float32))
    bias = torch.zeros(L, S, requires_grad=True)
    return {
        "float64": lambda: scaled_dot_product_attention(query.double(), key.double(), value.double()),
        "dropout": lambda: scaled_dot_product_attention(query, key, value, dropout_p=1.0),
        "gradient of a mask": lambda: scaled_dot_product_attention(query, key, value, bias),
        "another width": lambda: scaled_dot_product_attention(query, key, value[..., :11]),
        "three dimensions": lambda: scaled_dot_product_attention(query[0], key[0], value[0]),
        "a batch that broadcasts": lambda: scaled_dot_product_attention(query, key[:1], value[:1]),
        "rows with gaps": lambda: scaled_dot_product_attention(query[..., ::2], key[..., ::2], value[..., ::2]),
        "no keys": lambda: scaled_dot_product_attention(query, key[:, :, :0], value[:, :, :0]),
        "the backend that forms all scores": lambda: in_math(query, key, value),
    }


def in_math(*inputs: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*inputs)


@pytest.mark.parametrize("name", refused())
def test_other_calls_have_pytorchs_bits(name: str, active: None) -> None:
    call = refused()[name]
    found = call()
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.equal(found, call())


def test_small_calls_stay_pytorchs() -> None:
    x = torch.randn(2, 4, 5, 4)
    expected = scaled_dot_product_attention(x, x, x)
    with clearhead.activate():
        assert torch.equal(scaled_dot_product_attention(x, x, x), expected)


@pytest.mark.parametrize("kernel", ["_computed", "_gradients"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_one_pass_is_clearheads_and_the_other_pytorchs(
    name: str, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, passes = options_of(name, dtype), counted(monkeypatch)
    inputs = operands(options, dtype)
    expected, pytorchs = exact(inputs, options), results(inputs, options)
    is_forward = kernel == "_computed"
    compute_small_calls(monkeypatch, forward=0 if is_forward else math.inf, backward=math.inf if is_forward else 0)

    def attend(*tensors: Tensor) -> Tensor:
        # What a graph computes needs no gradients inside it, where one kernel would else compute both passes.
        return scaled_dot_product_attention(*(x * 1.0 for x in tensors), **options)

    torch.compiler.reset()  # `attend` is another function in each test, of one code
    with clearhead.activate():
        output = torch.compile(attend, backend="aot_eager", fullgraph=True)(*inputs)
        found = [output, *torch.autograd.grad(output.double().sin().sum(), inputs)]
    assert {each for each, _ in passes} == {kernel}
    for ours, theirs, right in zip(found, pytorchs, expected, strict=True):
        require_near(ours, theirs, right)


def test_passes_with_few_queries_in_float32_stay_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = counted(monkeypatch)
    with clearhead.activate():
        for rows, dtype in ((3, torch.float32), (4, torch.float32), (1, torch.bfloat16)):
            query = torch.randn(1, 4, rows, 32, dtype=dtype, requires_grad=True)
            key = torch.randn(1, 4, 1 << 14, 32, dtype=dtype)
            scaled_dot_product_attention(query.detach(), key, key)
            scaled_dot_product_attention(query, key, key).sum().backward()
    all_passes = ("_computed", "_computed", "_gradients")
    of_four, of_one = ([(name, rows) for name in all_passes] for rows in (4, 1))
    assert passes == [("_computed", 3), *of_four, *of_one]


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_one_kernel_computes_both_passes(rows: int) -> None:
    """A hidden NaN is in the output of PyTorch's kernel and in its gradients, and in neither of Clearhead's."""
    query, key, value = (torch.randn(1, 4, rows, 32, requires_grad=True) for _ in range(3))
    hidden = torch.zeros(1, 1, 1, rows, dtype=torch.bool)
    hidden[..., 3] = True
    with torch.no_grad():
        key[:, :, 3] = value[:, :, 3] = math.nan
    with clearhead.activate():
        output = scaled_dot_product_attention(query, key, value, ~hidden)
        (gradient,) = torch.autograd.grad(output.sum(), query)
    assert output.isnan().any() == gradient.isnan().any()


def test_dropout_of_the_operator_is_refused(active: None) -> None:
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(ArgumentError, match="dropout_p: expected 0"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_graphs_follow(backend: str, active: None) -> None:
    """A graph that was compiled before the activation uses the kernel, and one that was compiled after leaves it."""
    inputs = operands({}, torch.float32, heads_inside=True)

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        output = function(*inputs)
        return [output, *torch.autograd.grad(output.sin().sum(), inputs)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, FLOAT)

    expected = step(attend)
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    assert all(torch.equal(*pair) for pair in zip(step(compiled), expected, strict=True))
    torch.nn.attention.restore_flash_attention_impl()
    pytorchs = step(attend)
    assert not torch.equal(pytorchs[0], expected[0])
    assert all(torch.equal(*pair) for pair in zip(step(compiled), pytorchs, strict=True))


def test_exported_programs_hold_pytorchs_operator(active: None) -> None:
    class Attend(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return scaled_dot_product_attention(query, key, value)

    inputs = tuple(x.detach() for x in operands({}, torch.float32))
    program = torch.export.export(Attend(), inputs)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.aten.scaled_dot_product_attention.default]
    assert torch.equal(program.module()(*inputs), Attend()(*inputs))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of PyTorch's vmap, activated or not
def test_tools_around_it(active: None) -> None:
    inputs = operands({}, torch.float32)
    query, key, value = inputs
    expected = results(inputs, {})
    with torch.inference_mode():
        assert torch.equal(scaled_dot_product_attention(query, key, value), expected[0])
    with torch.autograd.graph.save_on_cpu():
        assert all(torch.equal(*pair) for pair in zip(results(inputs, {}), expected, strict=True))
    again = checkpoint(scaled_dot_product_attention, query, key, value, use_reentrant=False)
    gradients = torch.autograd.grad(again.double().sin().sum(), inputs)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected[1:], strict=True))
    mapped = torch.func.vmap(scaled_dot_product_attention)(query[:, None], key[:, None], value[:, None])
    assert error(mapped[:, 0], expected[0].double()) <= 1e-6
    gradient = torch.func.grad(lambda x: scaled_dot_product_attention(x, key, value).sin().sum())(query)
    assert error(gradient, expected[1].double()) <= 1e-6
    with torch.autocast("cpu"):
        assert scaled_dot_product_attention(query, key, value).dtype == torch.bfloat16
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert torch.equal(scaled_dot_product_attention(query, key, value), expected[0])


def test_saved_tensors_that_come_back_in_other_layouts(active: None) -> None:
    inputs = operands({}, torch.float32)
    expected = results(inputs, {})

    def strided(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, strided):
        output = scaled_dot_product_attention(*inputs)
        gradients = torch.autograd.grad(output.double().sin().sum(), inputs)
    for gradient, right in zip(gradients, expected[1:], strict=True):
        assert error(gradient, right.double()) <= 1e-6


def test_saved_tensors_in_another_dtype_or_shape(active: None) -> None:
    inputs = operands({}, torch.float32)

    def gradients(unpack: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            output = scaled_dot_product_attention(*inputs)
        return list(torch.autograd.grad(output.sum(), inputs))

    right = torch.autograd.grad(scaled_dot_product_attention(*inputs).sum(), inputs)
    for gradient, exact in zip(gradients(lambda x: x.double()), right, strict=True):
        assert error(gradient, exact.double()) <= 1e-5
    with pytest.raises(ShapeError, match=r"saved value: expected the shape"):
        gradients(lambda x: x[..., :5, :] if x.data_ptr() == inputs[2].data_ptr() else x)


def test_a_saved_mask_of_another_shape_is_refused(active: None) -> None:
    inputs = operands({}, torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x[:7, :3] if x.shape == (L, S) else x):
        output = scaled_dot_product_attention(*inputs, FLOAT)
    with pytest.raises(ShapeError, match="saved bias: expected the shape"):
        output.sum().backward()


def test_rows_that_a_large_number_hides(active: None) -> None:
    """Rows that −1e9 hides entirely still have weights, and their log-sum-exp needs more than float32."""
    inputs = operands({}, torch.float32)
    mask = torch.full((L, S), -1e9)
    mask[5:, :7] = 0
    with sdpa_kernel(SDPBackend.MATH):  # in float32 too, because it rounds these rows' scores alike
        expected = results(inputs, {"attn_mask": mask})
    for found, right in zip(results(inputs, {"attn_mask": mask}), expected, strict=True):
        assert error(found, right.double()) <= 1e-5
