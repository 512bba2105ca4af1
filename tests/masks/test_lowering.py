"""Lowering of masks: blocks, skipped columns, coverage, parts of a larger attention, and the dense tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import ShapeError
from clearhead.masks import Mask
from clearhead.masks._coverage import Coverage, coverage
from clearhead.masks._grid import Block, Grid, Offset
from clearhead.masks._lowering import dense_mask, is_plain_causal
from clearhead.masks._part import part_of

B, H = 2, 3
CPU = torch.device("cpu")


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    queries, keys = draw(st.integers(1, 11)), draw(st.integers(1, 13))
    positions = [
        draw(st.none() | st.lists(st.integers(0, 12), min_size=n, max_size=n).map(lambda p: torch.tensor([p])))
        for n in (queries, keys)
    ]
    return Grid(B, H, queries, keys, CPU, *positions)


@st.composite
def leaves(draw: st.DrawFn, grid: Grid) -> Mask:
    shape = [draw(st.sampled_from([1, n])) for n in (B, H, grid.query_length, grid.key_length)]
    marks = torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.5
    per_item = torch.tensor(draw(st.lists(st.integers(0, grid.key_length), min_size=B, max_size=B)))
    return draw(
        st.sampled_from(
            [
                masks.causal(),
                masks.causal("bottom_right"),
                masks.sliding_window(draw(st.integers(0, 5)), draw(st.integers(0, 5))),
                masks.prefix(draw(st.integers(0, 9))),
                masks.prefix(per_item),
                masks.lengths(per_item),
                masks.documents(torch.arange(13) // 4) if grid.has_positions else masks.causal(),
                masks.mask_mod(lambda b, h, q, k: (q + k + h) % 3 != b),
                masks.keep(marks),
                masks.drop(keys=marks[:, 0, 0].expand(B, grid.key_length)),
                masks.bias(torch.zeros(shape).masked_fill(marks, -torch.inf)),
            ]
        )
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mask, Grid]:
    grid = draw(grids())

    def combine(parts: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
        # A bias has no `|` and no `~`.
        either = st.builds(lambda a, b: a & b if a.has_bias or b.has_bias else a | b, parts, parts)
        opposite = parts.map(lambda a: a if a.has_bias else ~a)
        return st.one_of(st.builds(lambda a, b: a & b, parts, parts), either, opposite)

    return draw(st.recursive(leaves(grid), combine, max_leaves=4)), grid


def visible(mask: Mask, grid: Grid) -> Tensor:
    dense = dense_mask(mask, grid)
    return dense if dense.dtype == torch.bool else dense != -torch.inf


def require_coverage(mask: Mask, grid: Grid, covered: Coverage) -> None:
    cells = visible(mask, grid)
    for marks, expected in ((covered.queries, cells.any(-1)), (covered.keys, cells.any(-2))):
        actual = torch.ones_like(expected) if marks is None else marks.squeeze(-1).expand(expected.shape)
        assert torch.equal(actual, expected), mask.describe()


def pieces(draw: st.DataObject, length: int) -> list[slice]:
    cuts = draw.draw(st.sets(st.integers(1, length)))
    return [slice(start, stop) for start, stop in pairwise([0, *sorted(cuts - {length}), length])]


@given(cases(), st.integers(1, 3), st.sampled_from([0, 1 << 16]), st.booleans())
def test_fully_masked_rows_and_keys_are_exact(case: tuple[Mask, Grid], edge: int, few_cells: int, native: bool) -> None:
    mask, grid = case
    with pytest.MonkeyPatch.context() as patch:  # these masks are too small for their borders to be evaluated first
        if not native:
            patch.setattr("clearhead.masks._native_coverage.extension", None)
        patch.setattr("clearhead.masks._coverage._EDGE_ROWS", edge)
        patch.setattr("clearhead.masks._coverage._EDGE_COLUMNS", edge)
        patch.setattr("clearhead.masks._coverage._FEW_CELLS", few_cells)
        patch.setattr("clearhead.masks._coverage._ROWS_AT_A_TIME", 20)
        covered = coverage(mask, grid)
    require_coverage(mask, grid, covered)


@pytest.mark.parametrize("shift", [-9, -2, 0, 3, 9])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 7), (7, 5), (1, 7)])
def test_coverage_of_every_small_band(queries: int, keys: int, shift: int) -> None:
    grid = Grid(B, H, queries, keys, CPU, *((shift, 0) if shift > 0 else (0, -shift)))
    windows = [masks.sliding_window(left, right) for left in (0, 1, 11) for right in (0, 1, 11)]
    prefixes = [masks.prefix(n) for n in (0, 1, 4, 13)]
    bands = [masks.causal(), *windows, *(masks.causal() & window for window in windows)]
    for mask in (*bands, *prefixes, *(prefix & band for prefix in prefixes for band in bands)):
        require_coverage(mask, grid, coverage(mask, grid))


@given(cases(), st.data())
def test_a_block_is_the_same_part_of_the_whole(case: tuple[Mask, Grid], data: st.DataObject) -> None:
    mask, grid = case
    whole = dense_mask(mask, grid)
    items, heads = data.draw(st.sampled_from(pieces(data, B))), data.draw(st.sampled_from(pieces(data, H)))
    columns = data.draw(st.sampled_from(pieces(data, grid.key_length)))
    chosen = st.lists(st.integers(0, grid.query_length - 1), min_size=1, max_size=5).map(torch.tensor)
    rows = data.draw(st.sampled_from(pieces(data, grid.query_length)) | chosen)
    block = Block(grid, items, heads, rows, columns)
    expected = whole[items, heads][:, :, rows][..., columns]
    marks, added = mask.visible(block), mask.bias(block, torch.float64)
    shown = torch.ones_like(expected, dtype=torch.bool) if marks is None else marks.expand(expected.shape)
    assert torch.equal(shown, expected if added is None else expected != -torch.inf)
    if added is not None:
        assert torch.equal(added.expand(expected.shape)[shown], expected[shown])


@given(cases(), st.data())
def test_a_part_of_an_attention_sees_what_the_whole_sees_there(case: tuple[Mask, Grid], data: st.DataObject) -> None:
    mask, grid = case
    heads = data.draw(st.sampled_from(pieces(data, H)))
    rows = data.draw(st.sampled_from(pieces(data, grid.query_length)))
    columns = data.draw(st.sampled_from(pieces(data, grid.key_length)))
    own = Grid(B, heads.stop - heads.start, rows.stop - rows.start, columns.stop - columns.start, CPU)
    part = part_of(mask, Offset(H, heads.start, rows.start, columns.start), grid)
    assert part is not None
    whole = visible(mask, grid)
    expected = whole[:, heads, rows, columns]
    assert torch.equal(visible(part, own), expected)
    # No visible key is outside of the columns that a structure leaves.
    for structure, size, cells in ((mask.structure(grid), grid, whole), (part.structure(own), own, expected)):
        for chosen in pieces(data, size.query_length):
            start, stop = structure.columns(size, chosen)
            assert 0 <= start <= stop <= size.key_length
            assert not cells[:, :, chosen, :start].any()
            assert not cells[:, :, chosen, stop:].any()


@pytest.mark.parametrize(("heads", "rows", "columns"), [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_part_ends_within_the_whole(heads: int, rows: int, columns: int) -> None:
    part = part_of(masks.keep(torch.ones(B, H, 5, 7)), Offset(H, heads, rows, columns), Grid(B, H, 5, 7, CPU))
    assert part is not None
    part.validate(Grid(B, H - heads, 5 - rows, 7 - columns, CPU))
    with pytest.raises(ShapeError, match="of the whole, got one that ends at"):
        part.validate(Grid(B, H, 5, 7, CPU))


@pytest.mark.parametrize(
    ("mask", "rows", "span"),
    [
        (masks.causal(), slice(2, 4), (0, 4)),
        (masks.causal("bottom_right"), slice(2, 4), (0, 6)),
        (masks.sliding_window(1, 2), slice(3, 5), (2, 7)),
        (masks.prefix(3), slice(3, 5), (0, 3)),
        (masks.causal() & masks.sliding_window(1, 2), slice(3, 5), (2, 5)),
        (masks.causal() | masks.prefix(3), slice(0, 1), (0, 3)),
        (masks.sliding_window(0, 0) | masks.prefix(2), slice(4, 5), (0, 5)),
        (masks.sliding_window(0, 0) & masks.prefix(2), slice(4, 5), (2, 2)),
    ],
    ids=["causal", "bottom right", "window", "prefix", "and", "or", "or behind", "empty"],
)
def test_what_the_mask_rules_out_is_skipped(mask: Mask, rows: slice, span: tuple[int, int]) -> None:
    grid = Grid(1, 1, 5, 7, CPU)
    assert mask.structure(grid).columns(grid, rows) == span


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() & masks.sliding_window(1, 1),
        masks.keep(keys=torch.ones(0, 5)),
        masks.lengths(torch.zeros(0, dtype=torch.int64)),
        masks.documents(torch.zeros(5, dtype=torch.int64)),
        masks.documents(torch.zeros(0, 5, dtype=torch.int64)),
        masks.keep(torch.ones(5, 5)),
        masks.bias(torch.zeros(5, 5)),
    ],
    ids=Mask.describe,
)
def test_a_batch_of_none_is_answered_with_nothing(mask: Mask) -> None:
    x = torch.zeros(0, 3, 5, 2)
    assert clearhead.attention(x, x, x, mask).shape == (0, 3, 5, 2)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize(
    "mask", [masks.sliding_window(1, 1), masks.prefix(0), masks.lengths(torch.tensor([0]))], ids=Mask.describe
)
def test_lengths_of_zero(mask: Mask, queries: int, keys: int) -> None:
    query, key = torch.ones(1, 2, queries, 3), torch.ones(1, 2, keys, 3)
    output = clearhead.attention(query, key, key, mask)
    assert output.shape == query.shape
    assert keys > 0 or not output.any()


def test_unmodified_causal_masks_are_a_flag_of_fused_kernels() -> None:
    square, wide = Grid(1, 1, 5, 5, CPU), Grid(1, 1, 5, 7, CPU)
    assert is_plain_causal(masks.causal(), square)
    assert is_plain_causal(masks.causal(), wide)
    assert is_plain_causal(masks.causal("bottom_right"), square)
    assert not is_plain_causal(masks.causal("bottom_right"), wide)
    assert not is_plain_causal(masks.causal(), Grid(1, 1, 5, 5, CPU, torch.arange(5)[None]))
    for mask in (masks.causal() & masks.sliding_window(1, 1), ~masks.causal(), None):
        assert not is_plain_causal(mask, square)


ONE_OR_THREE = torch.tensor([1, 3])
SIZES: list[tuple[Mask, dict[str, Any], tuple[int, ...]]] = [
    (masks.keep(torch.ones(2, 3, 5, 7)), {}, (2, 3, 5, 7)),
    (masks.keep(keys=torch.ones(2, 7)), {"query_length": 5}, (2, 1, 5, 7)),
    (masks.causal() & masks.keep(keys=torch.ones(2, 7)), {}, (2, 1, 7, 7)),
    (masks.lengths(torch.ones(2, 5, dtype=torch.int64)), {"key_length": 7}, (2, 1, 5, 7)),
    (masks.documents(torch.zeros(2, 5, dtype=torch.int64)), {"num_heads": 3}, (2, 3, 5, 5)),
    (masks.causal(), {"query_positions": torch.arange(3), "key_positions": torch.arange(4)}, (1, 1, 3, 4)),
    (masks.causal(), {"query_positions": torch.tensor([[0, 1], [4, 5]]), "key_length": 3}, (2, 1, 2, 3)),
    # Lengths, and dimensions of 1, leave a size open.
    (masks.causal() & masks.lengths(ONE_OR_THREE), {"query_length": 5}, (2, 1, 5, 5)),
    (masks.causal() | masks.prefix(ONE_OR_THREE), {"query_length": 5}, (2, 1, 5, 5)),
    (masks.lengths(ONE_OR_THREE) & masks.keep(keys=torch.ones(2, 5)), {"query_length": 4}, (2, 1, 4, 5)),
    (masks.keep(keys=torch.ones(1, 5)) & masks.lengths(ONE_OR_THREE), {"query_length": 4}, (2, 1, 4, 5)),
    (masks.lengths(torch.tensor([3])) & masks.keep(keys=torch.ones(2, 5)), {"query_length": 4}, (2, 1, 4, 5)),
]


@pytest.mark.parametrize(("mask", "given", "shape"), SIZES, ids=range(len(SIZES)))
def test_dense_takes_sizes_from_tensors(mask: Mask, given: dict[str, Any], shape: tuple[int, ...]) -> None:
    assert mask.dense(**given).shape == shape


@pytest.mark.parametrize(
    ("mask", "given", "text"),
    [
        (masks.keep(torch.ones(2, 3)), {"query_length": 4, "key_length": 5}, r"got \(2, 3\)"),
        (masks.causal(), {"query_length": 3, "query_positions": torch.arange(5)}, "expected 3 positions"),
        (
            masks.causal(),
            {"query_positions": torch.arange(3)[None, None]},
            r"shape \(n,\) or \(B, n\), got \(1, 1, 3\)",
        ),
    ],
    ids=["mask", "positions", "dimensions"],
)
def test_dense_refuses_what_a_call_refuses(mask: Mask, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        mask.dense(**given)
