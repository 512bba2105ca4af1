"""The native kernel on calls of many tiles and blocks, against `reference` in float64, on every instruction set."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

import clearhead
from clearhead import masks
from tests.support.comparing import require_half_as_good
from tests.support.native import needs_native, threads
from tests.support.native_cases import CASES, Case, close_to_exact, exact_numbers, numbers

LONG = Case(kv_heads=2, length=197, count=1217, dim=64, value_dim=96, mask=lambda *_: masks.causal("bottom_right"))
HEADS = [(item, head) for item in range(2) for head in range(3)]

pytestmark = needs_native


@pytest.fixture(name="several_threads", params=[1, 3])
def _several_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with threads(request.param):
        yield


@pytest.mark.parametrize("name", CASES)
def test_close_to_exact(name: str, instructions: str) -> None:
    close_to_exact(CASES[name], "native")


@pytest.mark.parametrize(
    "name",
    ["plain", "causal", "one query", "one query of many heads", "bias per item", "bias that hides", "everything"],
)
def test_on_several_threads(name: str, several_threads: None) -> None:
    close_to_exact(CASES[name], "native")


@pytest.mark.parametrize(
    ("length", "count"), [(1009, 1013), (397, 11003)], ids=["laid out in turns", "a few rows at a time"]
)
def test_a_mask_too_large_to_be_laid_out_at_once(length: int, count: int, several_threads: None) -> None:
    generator = torch.Generator().manual_seed(13)
    added = torch.randn(length, count, generator=generator)
    added[added < -1] = -torch.inf
    sizes = {"batch": 1, "kv_heads": 2, "group": 1, "length": length, "count": count, "dim": 5, "value_dim": 3}
    close_to_exact(Case(**sizes, mask=lambda *_: masks.bias(added)), "native")


def test_a_mask_hides_alike_in_however_many_heads() -> None:
    """Whether its masks are laid out for several heads or looked at by one must not change a bit."""
    query, key = torch.randn(2, 3, 227, 5), torch.randn(2, 3, 331, 5)
    mask = masks.keep(torch.rand(227, 331) > 0.5) & masks.bias(torch.randn(227, 331))
    with clearhead.use_kernel("native"):
        whole = clearhead.attention(query, key, key, mask)
        single = [clearhead.attention(query[i, h, None], key[i, h, None], key[i, h, None], mask) for i, h in HEADS]
    assert all(torch.equal(whole[i, h], found[0]) for (i, h), found in zip(HEADS, single, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_do_not_depend_on_the_threads(dtype: torch.dtype) -> None:
    """Where every thread gets as many key/value heads as every other; dropout does not depend on them either."""
    case, found = Case(kv_heads=2, mask=lambda *_: masks.causal("bottom_right"), options={"dropout_p": 0.3}), []
    for count in (1, 2, 4, 2):
        with threads(count):
            found.append(numbers(case, "native", case.inputs(dtype)))
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


HALVES = {name: (case, torch.bfloat16) for name, case in (CASES | {"long": LONG}).items()}
HALVES["float16"] = (Case(mask=lambda *_: masks.sliding_window(77, 3), value_dim=19), torch.float16)


@pytest.mark.parametrize(("case", "dtype"), HALVES.values(), ids=HALVES)
def test_half_precision_is_as_good_as_reference(case: Case, dtype: torch.dtype, instructions: str) -> None:
    """Whole tiles of 32 and 64 numbers as well as sizes that fit nothing."""
    found = numbers(case, "native", case.inputs(dtype))
    require_half_as_good(found, reference_numbers(case, dtype), exact_numbers(case, dtype), dtype)


@functools.lru_cache(maxsize=256)
def reference_numbers(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return numbers(case, "reference", case.inputs(dtype))


def test_a_nan_that_is_seen_is_not_hidden(instructions: str) -> None:
    query, key, value = (torch.randn(1, 1, 67, 5) for _ in range(3))
    key[0, 0, 50, 2] = torch.nan
    with clearhead.use_kernel("native"):
        output, lse = clearhead.attention(query, key, value, masks.causal(), return_lse=True)
    assert output[0, 0, :50].isfinite().all()
    assert output[0, 0, 50:].isnan().all()
    assert lse[0, 0, 50:].isnan().all()


def test_heads_last_stay_last_and_features_may_come_first() -> None:
    inputs = [torch.randn(2, 101, 3, 7).transpose(1, 2) for _ in range(3)]
    with clearhead.use_kernel("native"):
        output = clearhead.attention(*inputs)
        assert output.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(clearhead.attention(*(x.mT.contiguous().mT for x in inputs)), output)
