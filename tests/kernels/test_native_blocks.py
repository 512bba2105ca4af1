"""The native kernel on calls of many tiles and blocks, against `reference` in float64, on every instruction set."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import clearhead
from clearhead import masks
from tests.support.comparing import require_half_as_good
from tests.support.native import SETS, needs_native, threads
from tests.support.native_cases import CASES, Case, Make, close_to_exact, exact_numbers, numbers

LONG = Case(kv_heads=2, length=197, count=1217, dim=64, value_dim=96, mask=lambda *_: masks.causal("bottom_right"))
HEADS = [(item, head) for item in range(2) for head in range(3)]

#: Shapes of a bias that learns, and what is beside it: rows that see nothing, keys that an item hides, another bias.
SHAPES = {"(1, H, L, S)": (1, 6, 101, 151), "(B, H, L, S)": (2, 6, 101, 151), "(B·H, L, S)": (12, 101, 151)}
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "masks": {
        "mask": lambda b, h, n, s: (
            masks.causal("bottom_right")
            & masks.keep(keys=torch.arange(s)[None] < torch.tensor([[s], [97]]))
            & masks.bias(torch.linspace(-1, 1, b * s).view(b, 1, 1, s))
        )
    },
    "soft-cap": {"options": {"softcap": 0.7}},
    "dropout": {"options": {"dropout_p": 0.3}},
}
LEARNT = {
    f"learnt bias {shape} beside {beside}": Case(
        kv_heads=2, group=3, length=101, count=151, dim=7, value_dim=5, learnt=SHAPES[shape], **BESIDE[beside]
    )
    for shape in SHAPES
    for beside in BESIDE
}
LEARNT_ALONE = LEARNT["learnt bias (1, H, L, S) beside nothing"]

#: Beyond the length from which the backward pass takes the keys in parts, and no multiple of a part.
MANY = 4099


def scattered(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5))


#: Few query rows, for which the kernel walks along keys and values instead of cutting them into tiles.
MANY_KEYS: dict[str, Case] = {
    "one query of many keys": Case(length=1, group=1, count=MANY),
    "heads that share keys": Case(length=3, group=5, kv_heads=3, batch=1, count=MANY),
    "few rows, causal": Case(length=7, count=MANY, mask=lambda *_: masks.causal("bottom_right")),
    "keys that nobody sees": Case(length=11, count=MANY, mask=lambda *_: masks.causal()),
    "few rows, window": Case(
        length=7, count=MANY, mask=lambda *_: masks.sliding_window(1031, 5), options={"query_positions": 3001}
    ),
    "few rows, lengths": Case(length=5, count=MANY, mask=lambda *_: masks.lengths(torch.tensor([MANY, 2053]))),
    "few rows, bool": Case(length=5, count=MANY, mask=lambda b, h, n, s: masks.keep(scattered(b, h, n, s) < 0.7)),
    "few rows, bias": Case(length=3, count=MANY, mask=lambda b, h, n, s: masks.bias(scattered(h, n, s))),
    "few rows, soft-cap and sinks": Case(length=3, count=MANY, options={"softcap": 2.0}, sinks=True),
    "few rows of one head": Case(length=3, batch=1, count=MANY),
}


def heads_apart(first_head: bool) -> Make:
    """The first head sees all keys, or none; each other head sees other keys."""

    def make(b: int, h: int, n: int, s: int) -> masks.Mask:
        visible = torch.arange(s) % torch.arange(2, h + 2)[:, None] == 0  # (H, S)
        visible[0] = first_head
        return masks.keep(visible[None, :, None].expand(b, h, n, s))

    return make


HEADS_APART = {
    f"{length} rows of heads that see other keys, the first {first}": Case(
        group=6, length=length, count=131, dim=8, value_dim=8, mask=heads_apart(first == "everything")
    )
    for length in (1, 3)
    for first in ("everything", "nothing")
}
ALL = CASES | LEARNT | MANY_KEYS | HEADS_APART

pytestmark = needs_native


@pytest.fixture(name="several_threads", params=[1, 3])
def _several_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with threads(request.param):
        yield


@pytest.mark.parametrize("name", ALL)
def test_close_to_exact(name: str, instructions: str) -> None:
    close_to_exact(ALL[name], "native")


ON_THREADS = ["plain", "causal", "one query", "one query of many heads", "bias per item", "bias that hides"]


@pytest.mark.parametrize("name", [*ON_THREADS, "everything", "few rows of one head"])
def test_on_several_threads(name: str, several_threads: None) -> None:
    close_to_exact(ALL[name], "native")


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


HALVES = {name: (case, torch.bfloat16) for name, case in (CASES | LEARNT | {"long": LONG}).items()}
HALVES["float16"] = (Case(mask=lambda *_: masks.sliding_window(77, 3), value_dim=19), torch.float16)


@pytest.mark.parametrize(("case", "dtype"), HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("instructions", SETS, indirect=True)
def test_half_precision_is_as_good_as_reference(case: Case, dtype: torch.dtype, instructions: str) -> None:
    """Whole tiles of 32 and 64 numbers as well as sizes that fit nothing."""
    found = numbers(case, "native", case.inputs(dtype))
    require_half_as_good(found, reference_numbers(case, dtype), exact_numbers(case, dtype), dtype)


@functools.lru_cache(maxsize=256)
def reference_numbers(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return numbers(case, "reference", case.inputs(dtype))


@pytest.mark.parametrize("count", [2, 3])
def test_threads_add_up_a_learnt_bias_in_one_order(count: int) -> None:
    with threads(count):
        close_to_exact(LEARNT_ALONE, "native")
        found = [numbers(LEARNT_ALONE, "native", LEARNT_ALONE.inputs())["bias"] for _ in range(5)]
    assert all(torch.equal(found[0], other) for other in found)


def test_a_bias_that_hides_gets_no_gradient_there() -> None:
    inputs = LEARNT_ALONE.inputs()
    hidden = torch.zeros(inputs["bias"].shape, dtype=torch.bool)
    hidden[:, :, 3:50, 20:] = hidden[:, :, 60] = True
    inputs["bias"] = inputs["bias"].detach().masked_fill(hidden, -torch.inf).requires_grad_()
    found = numbers(LEARNT_ALONE, "native", inputs)
    exact = numbers(
        LEARNT_ALONE, "reference", {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    )
    assert not found["bias"][hidden].any()
    for name in ("output", *inputs):
        assert (found[name] - exact[name]).abs().max() <= 1e-5 * max(1.0, float(exact[name].abs().max())), name


@pytest.mark.parametrize("shape", [(101, 151), (1, 6, 1, 151), (2, 1, 101, 151)], ids=str)
def test_a_bias_that_is_summed_in_other_ways_goes_elsewhere(shape: tuple[int, ...]) -> None:
    x, y = torch.randn(2, 6, 101, 7), torch.randn(2, 6, 151, 7)
    learnt = torch.zeros(shape, requires_grad=True)
    chosen = clearhead.explain(x, y, y, masks.bias(learnt))
    assert chosen.kernel != "native"
    assert chosen.reasons["native"] == ("it gives a gradient for one bias (1 or B, H, L, S) only, and none in a graph",)
    assert clearhead.explain(x, y, y, masks.bias(learnt.detach())).kernel == "native"


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


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_key_of_nan_that_a_bias_hides_from_some_rows(number: float) -> None:
    """The first query sees the key, and no other query does."""
    query, key, value = (torch.randn(2, heads, length, 8) for heads, length in ((6, 5), (1, 131), (1, 131)))
    key[:, :, -1] = 0
    bias = torch.linspace(-1, 1, 131).repeat(5, 1)
    bias[1:, -1] = float("-inf")
    with clearhead.use_kernel("reference"):
        expected = clearhead.attention(query.double(), key.double(), value.double(), masks.bias(bias))
    key[:, :, -1] = number
    with clearhead.use_kernel("native"):
        found = clearhead.attention(query, key, value, masks.bias(bias))
    torch.testing.assert_close(found[:, :, 1:].double(), expected[:, :, 1:], rtol=0, atol=1e-6)
    assert not found[:, :, 0].isfinite().any()


@pytest.mark.parametrize("dim", [13, 80, 131])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 11, 12, 13])
def test_any_number_of_rows(length: int, dim: int, instructions: str) -> None:
    close_to_exact(Case(length=length, group=1, count=67, dim=dim, value_dim=dim), "native")
