"""Prepared masks: a snapshot of a mask for one grid, lowered once."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import final

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import ArgumentError, DeviceError, ShapeError
from clearhead.masks import Mask, PreparedMask, mask_mod
from clearhead.masks._structure import Structure
from clearhead.positions import ALiBi, RelativeBias
from tests.support.allocations import CountOperations
from tests.support.requests import Block, Grid

B, H, L, S, D = 2, 3, 5, 7, 4

MASKS: dict[str, Callable[[], Mask]] = {
    "causal": masks.causal,
    "window": lambda: masks.sliding_window(1, 2),
    "lengths": lambda: masks.lengths(torch.tensor([7, 2])),
    "nothing visible": lambda: masks.lengths(torch.tensor([7, 0])),
    "query lengths": lambda: masks.lengths(torch.tensor([7, 4]), torch.tensor([5, 2])),
    "causal & lengths": lambda: masks.causal() & masks.lengths(torch.tensor([7, 2])),
    "keep(keys)": lambda: masks.keep(keys=torch.tensor([[1, 1, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]])),
    "keep": lambda: masks.keep(torch.arange(L)[:, None] >= torch.arange(S)),
    "per head": lambda: masks.keep(torch.rand(B, H, L, S) < 0.5),
    "bias": lambda: masks.bias(torch.randn(H, L, S)[None]),
    "two biases": lambda: masks.bias(torch.randn(L, S)) & masks.bias(torch.zeros(L, S).tril(-1) - torch.inf) & ALiBi(H),
    "mask_mod": lambda: mask_mod(lambda b, h, q, k: (q + k + h) % 3 != b),
    "or": lambda: masks.causal() | masks.prefix(torch.tensor([1, 3])),
    "not": lambda: ~masks.sliding_window(1, 1),
    "ALiBi": lambda: ALiBi(H) & masks.causal(),
}


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, L, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)


@pytest.mark.parametrize("kernel", ["native", "sdpa", "chunked", "reference", None])
@pytest.mark.parametrize("name", MASKS)
def test_gives_what_the_mask_gives(name: str, kernel: str | None) -> None:
    mask, (query, key, value) = MASKS[name](), operands()
    fixed = mask.prepare(L, S, batch_size=B, num_heads=H)
    assert isinstance(fixed, PreparedMask)
    assert torch.equal(fixed.dense(), mask.dense(L, S, batch_size=B, num_heads=H))
    reasons = clearhead.explain(query, key, value, mask).reasons
    if kernel is not None and reasons[kernel]:
        pytest.skip(f"{kernel} refuses: {reasons[kernel][0]}")
    forced = clearhead.use_kernel(kernel) if kernel else torch.no_grad()
    with forced:
        expected = clearhead.attention(query, key, value, mask)
        for _ in range(2):
            assert torch.allclose(clearhead.attention(query, key, value, fixed), expected, atol=1e-6)


@pytest.mark.parametrize("kernel", ["native", "sdpa", "chunked"])
def test_gradients_and_nan_in_padding(kernel: str) -> None:
    mask = masks.causal() & masks.lengths(torch.tensor([7, 0]))
    tensors = operands()
    tensors[1][1], tensors[2][1] = torch.nan, torch.nan
    if clearhead.explain(*tensors, mask).reasons[kernel]:
        pytest.skip("refused here")
    gradients: list[tuple[Tensor, ...]] = []
    for lowered in (mask, mask.prepare(L, S)):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        with clearhead.use_kernel(kernel):
            gradients.append(torch.autograd.grad(clearhead.attention(*inputs, lowered).square().sum(), inputs))
    for expected, gradient in zip(*gradients, strict=True):
        assert gradient.isfinite().all()
        assert torch.allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("lowered_before", [False, True])
def test_a_later_write_does_not_change_it(lowered_before: bool) -> None:
    lengths, marks, numbers = torch.tensor([3, 7]), torch.ones(B, S, dtype=torch.bool), torch.zeros(L, S)
    mask = (masks.lengths(lengths) & masks.keep(keys=marks) & masks.bias(numbers)).prepare()
    query, key, value = operands()
    expected = clearhead.attention(query, key, value, masks.lengths(lengths.clone()))
    if lowered_before:
        clearhead.attention(query, key, value, mask)
    lengths.fill_(1)
    marks[:, 0] = False
    numbers.numpy()[:] = -torch.inf
    assert torch.allclose(clearhead.attention(query, key, value, mask), expected, atol=1e-6)


def test_made_in_inference_mode_it_serves_training() -> None:
    with torch.inference_mode():
        mask = (masks.lengths(torch.tensor([3, 7])) & masks.causal()).prepare(L, S)
        clearhead.attention(*operands(), mask)
    query, key, value = (x.requires_grad_() for x in operands())
    with clearhead.use_kernel("chunked"):
        clearhead.attention(query, key, value, mask).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize(
    ("fixed", "error", "message"),
    [
        (lambda: masks.causal().prepare(4, S), ShapeError, "L = 4, S = 7, got L = 5, S = 7"),
        (lambda: masks.lengths(torch.arange(3)).prepare(L, S), ShapeError, "B = 3, L = 5, S = 7, got B = 2, L = 5"),
        (lambda: mask_mod(lambda b, h, q, k: q >= k + b).prepare(L, S), ShapeError, "B = 1, L = 5, S = 7, got B = 2"),
        (lambda: mask_mod(lambda b, h, q, k: q + h >= k).prepare(L, S), ShapeError, "H = 1, L = 5, S = 7, got H = 3"),
        (
            lambda: masks.causal().prepare(L, S, query_positions=torch.arange(L)),
            ArgumentError,
            "query_positions it was prepared for",
        ),
    ],
    ids=["length", "batch", "unknown batch", "unknown heads", "positions"],
)
def test_another_grid_is_refused(fixed: Callable[[], Mask], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"expected the .*{message}"):
        clearhead.attention(*operands(), fixed())


class Marked(Tensor):
    """A subclass, which `copy.deepcopy` refuses."""


def test_tensors_of_a_subclass_are_copied_too() -> None:
    lengths, positions = torch.tensor([5, 3]).as_subclass(Marked), torch.arange(2, 7).as_subclass(Marked)
    mask = (masks.causal() & masks.lengths(lengths)).prepare(5, query_positions=positions, key_positions=positions)
    expected = (masks.causal() & masks.lengths(torch.tensor([5, 3]))).dense(5, query_positions=2, key_positions=2)
    lengths.zero_()
    positions.zero_()
    assert torch.equal(mask.dense(5, query_positions=torch.arange(2, 7), key_positions=torch.arange(2, 7)), expected)


def test_a_bias_that_learns_is_refused() -> None:
    for mask in (masks.bias(torch.zeros(L, S, requires_grad=True)) & masks.causal(), RelativeBias(H)):
        with pytest.raises(ArgumentError, match="a mask without a bias that requires grad"):
            mask.prepare(L, S)


def test_batch_and_heads_stay_open_where_the_mask_is_the_same_for_all() -> None:
    query, key, value = operands()
    positions = torch.arange(2, 2 + L)
    for mask in (masks.causal(), ~masks.causal(), mask_mod(lambda b, h, q, k: q >= k)):
        fixed = mask.prepare(L, S, query_positions=positions)
        assert repr(fixed) == f"<mask {mask.describe()}, prepared for L = 5, S = 7>"
        found, expected = (
            clearhead.attention(query, key, value, each, query_positions=positions) for each in (fixed, mask)
        )
        assert torch.allclose(found, expected, atol=1e-6)


@final
class Counted(Mask):
    """Hides nothing, and counts its structures."""

    def __init__(self) -> None:
        self.structures = 0

    def visible(self, block: Block) -> None:
        return None

    def structure(self, grid: Grid) -> Structure:
        self.structures += 1
        return Structure()

    def describe(self) -> str:
        return "counted()"


@pytest.mark.parametrize("kernel", ["native", "chunked", "sdpa"])
def test_one_structure_serves_all_calls_their_backward_passes_and_threads(kernel: str) -> None:
    fixed = (Counted() & masks.bias(torch.randn(L, S)) & masks.lengths(torch.tensor([7, 2]))).prepare(L, S)
    counted, *_ = fixed.parts()
    assert isinstance(counted, Counted)
    started = counted.structures  # to find out which sizes stay open
    drawn = operands()

    def call(_: int) -> Tensor:
        query, key, value = (x.clone().requires_grad_() for x in drawn)
        with clearhead.use_kernel(kernel):
            clearhead.attention(query, key, value, fixed).sum().backward()
        assert query.grad is not None
        return query.grad

    first = call(0)
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(each, first) for each in pool.map(call, range(16)))
    assert counted.structures == started + 1


def test_a_pickled_copy_finds_out_for_itself() -> None:
    fixed = (masks.causal() & masks.lengths(torch.tensor([7, 2]))).prepare(L, S)
    query, key, value = operands()
    before = clearhead.attention(query, key, value, fixed)
    copy = pickle.loads(pickle.dumps(fixed))
    assert isinstance(copy, PreparedMask)
    assert torch.equal(clearhead.attention(query, key, value, copy), before)


def test_combined_it_is_an_ordinary_mask() -> None:
    fixed = masks.lengths(torch.tensor([3, 7])).prepare(L, S)
    for mask in (fixed & masks.causal(), masks.causal() & fixed):
        assert not isinstance(mask, PreparedMask)
        whole = masks.causal() & masks.lengths(torch.tensor([3, 7]))
        assert torch.equal(mask.dense(4, S), whole.dense(4, S))


@pytest.mark.parametrize(
    ("name", "most"),
    [("bias", 3), ("window", 3), ("lengths", 5), ("causal & lengths", 5), ("nothing visible", 5), ("keep(keys)", 5)],
)
@pytest.mark.parametrize("group", [1, 3])
def test_a_call_of_a_lowered_mask_issues_few_operations(name: str, most: int, group: int) -> None:
    mask, (query, key, value) = MASKS[name](), operands()
    key, value = (x[:, : H // group] for x in (key, value))
    fixed = mask.prepare(L, S, batch_size=B, num_heads=H)
    with torch.no_grad(), clearhead.use_kernel("sdpa"):
        expected = clearhead.attention(query, key, value, fixed)
        with CountOperations() as counted:
            output = clearhead.attention(query, key, value, fixed)
    assert torch.equal(output, expected)
    assert len(counted.names) <= most + (2 if group > 1 else 0), counted.names
    assert any("scaled_dot_product" in name for name in counted.names)
    assert not counted.values_read


@pytest.mark.parametrize("name", ["causal", "ALiBi", "mask_mod of positions"])
def test_rules_without_tensors_fit_every_device_unless_prepared_for_one(name: str) -> None:
    rule = MASKS[name]() if name in MASKS else mask_mod(lambda b, h, q, k: q >= k)
    inputs = {device: [x.to(device) for x in operands()] for device in ("cpu", "meta")}
    fixed = rule.prepare(L, S)
    expected = clearhead.attention(*inputs["cpu"], rule)
    for device in ("meta", "cpu", "meta"):  # no lowering of one device is used on another
        output = clearhead.attention(*inputs[device], fixed)
        assert output.device.type == device
    torch.testing.assert_close(clearhead.attention(*inputs["cpu"], fixed), expected)
    elsewhere = rule.prepare(L, S, device="meta")
    assert clearhead.attention(*inputs["meta"], elsewhere).is_meta
    with pytest.raises(DeviceError, match=r"a call on meta, for which it was prepared, got one on cpu\. Prepare the"):
        clearhead.attention(*inputs["cpu"], elsewhere)


def test_the_device_of_a_mask_with_tensors_is_theirs() -> None:
    on_meta = [x.to("meta") for x in operands()]
    for mask in (masks.keep(torch.ones(L, S, dtype=torch.bool)), masks.bias(torch.zeros(L, S))):
        with pytest.raises(DeviceError, match="on cpu"):
            clearhead.attention(*on_meta, mask.prepare(L, S))
        with pytest.raises(DeviceError, match="expected query's device meta"):
            mask.prepare(L, S, device="meta")
    with pytest.raises(DeviceError, match="query_positions: expected the mask's device meta"):
        masks.causal().prepare(L, S, query_positions=torch.arange(L), device="meta")
    fixed = masks.causal().prepare(L, S, query_positions=torch.arange(L))
    with pytest.raises(DeviceError, match="expected a call on cpu"):
        clearhead.attention(*on_meta, fixed)


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", 1.5])
def test_an_unknown_device_is_refused(device: object) -> None:
    with pytest.raises(DeviceError, match="device: expected a device that this machine has"):
        masks.causal().prepare(L, S, device=device)


@pytest.mark.parametrize("arguments", [(), (masks.causal(),), (masks.causal(), 5, "", False)])
def test_the_class_is_not_called(arguments: tuple[object, ...]) -> None:
    text = "PreparedMask(...): expected a mask and the sizes of its calls, got a call of the class. Prepare a mask with"
    with pytest.raises(ArgumentError, match=re.escape(text)):
        masks.PreparedMask(*arguments)
