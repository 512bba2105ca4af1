"""Disentangled attention by the native kernel, compared with the formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from clearhead._call.sequences import PackedSequences
from clearhead._native import instruction_sets
from clearhead.kernels import _disentangled
from clearhead.kernels._disentangled import BUILT, disentangled_attention
from clearhead.kernels._distance_buckets import DistanceBuckets, distance_buckets, reach_of

pytestmark = pytest.mark.skipif(not BUILT, reason="the kernel was not built")

BATCH, HEADS, FEATURES, VALUES = 2, 3, 11, 13
SCALE = 0.21


class Sizes(NamedTuple):
    """Sizes of a call, and the distances up to `span` with buckets of their own, then `step` distances to a bucket."""

    rows: int
    keys: int
    span: int = 5
    step: float = 3


def buckets_of(sizes: Sizes) -> DistanceBuckets:
    """Buckets that rise by one up to the span, then by 1 / step, and end at twice the span."""
    reach = reach_of(max(sizes.rows, sizes.keys))
    distances = torch.arange(-reach, reach + 1, dtype=torch.float64)
    beyond = (distances.abs() - sizes.span).clamp_min(0) / sizes.step
    buckets = distances.sign() * (distances.abs().clamp_max(sizes.span) + beyond.ceil()).clamp_max(2 * sizes.span)
    return distance_buckets((buckets - buckets[0]).long())


def expected_output(
    inputs: list[Any], buckets: DistanceBuckets, visible: Tensor | None, bounds: list[int] | None
) -> Tensor:
    """The formula with the bucket of each pair, each sequence by itself."""
    query, key, value, of_queries, of_keys = inputs
    if bounds is not None:
        parts = [slice(*pair) for pair in pairwise(bounds)]
        each = [[x[:, :, part] for x in (query, key, value)] for part in parts]
        return torch.cat([expected_output([*x, of_queries, of_keys], buckets, None, None) for x in each], 2)
    places = buckets.matrix(query.shape[2], key.shape[2])
    scores = torch.einsum("bhid,bhjd->bhij", query, key)
    if of_queries is not None:
        scores = scores + torch.einsum("bhid,hijd->bhij", query, of_queries[:, places])
    if of_keys is not None:
        scores = scores + torch.einsum("bhjd,hijd->bhij", key, of_keys[:, places])
    scores = scores * SCALE
    if visible is None:
        return scores.softmax(-1) @ value
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.where(visible.any(-1, keepdim=True), weights, 0).nan_to_num() @ value


def inputs_of(sizes: Sizes, sides: str = "both", batch: int = BATCH) -> list[Tensor | None]:
    count = buckets_of(sizes).count

    def heads(length: int, features: int) -> Tensor:
        return torch.randn(batch, length, HEADS, features, dtype=torch.float64).transpose(1, 2)

    vectors = [torch.randn(HEADS, count, FEATURES, dtype=torch.float64) if sides in ("both", s) else None for s in "qk"]
    return [heads(sizes.rows, FEATURES), heads(sizes.keys, FEATURES), heads(sizes.keys, VALUES), *vectors]


def require_agreement(
    sizes: Sizes, inputs: list[Tensor | None], visible: Tensor | None = None, bounds: list[int] | None = None
) -> None:
    """Outputs and gradients of the kernel are those of the formula in float64."""
    buckets, results = buckets_of(sizes), []
    for dtype in (torch.float64, torch.float32):
        leaves = [None if x is None else x.to(dtype).requires_grad_() for x in inputs]
        if dtype is torch.float64:
            output = expected_output(leaves, buckets, visible, bounds)
            direction = torch.randn_like(output)
        else:
            sequences = None if bounds is None else packed(bounds)
            query, key, value, *vectors = leaves
            output = disentangled_attention(
                query, key, value, *vectors, buckets, scale=SCALE, visible=visible, sequences=sequences
            )
        wanted = [x for x in leaves if x is not None]
        results.append([output, *torch.autograd.grad(output, wanted, direction.to(dtype))])
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max().clamp_min(1e-3)


def packed(bounds: list[int]) -> PackedSequences:
    starts = torch.tensor(bounds)
    return PackedSequences(starts, starts, tuple(bounds), tuple(bounds), (bounds[-1], bounds[-1]))


SIZES = {
    "one token": Sizes(1, 1),
    "within a vector": Sizes(7, 7),
    "a tile and a bit": Sizes(53, 53),
    "several blocks": Sizes(307, 307, 29),
    "far beyond the buckets": Sizes(401, 401, 3, 2),
    "more queries": Sizes(149, 37),
    "more keys": Sizes(37, 149),
    "a bucket for each distance": Sizes(67, 67, 80),
    "buckets that are left out": Sizes(131, 131, 17, 0.6),
}


@pytest.mark.parametrize("isa", ["best", "avx2", "generic"])
@pytest.mark.parametrize("name", SIZES)
def test_outputs_and_gradients(name: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa != "best":
        if isa not in instruction_sets():
            pytest.skip("this processor does not have the instructions")
        monkeypatch.setattr(_disentangled, "instruction_set_number", lambda: instruction_sets()[isa])
    require_agreement(SIZES[name], inputs_of(SIZES[name]))


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("name", ["several blocks", "far beyond the buckets"])
def test_vectors_of_one_side(name: str, side: str) -> None:
    require_agreement(SIZES[name], inputs_of(SIZES[name], side))


MASKS: dict[str, Callable[[int], Tensor]] = {
    "padding": lambda length: (torch.arange(length) < torch.tensor([[length], [5]]))[:, None, None],
    "an empty item": lambda length: torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, length),
    "pairs": lambda length: torch.rand(BATCH, 1, length, length) < 0.3,
}


@pytest.mark.parametrize("mask", MASKS)
def test_masked_keys(mask: str) -> None:
    sizes = Sizes(101, 101, 7)
    require_agreement(sizes, inputs_of(sizes), MASKS[mask](101))


@pytest.mark.parametrize("lengths", [[5, 61, 1, 31], [131], [3] * 17])
def test_packed_sequences(lengths: list[int]) -> None:
    bounds = list(accumulate(lengths, initial=0))
    sizes = Sizes(bounds[-1], bounds[-1], 7)
    require_agreement(sizes, inputs_of(sizes, batch=1), bounds=bounds)


def test_as_many_groups_of_items_as_threads_need() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        sizes = Sizes(29, 29)
        require_agreement(sizes, inputs_of(sizes, batch=7))
    finally:
        torch.set_num_threads(threads)


def test_nan_in_padding_reaches_nothing() -> None:
    sizes, visible = Sizes(43, 43), torch.ones(BATCH, 1, 1, 43, dtype=torch.bool)
    visible[1, ..., 17:] = False
    inputs = [None if x is None else x.float() for x in inputs_of(sizes)]
    results: list[list[Tensor]] = []
    for filling in (0.0, torch.nan):
        leaves: Any = [x.clone() for x in inputs if x is not None]
        for x in leaves[1:3]:
            x[1, :, 17:] = filling
        leaves = [x.requires_grad_() for x in leaves]
        output = disentangled_attention(*leaves, buckets_of(sizes), scale=SCALE, visible=visible)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("bounds", [None, [0, 11, 19, 47]])
def test_dropout_is_that_of_the_formula(bounds: list[int] | None) -> None:
    sizes = Sizes(47, 47)
    results: list[list[Tensor]] = []
    inputs = inputs_of(sizes, batch=BATCH if bounds is None else 1)
    for dtype in (torch.float64, torch.float32):  # float64 goes through PyTorch's operations
        torch.manual_seed(3)
        leaves: Any = [x.to(dtype).requires_grad_() for x in inputs if x is not None]
        sequences = None if bounds is None else packed(bounds)
        output = disentangled_attention(*leaves, buckets_of(sizes), scale=SCALE, sequences=sequences, dropout_p=0.3)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    undropped = disentangled_attention(*leaves, buckets_of(sizes), scale=SCALE, sequences=sequences)
    assert (undropped - results[1][0]).abs().max() > 0.1
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_second_derivatives() -> None:
    sizes = Sizes(9, 9)
    results: list[list[Tensor]] = []
    inputs = inputs_of(sizes)
    for dtype in (torch.float64, torch.float32):
        leaves: Any = [x.to(dtype).requires_grad_() for x in inputs if x is not None]
        output = disentangled_attention(*leaves, buckets_of(sizes), scale=SCALE)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        results.append(list(torch.autograd.grad(sum(x.square().sum() for x in first), leaves)))
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_saved_tensors_may_come_back_with_other_strides() -> None:
    sizes = Sizes(31, 31)
    leaves: Any = [x.float().requires_grad_() for x in inputs_of(sizes) if x is not None]
    gradients: list[Any] = []
    for unpack in (lambda x: x, lambda x: x.contiguous()):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), unpack):
            output = disentangled_attention(*leaves, buckets_of(sizes), scale=SCALE)
        gradients.append(torch.autograd.grad(output.square().sum(), leaves))
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_numbers_of_scores_are_never_in_memory() -> None:
    from torch.profiler import ProfilerActivity, profile

    sizes = Sizes(1024, 1024, 8)
    leaves: Any = [x.float().requires_grad_() for x in inputs_of(sizes) if x is not None]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        disentangled_attention(*leaves, buckets_of(sizes), scale=SCALE).sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profiled.events() or [])
    assert 0 < largest < 4 * BATCH * HEADS * 1024 * 128
