"""The coverage of masks with tensors, by the native extension and by PyTorch's operations alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from operator import and_
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import ShapeError
from clearhead.masks import Mask
from clearhead.masks._coverage import Coverage, coverage
from clearhead.masks._part import part_of
from tests.support.mask_cases import combined_masks, draw_frame
from tests.support.requests import Block, BoundMask, Grid, Offset, bind

B, H, L, S = 2, 3, 67, 83  # more than are looked at in one go
paths = pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])


def sparse(*shape: int) -> Tensor:
    """Few marks, so that some rows and some columns have none."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.03


def band() -> Tensor:
    return torch.ones(L, S, dtype=torch.bool).tril(-5).triu(-9)


def added(shown: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(shown.shape, torch.finfo(dtype).min, dtype=dtype).masked_fill(~shown, -torch.inf)


MASKS: dict[str, Callable[[], Mask]] = {
    "one of each batch item and head": lambda: masks.keep(sparse(B, H, L, S)),
    "(B·H, L, S)": lambda: masks.drop(~sparse(B * H, L, S)),
    "keys": lambda: masks.keep(keys=sparse(B, S)),
    "queries": lambda: masks.keep(sparse(B, 1, L, 1)),
    "a band": lambda: masks.keep(band()),
    "transposed": lambda: masks.keep(sparse(S, L).mT),
    "every other column": lambda: masks.keep(sparse(L, 2 * S)[:, ::2]),
    "everything": lambda: masks.keep(torch.ones(L, S)),
    "the last key": lambda: masks.keep(torch.arange(S).expand(L, S) == S - 1),
    "NaN": lambda: masks.bias(torch.full((L, S), torch.nan)),
    "infinity": lambda: masks.bias(torch.full((L, S), torch.inf)),
    "negated": lambda: masks.bias(torch.where(sparse(L, S), 1j, complex(0, torch.inf)).conj().imag),
    "several": lambda: masks.keep(sparse(L, S)) & masks.keep(keys=sparse(B, S).logical_not()) & masks.causal(),
    "a band of several": lambda: masks.sliding_window(3, 1) & masks.bias(added(band(), torch.float32)),
    "more than there is room for": lambda: functools.reduce(and_, (masks.keep(~each) for each in sparse(7, L, S))),
    **{
        f"numbers of {dtype}": lambda dtype=dtype: masks.bias(added(sparse(B, 1, L, S), dtype))
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    },
}


@paths
@pytest.mark.parametrize("name", MASKS)
def test_fully_masked_rows_and_keys(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("clearhead._native.coverage.extension", None)
    mask, grid = MASKS[name](), Grid(B, H, L, S, torch.device("cpu"))
    covered, shown = coverage(BoundMask(mask, grid)), visible(mask, grid)
    require_coverage(mask, grid, covered)
    for axis, expected in ((covered.queries, shown.any(-1)), (covered.keys, shown.any(-2))):
        assert (axis is None) == bool(expected.all())


# Lowering of masks: blocks, skipped columns, coverage, parts of a larger attention, and the dense tensor.


CPU = torch.device("cpu")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mask, Grid]:
    lengths = draw(st.integers(1, 11)), draw(st.integers(1, 13))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    frame, positions = draw_frame(draw, B, H, *lengths, generator)
    names = "query_positions", "key_positions"
    rows = (torch.atleast_2d(positions[name]) if name in positions else None for name in names)
    return draw(combined_masks(frame)).mask, Grid(B, H, *lengths, CPU, *rows)


def dense(mask: Mask, grid: Grid) -> Tensor:
    sizes = grid.query_length, grid.key_length
    positions = {"query_positions": grid.query_positions, "key_positions": grid.key_positions}
    return mask.dense(*sizes, batch_size=grid.batch_size, num_heads=grid.num_heads, **positions)


def visible(mask: Mask, grid: Grid) -> Tensor:
    shown = dense(mask, grid)
    return shown if shown.dtype == torch.bool else shown != -torch.inf


def require_coverage(mask: Mask, grid: Grid, covered: Coverage) -> None:
    cells = visible(mask, grid)
    for marks, expected in ((covered.queries, cells.any(-1)), (covered.keys, cells.any(-2))):
        actual = torch.ones_like(expected) if marks is None else marks.squeeze(-1).expand(expected.shape)
        assert torch.equal(actual, expected), mask.describe()


def pieces(draw: st.DataObject, length: int) -> list[slice]:
    cuts = draw.draw(st.sets(st.integers(1, length)))
    return [slice(start, stop) for start, stop in pairwise([0, *sorted(cuts - {length}), length])]


# Every row sees the first key, so rows are known from the borders, and a middle row sees the last open key.
MIDDLE = (
    torch.zeros(5, 7).index_fill(1, torch.tensor(0), 1).index_put((torch.tensor(2), torch.tensor(6)), torch.ones(()))
)


@example((masks.keep(MIDDLE), Grid(B, H, 5, 7, CPU)), 1, 0, False)
@given(cases(), st.integers(1, 3), st.sampled_from([0, 1 << 16]), st.booleans())
def test_fully_masked_rows_and_keys_are_exact(case: tuple[Mask, Grid], edge: int, few_cells: int, native: bool) -> None:
    mask, grid = case
    with pytest.MonkeyPatch.context() as patch:  # these masks are too small for their borders to be evaluated first
        if not native:
            patch.setattr("clearhead._native.coverage.extension", None)
        patch.setattr("clearhead.masks._coverage._EDGE_ROWS", edge)
        patch.setattr("clearhead.masks._coverage._EDGE_COLUMNS", edge)
        patch.setattr("clearhead.masks._coverage._FEW_CELLS", few_cells)
        patch.setattr("clearhead.masks._coverage._ROWS_AT_A_TIME", 20)
        covered = coverage(BoundMask(mask, grid))
    require_coverage(mask, grid, covered)


@pytest.mark.parametrize("shift", [-9, -2, 0, 3, 9])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 7), (7, 5), (1, 7)])
def test_coverage_of_every_small_band(queries: int, keys: int, shift: int) -> None:
    grid = Grid(B, H, queries, keys, CPU, *((shift, 0) if shift > 0 else (0, -shift)))
    windows = [masks.sliding_window(left, right) for left in (0, 1, 11) for right in (0, 1, 11)]
    prefixes = [masks.prefix(n) for n in (0, 1, 4, 13)]
    bands = [masks.causal(), *windows, *(masks.causal() & window for window in windows)]
    for mask in (*bands, *prefixes, *(prefix & band for prefix in prefixes for band in bands)):
        require_coverage(mask, grid, coverage(BoundMask(mask, grid)))


@given(cases(), st.data())
def test_a_block_is_the_same_part_of_the_whole(case: tuple[Mask, Grid], data: st.DataObject) -> None:
    mask, grid = case
    whole = dense(mask, grid)
    items, heads = data.draw(st.sampled_from(pieces(data, B))), data.draw(st.sampled_from(pieces(data, H)))
    columns = data.draw(st.sampled_from(pieces(data, grid.key_length)))
    chosen = st.lists(st.integers(0, grid.query_length - 1), min_size=1, max_size=5).map(torch.tensor)
    rows = data.draw(st.sampled_from(pieces(data, grid.query_length)) | chosen)
    block = Block(grid, items, heads, rows, columns)
    expected = whole[items, heads][:, :, rows][..., columns]
    marks, added = mask.visible(block), mask.bias(block, torch.promote_types(whole.dtype, torch.float32))
    shown = torch.ones_like(expected, dtype=torch.bool) if marks is None else marks.expand(expected.shape)
    assert torch.equal(shown, expected if added is None else expected != -torch.inf)
    if added is not None:
        assert torch.equal(added.expand(expected.shape)[shown], expected[shown])


@given(cases(), st.data())
def test_a_part_of_an_attention_sees_what_the_whole_sees_there(case: tuple[Mask, Grid], data: st.DataObject) -> None:
    mask, grid = case
    heads = data.draw(st.sampled_from(pieces(data, H)))
    rows = data.draw(st.sampled_from(pieces(data, grid.query_length)))
    piece = data.draw(st.sampled_from(pieces(data, grid.key_length)))
    columns = range(piece.start, piece.stop, data.draw(st.integers(1, 5)))
    own = Grid(B, heads.stop - heads.start, rows.stop - rows.start, len(columns), CPU)
    whole = visible(mask, grid)
    expected = whole[:, heads, rows, columns.start : columns.stop : columns.step]
    for chosen in (columns, torch.tensor(columns), None):
        if chosen is None and columns.step > 1:
            continue
        part = part_of(bind(mask, grid), Offset(H, heads.start, rows.start, columns.start), chosen)
        assert part is not None
        assert torch.equal(visible(part, own), expected)
        require_structure(part, own, expected)
        require_columns(part, own, expected, data)
    require_columns(mask, grid, whole, data)


def require_columns(mask: Mask, grid: Grid, shown: Tensor, data: st.DataObject) -> None:
    """Require that no visible key is outside of the columns that a structure leaves."""
    for rows in pieces(data, grid.query_length):
        start, stop = mask.structure(grid).columns(grid, rows)
        assert 0 <= start <= stop <= grid.key_length
        assert not shown[:, :, rows, :start].any()
        assert not shown[:, :, rows, stop:].any()


def require_structure(mask: Mask, grid: Grid, shown: Tensor) -> None:
    """Require that a structure hides no visible key, and if it is exact, shows nothing else."""
    structure = mask.structure(grid)
    block, seen = Block(grid), torch.ones_like(shown)
    if structure.band is not None:
        distance = block.j - block.i
        seen &= (distance >= structure.band.low) & (distance <= structure.band.high) & (block.j < structure.band.stop)
    if structure.rows is not None:
        seen &= block.j < structure.rows.stop[:, None, :, None]
        if structure.rows.first is not None:
            seen &= block.j >= structure.rows.first[:, None, :, None]
    if structure.queries is not None:
        seen &= structure.queries[:, None, :, None]
    if structure.keys is not None:
        seen &= structure.keys[:, None, None]
    for tensor in structure.tensors:
        seen &= tensor
    for bias in structure.biases:
        seen &= bias != -torch.inf
    assert not (shown & ~seen).any()
    assert not structure.exact or torch.equal(seen, shown)


@pytest.mark.parametrize(("heads", "rows", "columns"), [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_part_ends_within_the_whole(heads: int, rows: int, columns: int) -> None:
    part = part_of(bind(masks.keep(torch.ones(B, H, 5, 7)), Grid(B, H, 5, 7, CPU)), Offset(H, heads, rows, columns))
    assert part is not None
    part.validate(Grid(B, H - heads, 5 - rows, 7 - columns, CPU))
    with pytest.raises(ShapeError, match="of the whole, got one that ends at"):
        part.validate(Grid(B, H, 5, 7, CPU))


def test_unmodified_causal_masks_are_a_flag_of_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", fused)

    def is_flag(mask: Mask | None, keys: int = 5, **positions: Tensor) -> bool:
        query, key = torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, keys, 8)
        with clearhead.use_kernel("sdpa"):
            clearhead.attention(query, key, key, mask, **positions)
        bias, is_causal = fused.call_args.args[3], fused.call_args.kwargs["is_causal"]
        assert (bias is None) == (is_causal or mask is None)
        return is_causal

    assert is_flag(masks.causal(), 7)
    assert all(map(is_flag, (masks.causal(), masks.causal("bottom_right"))))
    assert not is_flag(masks.causal("bottom_right"), 7)
    assert not is_flag(masks.causal(), query_positions=torch.arange(5))
    assert not any(map(is_flag, (masks.causal() & masks.sliding_window(1, 1), ~masks.causal(), None)))


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
        (masks.causal(), {"query_length": 3, "query_positions": torch.arange(5)}, r"expected shape \(3,\)"),
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


def test_another_default_device_changes_nothing() -> None:
    x, mask = torch.randn(1, 2, 600, 8), masks.keep(torch.rand(600, 600) > 0.999)
    with clearhead.use_kernel("chunked"):
        expected = clearhead.attention(x, x, x, mask)
        with torch.device("meta"):
            assert torch.equal(clearhead.attention(x, x, x, mask), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_items_beside_a_tensor_of_one_item(dtype: torch.dtype) -> None:
    """Nothing reads an empty tensor as if it had an item."""
    x, marks = torch.randn(0, 2, 5, 4, dtype=dtype), torch.ones(0, 1, 1, 5, dtype=torch.bool)
    for mask in (masks.bias(torch.zeros(1, 2, 5, 5)) & masks.keep(marks), masks.prefix(0) & masks.keep(marks)):
        for kernel in ("chunked", "reference"):
            with clearhead.use_kernel(kernel):
                assert clearhead.attention(x, x, x, mask).shape == x.shape
