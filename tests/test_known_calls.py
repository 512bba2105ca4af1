"""Kinds of call that came before are not validated again, and nothing but time is saved by that."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import masks
from clearhead._layer import known_calls
from clearhead._layer.known_calls import kind_of_call, recall
from clearhead.errors import ClearheadError, KernelError
from tests.support.native import needs_native

B, H, L, D = 2, 3, 5, 7


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(B, H, L, D) for _ in range(3))
    return q, k, v


def is_known(query: Tensor, key: Tensor, value: Tensor, mask: object = None, scale: object = None) -> bool:
    kind = kind_of_call(query, key, value, mask, scale, 0.0)
    return kind is not None and recall(kind) is not None


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal("bottom_right")])
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("kv_heads", [1, H])
@pytest.mark.parametrize("kernel", [None, "reference", "chunked"])
def test_the_second_call_computes_what_the_first_did(
    mask: Any, scale: float | None, kv_heads: int, kernel: str | None, qkv: tuple[Tensor, Tensor, Tensor]
) -> None:
    q = qkv[0].double()
    k, v = (x[:, :kv_heads].double() for x in qkv[1:])

    def run() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        output = clearhead.attention(*leaves, mask, scale=scale)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        with torch.no_grad():
            return [output, clearhead.attention(*leaves, mask, scale=scale), *first, *second]

    if kernel is None:
        once, again = run(), run()
    else:
        with clearhead.use_kernel(kernel):
            once, again = run(), run()
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    if kernel is None:
        assert is_known(q, k, v, mask, scale)


def test_a_known_call_is_not_validated_again(qkv: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    first = clearhead.attention(*qkv)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("validated again")

    monkeypatch.setattr(sys.modules["clearhead._attention"], "build_call", never)
    assert torch.equal(clearhead.attention(*qkv), first)
    with pytest.raises(AssertionError, match="validated again"):
        clearhead.attention(*(x[:, :, :3] for x in qkv))


WRONG: dict[str, Callable[..., Tensor]] = {
    "scale of another type": lambda q, k, v: clearhead.attention(q, k, v, scale=True),
    "scale that is not a number": lambda q, k, v: clearhead.attention(q, k, v, scale="1"),  # type: ignore[call-overload]
    "dropout": lambda q, k, v: clearhead.attention(q, k, v, dropout_p=1.5),
    "dropout of another type": lambda q, k, v: clearhead.attention(q, k, v, dropout_p=False),
    "lse of another type": lambda q, k, v: clearhead.attention(q, k, v, softcap=0.0),
    "a number as mask": lambda q, k, v: clearhead.attention(q, k, v, torch.zeros(L, L)),  # type: ignore[call-overload]
    "key of another dtype": lambda q, k, v: clearhead.attention(q, k.double(), v),
    "value on another device": lambda q, k, v: clearhead.attention(q, k, v.to("meta")),
    "other sizes": lambda q, k, v: clearhead.attention(q, k[:, :2], v[:, :2]),
    "no batch": lambda q, k, v: clearhead.attention(q[0], k[0], v),
    "no tensor": lambda q, k, v: clearhead.attention(q, k, [1.0]),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_the_same_after_a_good_call(name: str, qkv: tuple[Tensor, ...]) -> None:
    for _ in range(2):
        clearhead.attention(*qkv, scale=1.0)
        clearhead.attention(*qkv)
        with pytest.raises(ClearheadError, match="expected"):
            WRONG[name](*qkv)


def test_a_forced_kernel_is_another_kind(qkv: tuple[Tensor, ...]) -> None:
    clearhead.attention(*qkv)
    with clearhead.use_kernel("reference"):
        assert not is_known(*qkv)
        clearhead.attention(*qkv)
        assert is_known(*qkv)
    half = [x.bfloat16() for x in qkv]
    clearhead.attention(*half)
    with clearhead.use_kernel("sdpa"), pytest.raises(KernelError):
        clearhead.attention(*half)


def test_recording_sees_known_calls(qkv: tuple[Tensor, ...]) -> None:
    module, x = clearhead.MultiHeadAttention(12, 3), torch.randn(B, L, 12)
    module(x)
    module(x)
    with clearhead.record(module) as seen:
        module(x)
    assert [len(seen[name]) for name in seen] == [1]


def test_autocast_and_transforms_are_seen(qkv: tuple[Tensor, ...]) -> None:
    expected = clearhead.attention(*qkv)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert clearhead.attention(*qkv).dtype == torch.bfloat16
    mapped = torch.vmap(lambda q, k, v: clearhead.attention(q, k, v))(*(x[None] for x in qkv))
    torch.testing.assert_close(mapped[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_mode_derivatives(dtype: torch.dtype, qkv: tuple[Tensor, ...]) -> None:
    q, k, v = (x.to(dtype) for x in qkv)
    clearhead.attention(q, k, v)
    with forward_ad.dual_level():
        output = clearhead.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v, masks.causal())
        found = forward_ad.unpack_dual(output).tangent
    step = 1e-6
    exact = [clearhead.attention(q.double() + d, k.double(), v.double(), masks.causal()) for d in (step, -step)]
    assert found is not None
    torch.testing.assert_close(found.double(), (exact[0] - exact[1]) / (2 * step), rtol=1e-4, atol=1e-5)


@needs_native
@pytest.mark.parametrize("mask", [None, masks.causal()])
@pytest.mark.parametrize("kv_heads", [1, H])
@pytest.mark.parametrize("layout", ["heads outside", "heads inside", "expanded"])
def test_derivatives_of_known_native_calls(mask: Any, kv_heads: int, layout: str) -> None:
    """Outputs, gradients and their gradients, the first time, again, and through views of a gradient."""
    shapes = ((B, H, L, D), (B, kv_heads, L, D), (B, kv_heads, L, 11))
    inputs = [torch.randn(shape) for shape in shapes]
    if layout == "heads inside":
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    if layout == "expanded":
        inputs = [x[:1].expand(B, -1, -1, -1) for x in inputs]

    def derivatives(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        output = clearhead.attention(*leaves, mask)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        output = clearhead.attention(*leaves, mask)
        plain = torch.autograd.grad(output.transpose(1, 2).sum(), leaves)
        return [output, *first, *second, *plain]

    once, again, exact = derivatives(torch.float32), derivatives(torch.float32), derivatives(torch.float64)
    assert clearhead.explain(*inputs, mask).kernel == "native"
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    for found, expected in zip(again, exact, strict=True):
        assert (found.double() - expected).abs().max() < 1e-5 * max(1.0, float(expected.detach().abs().max()))


@needs_native
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(1, 1)])
def test_many_gradients_at_once(mask: Any, qkv: tuple[Tensor, ...]) -> None:
    leaves = [x.requires_grad_() for x in qkv]
    output, gradients = clearhead.attention(*leaves, mask), torch.randn(4, B, H, L, D)
    found = torch.autograd.grad(output, leaves, gradients, is_grads_batched=True, retain_graph=True)
    for number, gradient in enumerate(gradients):
        for one, expected in zip(found, torch.autograd.grad(output, leaves, gradient, retain_graph=True), strict=True):
            torch.testing.assert_close(one[number], expected)


@needs_native
def test_known_and_recorded_calls_save_the_same(qkv: tuple[Tensor, ...]) -> None:
    """Checkpointing compares what is saved; a recorder may see the first pass and not the second."""
    module, x = clearhead.MultiHeadAttention(12, 3), torch.randn(B, L, 12, requires_grad=True)
    memory = torch.randn(B, 7, 12)
    module(x, memory).sum().backward()
    expected, x.grad = x.grad, None
    with clearhead.record(module):
        output = checkpoint(module, x, memory, use_reentrant=False)
    output.sum().backward()
    assert expected is not None
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


NOT_KNOWN: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "a subclass": lambda x: (torch.nn.Buffer(x).as_subclass(type("Own", (Tensor,), {})), x, x),
    "nested": lambda x: (torch.nested.nested_tensor([x[0], x[1]]),) * 3,
    "meta": lambda x: (x.to("meta"),) * 3,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", NOT_KNOWN)
def test_other_tensors_are_no_kind(name: str, qkv: tuple[Tensor, ...]) -> None:
    assert kind_of_call(*NOT_KNOWN[name](qkv[0]), None, None, 0.0) is None


def test_a_decoder_does_not_fill_the_memory() -> None:
    for keys in range(1, 600):
        known = torch.zeros(1, 1, 1, 4).expand(1, 1, keys, 4)
        clearhead.attention(torch.zeros(1, 1, 1, 4), known, known)
    assert 0 < len(known_calls._plans) <= known_calls._MOST


@pytest.mark.parametrize("own", [True, False])
def test_modules_follow_their_weights(own: bool) -> None:
    """A module that was called before may be given other weights, another dtype, a hook, or go into training."""
    x = torch.randn(B, L, 12)
    module = clearhead.MultiHeadAttention(12, 3) if own else clearhead.nn.MultiheadAttention(12, 3, batch_first=True)

    def run(x: Tensor) -> Tensor:
        return module(x) if own else module(x, x, x, need_weights=False)[0]

    before = run(x)
    torch.testing.assert_close(run(x), before)
    with torch.no_grad():
        module.out_proj.bias.add_(1.0)
    torch.testing.assert_close(run(x), before + 1)
    handle = module.out_proj.register_forward_hook(lambda _module, _args, output: output - 1)
    torch.testing.assert_close(run(x), before)
    handle.remove()
    module.double()
    assert run(x.double()).dtype == torch.float64
    with pytest.raises(TypeError, match=r"query: expected the module's dtype torch\.float64, got torch\.float32"):
        run(x)
    module.float()
    module.dropout = 0.5
    assert not torch.equal(run(x), run(x))
    module.eval()
    assert torch.equal(run(x), run(x))
