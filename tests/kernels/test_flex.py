"""FlexAttention where PyTorch supports it: what it computes, and its reasons against everything else.

Compiling a kind of call takes ten seconds and more, so calls here share their kinds: six heads of eight numbers on two
key/value heads, more than one item and block.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._dynamo.utils import counters

import clearhead
from clearhead import masks
from clearhead.kernels import _flex_blocks as flex_blocks
from clearhead.kernels import _flex_rule as flex_rule
from clearhead.kernels._flex_blocks import FlexMask, lower_blocks
from clearhead.kernels._flex_rule import is_visible
from clearhead.masks import Mask
from clearhead.masks._documents import Documents
from clearhead.masks._structure import Structure
from clearhead.positions import ALiBi
from tests.masks.test_coverage import cases, visible
from tests.support.attending import attend
from tests.support.forgetting import forget
from tests.support.requests import BoundMask, Grid

HEADS, KV_HEADS, DIM = 6, 2, 8
X = torch.randn(2, HEADS, 7, DIM, generator=torch.Generator().manual_seed(1))

runs_here = pytest.mark.skipif(
    bool(clearhead.explain(X, X, X).reasons["flex"]), reason="FlexAttention cannot be built on this machine"
)

MASKS = {
    "none": None,
    "causal": masks.causal(),
    "bottom right": masks.causal("bottom_right"),
    "window": masks.sliding_window(41, 3),
    "causal window": masks.causal() & masks.sliding_window(41, 0),
    "prefix": masks.prefix(77),
    "every key masked": masks.prefix(0),
    # Not bands:
    "prefix or causal": masks.causal() | masks.prefix(77),
    "an empty item": masks.lengths(torch.tensor([0, 211])),
    "other lengths": masks.lengths(torch.tensor([389, 211])) & masks.causal(),
    "padding": masks.keep(keys=torch.rand(2, 389, generator=torch.Generator().manual_seed(2)) > 0.5),
    "predicate": masks.mask_mod(lambda b, h, q, k: (q + k + b + h) % 3 != 0),
    "all but some": ~masks.sliding_window(100, 100),
}


@pytest.fixture(autouse=True, scope="module")
def _own_compilations() -> Iterator[None]:
    """Other files reset the compiler, which would leave copies here that are compiled again and again."""
    torch._dynamo.reset()
    forget()
    yield
    forget()


def qkv(batch: int = 2, length: int = 307, count: int = 389) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(batch, HEADS, length, DIM),
        torch.randn(batch, KV_HEADS, count, DIM),
        torch.randn(batch, KV_HEADS, count, DIM),
    )


def expected(*inputs: Tensor, **options: object) -> Tensor:
    return attend(*(tensor.double() for tensor in inputs), kernel="reference", **options)


def require_equal(*inputs: Tensor, **options: object) -> None:
    exact, found = expected(*inputs, **options), attend(*inputs, kernel="flex", **options)
    assert found.dtype == inputs[0].dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5 * max(1.0, float(exact.abs().max())))


@runs_here
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    require_equal(*qkv(), mask=MASKS[name])


@runs_here
def test_a_soft_cap_and_a_bias() -> None:
    bias = masks.bias(torch.randn(307, 389))
    require_equal(*qkv(), mask=bias & masks.lengths(torch.tensor([389, 211])), softcap=2.0)
    hiding = torch.randn(307, 389).masked_fill(torch.rand(307, 389) < 0.3, -torch.inf)
    hiding[5] = -torch.inf
    require_equal(*qkv(), mask=masks.bias(hiding) & masks.bias(torch.randn(1, 389)), softcap=2.0)


@runs_here
def test_rows_that_see_nothing_are_zero_and_padding_does_not_leak() -> None:
    query, key, value = qkv()
    mask = masks.lengths(torch.tensor([0, 211]))
    exact = expected(query, key, value, mask=mask)
    key[0], value[0], key[1, :, 211:], value[1, :, 211:] = torch.nan, torch.inf, torch.inf, torch.nan
    query[0] = torch.nan
    found = attend(query, key, value, mask=mask, kernel="flex")
    assert not found[0].any()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


@runs_here
def test_positions_and_inputs_laid_out_otherwise() -> None:
    query, key, value = qkv()
    query, key = query.transpose(1, 2).contiguous().transpose(1, 2), key.mT.contiguous().mT
    require_equal(query, key, value, mask=masks.causal(), query_positions=82)
    places = torch.randperm(389)
    require_equal(query, key, value, mask=masks.causal(), query_positions=82, key_positions=places)
    alone = attend(query[1], key[1], value[1], mask=masks.causal(), kernel="flex")
    torch.testing.assert_close(alone, attend(query, key, value, mask=masks.causal(), kernel="flex")[1])


@runs_here
def test_one_kind_is_compiled_once_for_all_sizes_and_numbers() -> None:
    attend(*qkv(), mask=masks.causal(), kernel="flex")
    before = counters["stats"]["unique_graphs"]
    for batch, length, count in [(3, 211, 401), (5, 499, 499), (2, 149, 157), (6, 256, 1024)]:
        for mask in (masks.causal(), masks.sliding_window(length // 3, 5), masks.prefix(count - 20), None):
            require_equal(*qkv(batch, length, count), mask=mask)
    assert counters["stats"]["unique_graphs"] == before


@runs_here
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1, 389), (2, 1, 1), (1, 5, 7), (3, 128, 128), (1, 129, 1)], ids=str)
def test_sizes_of_one_and_of_one_block(sizes: tuple[int, int, int]) -> None:
    require_equal(*qkv(*sizes), mask=masks.causal())
    require_equal(*qkv(*sizes), mask=masks.mask_mod(lambda b, h, q, k: (q + k + b + h) % 3 != 0))


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (torch.float64, "it computes in float32, not in float64"),
        (torch.bfloat16, "on the CPU it rounds weights to half precision, which can more than double the error"),
    ],
    ids=str,
)
def test_reasons_of_a_dtype(dtype: torch.dtype, reason: str) -> None:
    x = X.to(dtype)
    assert clearhead.explain(x, x, x).reasons["flex"] == (reason,)


def test_reasons_of_gradients_sizes_and_biases() -> None:
    x = X.clone().requires_grad_()
    assert clearhead.explain(x, X, X).reasons["flex"] == ("it has no backward on the CPU",)
    with torch.no_grad():
        assert clearhead.explain(x, X, X).reasons["flex"] == ()
    assert clearhead.explain(X[:, :, :0], X, X).reasons["flex"] == ("a size is 0",)
    computed = "a computed bias would have to be built whole, (B, H, L, S)"
    assert clearhead.explain(X, X, X, ALiBi(HEADS)).reasons["flex"] == (computed,)


def test_reasons_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        assert clearhead.explain(X, X, X).reasons["flex"] == ("there is no C++ compiler to build it with",)
    monkeypatch.setattr("clearhead.kernels._flex.has_avx2", lambda: False)
    (reason,) = clearhead.explain(X, X, X).reasons["flex"]
    assert reason == "PyTorch builds it for x86 processors with AVX2 alone, on Linux and Windows"


def test_reasons_of_a_device() -> None:
    x = X.to("meta")
    assert "PyTorch has it for CPUs and CUDA devices only" in clearhead.explain(x, x, x).reasons["flex"]


@runs_here
def test_it_takes_no_part_in_a_graph() -> None:
    with clearhead.use_kernel("flex"), pytest.raises(Exception, match="it fits into graphs of "):
        torch.compile(lambda x: clearhead.attention(x, x, x), backend="eager", fullgraph=True)(X)


# What FlexAttention is told about a mask: the blocks that are computed, and the rule inside them.


CPU = torch.device("cpu")


def rule(blocks: FlexMask, grid: Grid) -> Tensor:
    """What the rule says of every cell, (1 or B, 1 or H, L, S)."""
    i, j = torch.arange(grid.query_length)[:, None], torch.arange(grid.key_length)
    b, h = torch.arange(grid.batch_size)[:, None, None, None], torch.arange(grid.num_heads)[:, None, None]
    return is_visible(blocks.rule, blocks.limits, b, h, i, j)


def spread(blocks: Tensor, grid: Grid, side: int) -> Tensor:
    """Every block's mark on all its cells."""
    cells = blocks.repeat_interleave(side, -2).repeat_interleave(side, -1)
    return cells[..., : grid.query_length, : grid.key_length]


@contextmanager
def blocks_of(side: int) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (flex_blocks, flex_rule):
            patch.setattr(module, "SIDE", side)
        yield


@pytest.mark.parametrize("side", [1, 2, 3, 5, 16])
def test_blocks_and_rule_say_what_the_mask_says(side: int) -> None:
    @given(cases())
    def compare(case: tuple[Mask, Grid]) -> None:
        mask, grid = case
        shown = visible(mask, grid)
        with blocks_of(side):
            blocks = lower_blocks(BoundMask(mask, grid))
            partial = spread(blocks.partial, grid, side) & rule(blocks, grid)
        assert torch.equal((spread(blocks.full, grid, side) | partial).expand_as(shown), shown)
        assert not (blocks.partial & blocks.full).any()

    compare()


IDS = torch.arange(300) // 37
LENGTHS = torch.tensor([300, 211])


COMMON = {
    "window": (masks.causal() & masks.sliding_window(41, 3), {"ends"}),
    "prefix": (masks.causal() | masks.prefix(77), {"ends", "last"}),
    "prefix of each item": (masks.causal() | masks.prefix(torch.tensor([77, 0])), {"ends", "last"}),
    "window or prefix": (
        (masks.causal() & masks.sliding_window(41, 3)) | masks.prefix(4),
        {"ends", "one_first", "one_last", "other_last"},
    ),
    "lengths": (masks.causal() & masks.lengths(LENGTHS), {"ends", "last"}),
    "keys": (masks.causal() & masks.keep(keys=torch.arange(300) < LENGTHS[:, None]), {"ends", "keys"}),
    "documents": (masks.documents(IDS), {"ends", "query_documents", "key_documents"}),
    "in another order": (masks.documents(IDS.flip(0)) & masks.causal(), {"ends", "query_documents", "key_documents"}),
    "of each item": (masks.documents(torch.stack([IDS, IDS // 2])), {"ends", "query_documents", "key_documents"}),
}


@pytest.mark.parametrize("name", COMMON)
def test_blocks_by_terms_of_common_masks_are_exact_and_small(name: str) -> None:
    mask, names = COMMON[name]
    grid, side = Grid(2, HEADS, 300, 300, CPU), 16
    shown = visible(mask, grid)
    bound = BoundMask(mask, grid)
    for part in bound.parts:
        if isinstance(part.mask, Documents):
            # As on a GPU, where ids are not read.
            part._structure = Structure(exact=False, documents=part.mask.structure(grid).documents)
    with blocks_of(side):
        blocks = lower_blocks(bound)
    cells = cells_of_blocks(shown, side)
    seen, full = cells.any(-1), cells.all(-1)
    assert torch.equal((blocks.partial | blocks.full).expand_as(seen), seen)
    assert torch.equal(blocks.full.expand_as(full), full)
    assert blocks.rule.keys() == names
    assert max(each.numel() for each in blocks.rule.values()) <= 2 * 300


def cells_of_blocks(visible: Tensor, side: int) -> Tensor:
    """The cells of each block, hidden beyond the edges, as many as the mask tells apart."""
    rows, columns = -visible.shape[-2] % side, -visible.shape[-1] % side
    padded = torch.nn.functional.pad(visible, (0, columns, 0, rows))
    return padded.unflatten(-1, (-1, side)).unflatten(-3, (-1, side)).transpose(-3, -2).flatten(-2)


@pytest.mark.parametrize("block", [16, 20, 64])
def test_selected_blocks_that_fill_its_own_are_read_as_lists(block: int) -> None:
    """On a GPU, whose mask of (L, S) would be large."""
    count = -(-300 // block)
    indices = torch.randint(-1, count, (2, 1, 300, 2), generator=torch.Generator().manual_seed(0))
    indices[:, :, 32:48] = 3 % count  # all queries of a block
    mask, grid, side = masks.causal() & masks.selected(indices, block=block), Grid(2, HEADS, 300, 300, CPU), 16
    with blocks_of(side):
        blocks = lower_blocks(BoundMask(mask, grid))
        cells = cells_of_blocks(visible(mask, grid), side)
    seen, full = cells.any(-1), cells.all(-1)
    assert not (seen & ~(blocks.partial | blocks.full)).any()
    assert not (blocks.full & ~full).any()
    shown = (rule(blocks, grid) & spread(blocks.partial, grid, side)) | spread(blocks.full, grid, side)
    assert torch.equal(shown.expand(2, HEADS, 300, 300), visible(mask, grid).expand(2, HEADS, 300, 300))
    assert "visible" not in blocks.rule
