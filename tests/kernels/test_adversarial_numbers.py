"""Errors do not grow with the length: every kernel of ours on inputs whose rounding errors add up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead
from clearhead import masks
from tests.support.comparing import require_half_as_good
from tests.support.native import FLOAT_SETS, SETS, needs_native, on_every_set, use_instruction_set
from tests.support.native_cases import Case, close_to_exact

from .adversarial import KEYS, SCALES, VALUES, Adversary, exact_numbers, numbers, reference_numbers, require_accurate

#: Rows and keys: few and many of either, those of decoding, tiles and blocks that are not full.
SIZES = [(61, 129), (64, 2053), (49, 8209), (13, 8192), (3, 8192), (1, 32768), (8209, 61)]
LONG = [(49, 32768), (12, 32768), (32768, 61)]
LONGEST = [(17, 131072), (2, 131072), (131072, 13)]


#: For `on_every_set`: which kernels run everything, and which run every case once.
KERNELS = ("kernel", ("chunked", *FLOAT_SETS[:1]), FLOAT_SETS[1:])
HALF_KERNELS = ("kernel", ("chunked", *SETS[:1]), SETS[1:])


@pytest.fixture(name="kernel", params=["chunked", *FLOAT_SETS])
def _kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """`chunked`, and `native` on each instruction set of this machine."""
    if request.param == "chunked":
        yield "chunked"
        return
    with use_instruction_set(request.param):
        yield "native"


def compare(case: Adversary, kernel: str) -> None:
    require_accurate(case, numbers(case, kernel, torch.float32))


def cases(sizes: list[tuple[int, int]]) -> st.SearchStrategy[Adversary]:
    heads = st.sampled_from([(1, 1), (3, 1), (4, 2)])
    return st.builds(
        lambda keys, values, upstream, size, scale, dim, heads: Adversary(
            keys, values, *size, scale, upstream, dim, 1, *(heads if size[0] * size[1] < 1 << 18 else (1, 1))
        ),
        st.sampled_from(sorted(KEYS)),
        st.sampled_from(sorted(VALUES)),
        st.sampled_from(sorted(VALUES)),
        st.sampled_from(sizes),
        st.sampled_from(SCALES),
        st.sampled_from([7, 16, 64]),
        heads,
    )


def test_drawn_calls(kernel: str) -> None:
    @settings(max_examples=settings.default.max_examples // 2)
    @given(cases(SIZES))
    def check(case: Adversary) -> None:
        compare(case, kernel)

    check()


@pytest.mark.parametrize("dim", [7, 64])
def test_few_queries_and_nearly_equal_weights(dim: int, kernel: str) -> None:
    """Every addition of a value to an output is rounded alike."""
    compare(Adversary("rising", "equal", 3, 8192, 1e-4, upstream="equal", dim=dim), kernel)


@on_every_set({"keys": KEYS}, {"size": LONG}, *KERNELS)
def test_long_calls(keys: str, size: tuple[int, int], kernel: str) -> None:
    values = sorted(VALUES)[sorted(KEYS).index(keys) % len(VALUES)]
    compare(Adversary(keys, values, *size, 1e-2 if keys == "normal" else 1.0, upstream="of one sign"), kernel)


@pytest.mark.parametrize("size", LONGEST, ids=str)
def test_longest_calls(size: tuple[int, int], kernel: str) -> None:
    compare(Adversary("equal", "equal", *size, upstream="equal"), kernel)


@on_every_set(
    {"keys": KEYS, "dtype": [torch.bfloat16, torch.float16]},
    {"size": [(49, 8209), (3, 8192), (2053, 61)]},
    *HALF_KERNELS,
)
def test_half_precision(keys: str, size: tuple[int, int], dtype: torch.dtype, kernel: str) -> None:
    case = Adversary(keys, "of one sign", *size)
    found = numbers(case, kernel, dtype)
    require_half_as_good(found, reference_numbers(case, dtype), exact_numbers(case, dtype), dtype)


@needs_native
def test_bias_that_a_long_batch_shares() -> None:
    """Gradients of a bias are summed over items, those of sinks over items and queries."""
    batch = 523
    bias = torch.zeros(1, 1, 3, 5, requires_grad=True)
    query, key = (torch.ones(batch, 1, n, 4) for n in (3, 5))
    value = torch.arange(5.0)[:, None].expand(batch, 1, 5, 4).contiguous()
    sinks = torch.zeros(1, requires_grad=True)

    def gradients(kernel: str, dtype: torch.dtype) -> list[torch.Tensor]:
        with clearhead.use_kernel(kernel):
            inputs = [x.detach().to(dtype).requires_grad_() for x in (bias, sinks)]
            output = clearhead.attention(
                query.to(dtype), key.to(dtype), value.to(dtype), masks.bias(inputs[0]), sinks=inputs[1]
            )
        return list(torch.autograd.grad((0.1 * output).sum(), inputs))

    for found, exact in zip(gradients("native", torch.float32), gradients("reference", torch.float64), strict=True):
        assert (found.double() - exact).abs().max() <= 1e-6 * exact.abs().max()


@needs_native
def test_masks_and_runs_of_keys(instructions: str) -> None:
    """Totals of runs are scaled to new peaks, and skip what no query of a tile sees."""
    close_to_exact(
        Case(
            batch=1,
            group=1,
            length=53,
            count=9001,
            mask=lambda *_: masks.causal("bottom_right") & masks.sliding_window(8000, 0),
        ),
        "native",
    )
