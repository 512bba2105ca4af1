"""Dropout: its generator's published answers, its statistics, and one mask for every kernel, block and pass."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import clearhead
from clearhead import masks
from clearhead._call.dropout import dropout_factors, philox4x32
from tests.support.attending import attend
from tests.support.closeness import require_near
from tests.support.comparing import require_half_as_good
from tests.support.native import FLOAT_SETS, SETS, needs_native, use_instruction_set
from tests.support.requests import ALL, Block, Grid, Offset, requested

OURS = pytest.mark.parametrize("kernel", ["chunked", "reference"])
WORD = 0xFFFFFFFF

WHOLE = Grid(3, 7, 89, 331, torch.device("cpu"))
#: Items, heads, queries and keys of it: several tiles of queries, more than a block of keys.
PARTS = {
    "items": (slice(1, 3), ALL, ALL, ALL),
    "heads": (ALL, slice(2, 6), ALL, ALL),
    "queries": (ALL, ALL, slice(13, 80), ALL),
    "keys": (ALL, ALL, ALL, slice(24, 283)),
    "keys from inside a group": (ALL, ALL, ALL, slice(29, 331)),
    "all": (slice(2, 3), slice(3, 5), slice(17, 89), slice(7, 210)),
    "a query": (slice(1, 2), slice(5, 7), slice(19, 20), slice(11, 20)),
}


def dropped_weights(kernel: str, query: Tensor, key: Tensor, p: float, seed: int = 5, mask: object = None) -> Tensor:
    """The weights after dropout, read off as the output for values that are the unit vectors."""
    *lead, count, _ = key.shape
    units = torch.eye(count, dtype=key.dtype).expand(*lead, count, count)
    return attend(query, key, units, mask, kernel=kernel, seed=seed, dropout_p=p)


def uniform(*shape: int) -> Tensor:
    """Queries and keys of zeros: every weight is 1/S."""
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    seed = key[0] | key[1] << 32
    signed = torch.tensor(seed - (1 << 64) if seed >= 1 << 63 else seed)
    words = philox4x32(tuple(torch.tensor(word) for word in counter), signed)
    assert tuple(int(word) for word in words) == answer


@OURS
def test_manual_seed_repeats_it_and_another_seed_does_not(kernel: str) -> None:
    x = uniform(1, 2, 17, 3)
    first, again, other = (dropped_weights(kernel, x, x, 0.5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with clearhead.use_kernel(kernel):
        drawn = [clearhead.attention(x, x, torch.ones_like(x), dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(*drawn), "two calls drop different entries"


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_independence_and_scale(p: float) -> None:
    """Of n = 2·5·101·103 draws a share p is dropped, within 4.5 standard deviations; so it is for every lag."""
    query, key = uniform(2, 5, 101, 1), uniform(2, 5, 103, 1)
    weights = dropped_weights("chunked", query, key, p) * 103
    kept = (weights > 0).double()
    torch.testing.assert_close(weights, kept.float() / (1 - p), rtol=1e-4, atol=0)
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(float(kept.mean()) - (1 - p)) < 4.5 * deviation
    centred = kept - (1 - p)
    for dim in range(4):
        for lag in (1, 2) if kept.shape[dim] > 2 else (1,):
            shifted = centred.roll(lag, dim)
            correlation = float((centred * shifted).mean()) / (p * (1 - p))
            assert abs(correlation) < 4.5 / kept.numel() ** 0.5, f"dimension {dim}, lag {lag}"


@OURS
def test_probability_zero_is_no_dropout_and_draws_nothing(kernel: str) -> None:
    x = torch.randn(2, 3, 7, 5)
    state = torch.get_rng_state()
    with clearhead.use_kernel(kernel):
        assert torch.equal(clearhead.attention(x, x, x, dropout_p=0.0), clearhead.attention(x, x, x))
    assert torch.equal(torch.get_rng_state(), state)


@OURS
def test_probability_one_drops_everything(kernel: str) -> None:
    x = torch.randn(2, 3, 7, 5, requires_grad=True)
    output = attend(x, x, x, kernel=kernel, dropout_p=1.0)
    output.sum().backward()
    assert not output.any()
    assert not x.grad.any()


@OURS
def test_lse_and_reported_weights_are_undropped(kernel: str) -> None:
    x = torch.randn(2, 3, 7, 5)
    with clearhead.use_kernel(kernel):
        _, dropped = clearhead.attention(x, x, x, dropout_p=0.5, return_lse=True)
        _, kept = clearhead.attention(x, x, x, return_lse=True)
    assert torch.equal(dropped, kept)


def part_numbers(kernel: str | None, part: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of a causal call that is a part of `WHOLE`; without a kernel by hand, in float64."""
    items, heads, rows, columns = PARTS[part]
    factors = dropout_factors(torch.tensor(42), 0.3, Block(WHOLE), torch.float64)[items, heads, rows, columns]
    batch, count, length, keys = factors.shape
    generator = torch.Generator().manual_seed(7)
    kv_heads = 2 if count % 2 == 0 else 1
    shapes = [(batch, count, length, 13), (batch, kv_heads, keys, 13), (batch, kv_heads, keys, 5)]
    rounded = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    upstream = torch.randn(batch, count, length, 5, generator=generator).to(dtype)
    query, key, value = inputs = [(x.double() if kernel is None else x).requires_grad_() for x in rounded]
    if kernel is None:
        k, v = (x.repeat_interleave(count // kv_heads, 1) for x in (key, value))
        scores = (query @ k.mT / 13**0.5).masked_fill(~torch.ones(length, keys).tril(keys - length).bool(), -torch.inf)
        output, upstream = (scores.softmax(-1) * factors) @ v, upstream.double()
    else:
        item, head, row, column = (index.start or 0 for index in PARTS[part])
        with clearhead.use_kernel(kernel):
            offset = Offset(WHOLE.num_heads, head, row, column, item)
            given = {"mask": masks.causal("bottom_right"), "dropout_p": 0.3, "seed": torch.tensor(42)}
            output = requested(*inputs, **given, offset=offset).output
    found = torch.autograd.grad(output, inputs, upstream)
    return {"output": output.detach(), **dict(zip(("query", "key", "value"), found, strict=True))}


@pytest.mark.parametrize("kernel", [pytest.param("native", marks=needs_native), "chunked", "reference"])
def test_calls_in_turn_drop_by_their_place_and_their_seed(kernel: str) -> None:
    """Parts of a larger call, one after another, by cached plans."""
    query, key = torch.randn(2, 6, 5, 7), torch.randn(2, 6, 19, 7)
    units = torch.eye(19).expand(2, 6, 19, 19)  # outputs are the weights that are left

    def dropped(seed: int, heads: slice, rows: slice) -> Tensor:
        part, offset = (query[:, heads, rows], key[:, heads], units[:, heads]), Offset(6, heads.start, rows.start)
        return requested(*part, dropout_p=0.4, seed=torch.tensor(seed), offset=offset).output

    with clearhead.use_kernel(kernel):
        whole = {seed: dropped(seed, slice(0, 6), slice(0, 5)) for seed in (3, 20170612 << 8)}
        assert not torch.equal(*(output == 0 for output in whole.values()))
        for pair in itertools.permutations([(0, 0, 3), (3, 0, 3), (2, 2, 3), (3, 2, 20170612 << 8), (0, 1, 3)], 2):
            for head, row, seed in (*pair, *pair):
                places = slice(head, head + 3), slice(row, row + 3)
                torch.testing.assert_close(dropped(seed, *places), whole[seed][:, *places], rtol=1e-5, atol=1e-6)


def test_a_kernel_that_draws_its_own_dropout_refuses_a_seed() -> None:
    x = torch.randn(2, 6, 5, 11)
    with clearhead.use_kernel("sdpa"), pytest.raises(clearhead.errors.KernelError, match="different weights"):
        requested(x, x, x, dropout_p=0.5, seed=torch.tensor(3))


#: Kernels, dtypes, and instruction sets or other settings.
RUNS = [
    *((kernel, torch.float32, "") for kernel in ("chunked", "reference")),
    ("chunked", torch.float32, "small blocks"),
    *(("native", torch.float32, instructions) for instructions in FLOAT_SETS),
    *(("native", torch.bfloat16, instructions) for instructions in SETS),
]


@pytest.mark.parametrize(("kernel", "dtype", "setting"), RUNS, ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_drops_what_the_whole_drops(
    part: str, kernel: str, dtype: torch.dtype, setting: str, request: pytest.FixtureRequest
) -> None:
    if setting == "small blocks":
        request.getfixturevalue("small_blocks")
    with use_instruction_set(setting) if kernel == "native" else nullcontext():
        result = part_numbers(kernel, part, dtype)
    exact = part_numbers(None, part, dtype)
    if dtype == torch.float32:
        require_near(result, exact, together=True)
    else:
        require_half_as_good(result, part_numbers("reference", part, dtype), exact, dtype)


@needs_native
def test_second_derivatives_under_a_mode_follow_the_seed() -> None:
    """Under a mode `native` is an operator, and drops by the seed of the call as without one."""
    x = torch.randn(1, 2, 5, 8, requires_grad=True)

    def second(mode: AbstractContextManager[object]) -> Tensor:
        torch.manual_seed(0)
        with mode:
            output = clearhead.attention(x, x, x, dropout_p=0.3)
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(second(FlopCounterMode(display=False)), second(nullcontext()))
