"""Kinds of call with masks that are tensors: known by sizes and strides, while their numbers are read in every call."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import masks
from clearhead._call.observers import observing
from clearhead._call.spec import AttentionCall
from clearhead._layer.known_calls import forget_calls, kind_of_call, recall
from clearhead.masks import Mask
from tests.support.native import needs_native

B, H, L, S, D = 2, 3, 5, 7, 11

pytestmark = needs_native


def marks(seed: int, *shape: int) -> Tensor:
    """The first row and the first column see and are seen by nobody where the seed is odd."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    drawn[..., 1:, -1] = drawn[..., -1, :] = True
    drawn[..., 0, :] = drawn[..., :, 0] = seed % 2 == 0
    return drawn


def numbers(seed: int, *shape: int) -> Tensor:
    shown = marks(seed, *shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).masked_fill(~shown, -torch.inf)


MASKS: dict[str, Callable[[int], Mask | Tensor]] = {
    "a bool tensor": lambda seed: marks(seed, L, S),
    "(L, S)": lambda seed: masks.keep(marks(seed, L, S)),
    "(B, L, S)": lambda seed: masks.drop(~marks(seed, B, L, S)),
    "(B·H, L, S)": lambda seed: masks.keep(marks(seed, B * H, L, S)),
    "keys": lambda seed: masks.keep(keys=marks(seed, B, S)),
    "transposed": lambda seed: masks.keep(marks(seed, L, S).mT.contiguous().mT),
    "numbers": lambda seed: masks.bias(numbers(seed, L, S)),
    "numbers of every head": lambda seed: masks.bias(numbers(seed, B, H, L, S)),
    "every other number": lambda seed: masks.bias(numbers(seed, L, 2 * S)[:, ::2]),
    "causal and keys": lambda seed: masks.causal("bottom_right") & masks.keep(keys=marks(seed, B, S)),
    "marks and numbers": lambda seed: masks.keep(keys=marks(seed, B, S)) & masks.bias(numbers(seed, L, S)),
    "numbers and marks": lambda seed: masks.bias(numbers(seed, L, S)) & masks.keep(marks(seed + 2, L, S)),
}
every_mask = pytest.mark.parametrize("name", MASKS)


def inputs(layout: str = "heads outside") -> list[Tensor]:
    random = torch.Generator().manual_seed(5)
    shapes = ((B, H, L, D), (B, H, S, D), (B, H, S, D))
    if layout == "heads outside":
        return [torch.randn(shape, generator=random) for shape in shapes]
    # Cut out of one projection, so that copies lie otherwise.
    return [torch.randn(B, x[2], 3, H, D, generator=random)[:, :, 1].transpose(1, 2) for x in shapes]


def attend(given: Sequence[Tensor], mask: Any) -> Tensor:
    query, key, value = given
    return clearhead.attention(query, key, value, mask)


def kind(given: Sequence[Tensor], mask: Any) -> Hashable:
    query, key, value = given
    return kind_of_call(query, key, value, mask, None, 0.0)


def derivatives(given: list[Tensor], mask: Mask | Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in given]
    output = attend(leaves, mask)
    first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves)
    plain = torch.autograd.grad(attend(leaves, mask).transpose(1, 2).sum(), leaves)
    with torch.no_grad():
        return [output, attend(leaves, mask), *first, *second, *plain]


@every_mask
@pytest.mark.parametrize("layout", ["heads outside", "cut out"])
@pytest.mark.parametrize("first", [2, 3], ids=["after all were seen", "after some were hidden"])
def test_against_float64(name: str, layout: str, first: int) -> None:
    """Outputs and derivatives of two orders, of masks that hide from everybody and of those that do not."""
    forget_calls()
    given = inputs(layout)
    derivatives(given, MASKS[name](first))
    assert recall(kind(given, MASKS[name](first))) is not None
    for seed in (4, 5):
        mask = MASKS[name](seed)
        found, exact = derivatives(given, mask), derivatives([x.double() for x in given], mask)
        for one, expected in zip(found, exact, strict=True):
            assert (one.double() - expected).abs().max() < 1e-5 * max(1.0, float(expected.detach().abs().max()))


@every_mask
def test_nothing_hidden_gets_out(name: str) -> None:
    query, key, value = inputs()
    for seed in (2, 3):
        mask = MASKS[name](seed)
        shown = (mask if isinstance(mask, Mask) else masks.keep(mask)).dense(L, S, batch_size=B, num_heads=H)
        seen = shown if shown.dtype == torch.bool else shown != -torch.inf
        hidden = ~seen.any(-2)[..., None].expand(B, H, S, 1)
        poisoned = [x.masked_fill(hidden, torch.nan).requires_grad_() for x in (key, value)]
        output = attend([query, *poisoned], mask)
        torch.testing.assert_close(output, clearhead.attention(query, key, value, mask))
        assert all(each.isfinite().all() for each in torch.autograd.grad(output.sum(), poisoned))


def test_a_known_mask_is_not_validated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs()
    attend(given, masks.keep(marks(2, L, S)))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("validated again")

    monkeypatch.setattr(sys.modules["clearhead._attention"], "build_call", never)
    attend(given, masks.drop(marks(3, L, S)))
    for other in (masks.keep(marks(2, B, L, S)), masks.bias(numbers(2, L, S)), masks.keep(marks(2, S, L).mT)):
        with pytest.raises(AssertionError, match="validated again"):
            attend(given, other)


def test_nothing_is_kept() -> None:
    given, tensors = inputs(), [marks(3, L, S), numbers(2, L, S)]
    mask = masks.keep(tensors[0]) & masks.bias(tensors[1])
    output = attend([x.requires_grad_() for x in given], mask)
    attend([x.detach() for x in given], mask)
    seen = [weakref.ref(each) for each in (*given, *tensors, mask, output)]
    del given, tensors, mask, output
    gc.collect()
    assert [each() for each in seen] == [None] * len(seen)


NO_KIND: dict[str, Callable[[], Any]] = {
    "wants a gradient": lambda: masks.bias(torch.zeros(L, S, requires_grad=True)),
    "float64": lambda: masks.bias(torch.zeros(L, S, dtype=torch.float64)),
    "two of marks": lambda: masks.keep(marks(2, L, S)) & masks.keep(keys=marks(2, B, S)),
    "two of numbers": lambda: masks.bias(numbers(2, L, S)) & masks.bias(numbers(4, L, S)),
    "either of two": lambda: masks.keep(marks(2, L, S)) | masks.causal(),
    "the opposite": lambda: ~masks.keep(marks(2, L, S)),
    "negated": lambda: masks.bias(torch.full((L, S), 1j).conj().imag),
    "a subclass": lambda: masks.keep(marks(2, L, S).as_subclass(type("Own", (Tensor,), {}))),
    "a window": lambda: masks.sliding_window(1, 2) & masks.keep(marks(2, L, S)),
    "numbers that say nothing": lambda: torch.zeros(L, S),
}


@pytest.mark.parametrize("name", NO_KIND)
def test_other_masks_are_no_kind(name: str) -> None:
    assert kind(inputs(), NO_KIND[name]()) is None


def test_a_bias_that_is_changed_before_the_backward_pass() -> None:
    query, key, value = (x.requires_grad_() for x in inputs())
    tensor = numbers(2, L, S)
    output = clearhead.attention(query, key, value, masks.bias(tensor))
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class Watching:
    recomputing = False

    def attended(self, call: AttentionCall, output: Tensor) -> Tensor:
        return output


@every_mask
@pytest.mark.parametrize("seed", [2, 3])
def test_recorded_and_checkpointed_calls_save_the_same(name: str, seed: int) -> None:
    leaves, mask = [x.requires_grad_() for x in inputs()], MASKS[name](seed)
    expected = torch.autograd.grad(attend(leaves, mask).sum(), leaves)
    with observing(Watching()):
        output = checkpoint(lambda *given: attend(given, mask), *leaves, use_reentrant=False)
    found = torch.autograd.grad(output.sum(), leaves)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_grouped_heads_and_half_precision() -> None:
    query, key, value = inputs()
    mask = masks.keep(marks(3, L, S))
    for _ in range(2):
        grouped = clearhead.attention(query, key[:, :1], value[:, :1], mask)
        whole = [query, *(x[:, :1].expand(B, H, S, D) for x in (key, value))]
        torch.testing.assert_close(grouped, attend(whole, mask))
        half = [x.bfloat16().requires_grad_() for x in (query, key, value)]
        found = torch.autograd.grad(attend(half, mask).float().sum(), half)
        with clearhead.use_kernel("reference"):
            expected = torch.autograd.grad(attend(half, mask).float().sum(), half)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
