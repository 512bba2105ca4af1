"""What a user sees of a mask: its check, its picture, and the grid of a mask without a call."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import existing_device, integer, same_device
from ..errors import ArgumentError, ClearheadError, DeviceError
from ._base import Mask
from ._bound import bind
from ._coverage import coverage
from ._grid import Block, Grid, Sizes, as_positions, require_fit
from ._report import MaskReport

_CORNER = 64  # rows and columns that are enough to recognise an inverted causal mask
_SIDE = 12  # at most this many rows and columns are drawn
_LENGTH = 8  # the drawn length of a mask that fits any length


def check_mask(mask: Mask, grid: Grid) -> MaskReport:
    """See `Mask.check`."""
    if grid.device.type == "meta":
        raise DeviceError("mask", expected="a mask with values to look at", got="one on meta")
    # A mask that does not fit is a finding, not an error.
    try:
        mask.validate(grid)
        covered = coverage(bind(mask, grid))
    except ClearheadError as error:
        return MaskReport(mask.describe(), (f"shape or value: {error}",))
    findings: list[str] = []
    queries = _per_item(covered.queries, grid.batch_size, grid.query_length)
    keys = _per_item(covered.keys, grid.batch_size, grid.key_length)
    # First, because it is the cause of keys that no query sees.
    inverted = None if keys is None else _inverted_padding(keys, mask.describe())
    if inverted:
        findings.append(inverted)
    if _looks_anticausal(mask, grid):
        findings.append(
            "inverted causal mask: the visible keys are exactly those after the query; "
            "if 1 marks hidden keys in this tensor, use masks.drop(t)"
        )
    if queries is not None and not bool(queries.all()):
        findings.append(_hidden_text("queries that see no key", "their output will be zero", ~queries))
        if _hides_rows(mask, grid) and bool((shown := ~queries if keys is None else keys & ~queries).any()):
            consequence = (
                "the tensor has one mark per query, which hides no key; if it marks padding, give its marks per key, "
                "(B, S): masks.keep(keys=t)"
            )
            findings.append(_hidden_text("padding keys that stay visible", consequence, shown))
    # Keys that only some items hide are padding, which is no mistake.
    if keys is not None and not bool(keys.any(0).all()):
        findings.append(_hidden_text("keys that no query sees", "fine for padding", ~keys))
    return MaskReport(mask.describe(), tuple(findings))


def grid_for(
    mask: Mask,
    query_length: int | None = None,
    key_length: int | None = None,
    batch_size: int | None = None,
    num_heads: int | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    device: torch.device | str | None = None,
) -> Grid:
    """The grid of the passed sizes, completed by the sizes that the mask and the positions require."""
    sizes = Sizes(batch_size, num_heads, query_length, key_length)
    for name in ("query_length", "key_length", "batch_size", "num_heads"):
        if (size := getattr(sizes, name)) is not None:
            integer(name, size, least=0)
    query_positions = as_positions("query_positions", query_positions)
    key_positions = as_positions("key_positions", key_positions, per_head=True)
    sizes = sizes.merged(mask.sizes())
    sizes = sizes.merged(_sizes_of("query_length", query_positions)).merged(_sizes_of("key_length", key_positions))
    length, keys = sizes.query_length, sizes.key_length
    if keys is None:
        # Self-attention by default, unless lengths need more keys.
        keys = max(length or 0, sizes.fewest_keys) or length
    if length is None:
        length = keys
    if length is None or keys is None:
        expected, fix = f"a length, because {mask.describe()} fits any", "Write for example mask.dense(8)."
        raise ArgumentError("query_length", expected=expected, got="none", fix=fix)
    batch = 1 if sizes.batch_size is None else sizes.batch_size
    heads = 1 if sizes.num_heads is None else sizes.num_heads
    device = _device_of(mask) if device is None else existing_device(device)
    grid = Grid(batch, heads, length, keys, device, query_positions, key_positions)
    for name, positions, count in (("query", query_positions, length), ("key", key_positions, keys)):
        if isinstance(positions, Tensor):
            same_device(f"{name}_positions", positions, device, "the mask's device")
            require_fit(f"{name}_positions", positions, batch, count, heads)
    return grid


def _sizes_of(length: str, positions: Tensor | int | None) -> Sizes:
    """The sizes that positions of queries, or of keys, require."""
    if not isinstance(positions, Tensor):
        return Sizes()
    return Sizes.of(positions.shape[0])._replace(**{length: positions.shape[-1]})


def _device_of(mask: Mask) -> torch.device:
    required = mask.sizes().device
    devices = (tensor.device for tensor in (*mask.bias_tensors(), *mask.tensors()))
    return next(devices, torch.device("cpu")) if required is None else required


def _per_item(covered: Tensor | None, batch_size: int, length: int) -> Tensor | None:
    """(1 or B, 1 or H, 1 or n, 1) → (B, n): covered in any head."""
    return None if covered is None else covered[..., 0].any(1).expand(batch_size, length)


def _hidden_text(problem: str, consequence: str, hidden: Tensor) -> str:
    item, first = (int(index) for index in hidden.nonzero()[0])
    return f"{problem}: {int(hidden.sum())} (the first: item {item}, index {first}); {consequence}"


def _inverted_padding(keys: Tensor, description: str) -> str:
    """A padded batch has an item without padding. If its marks are inverted, this item has no visible key."""
    by_marks = "keep(" in description or "drop(" in description  # lengths have no polarity
    if keys.shape[0] < 2 or keys.shape[1] < 2 or not by_marks:
        return ""
    other = "if 1 marks padding in this tensor, use masks.drop(keys=t)"
    if "drop(" in description and "keep(" not in description:
        other = "if 1 marks real keys in this tensor, use masks.keep(keys=t)"
    # Without an item of full length the marks can be right.
    counts = keys.sum(-1)
    empty = counts == 0
    partial = keys[~empty]
    if not bool(empty.any()) or partial.shape[0] == 0 or bool((counts == keys.shape[1]).any()):
        return ""
    at_the_end = (partial[:, 1:] >= partial[:, :-1]).all()
    at_the_start = (partial[:, 1:] <= partial[:, :-1]).all()
    if not bool(at_the_end | at_the_start):
        return ""
    return (
        f"inverted padding: item {int(empty.nonzero()[0])} shows no key at all while others show only a few at one "
        f"end; {other}"
    )


def _hides_rows(mask: Mask, grid: Grid) -> bool:
    """Whether a tensor of a mask for self-attention differs between queries and not between keys, as (B, 1, L, 1)."""
    if grid.query_length != grid.key_length or grid.key_length < 2:
        return False
    tables = (tensor for tensor in mask.tensors() if tensor.dim() >= 2 and tensor.shape[-2] == grid.query_length)
    return any(
        bool((table == table[..., :1]).all()) and not bool((table == table[..., :1, :]).all()) for table in tables
    )


def _looks_anticausal(mask: Mask, grid: Grid) -> bool:
    # The corner is enough, and the whole matrix may not fit into memory.
    size = min(grid.query_length, grid.key_length, _CORNER)
    if size < 2:
        return False
    visible = mask.visible(Block(grid, rows=slice(0, size), columns=slice(0, size)))
    if visible is None or visible.shape[-2:] != (size, size):
        return False
    after = torch.ones(size, size, dtype=torch.bool, device=visible.device).triu(1)
    return bool((visible == after).all())


def draw(mask: Mask) -> str:
    """Describe the mask and draw batch item 0, head 0: ``■`` visible, ``·`` hidden."""
    try:
        sizes = mask.sizes()
        grid = grid_for(mask, sizes.query_length or sizes.key_length or sizes.fewest_keys or _LENGTH)
        mask.validate(grid)
        picture, note = _sample(mask, grid)
    except Exception as error:  # a repr is read while debugging, so it must not raise
        return f"<mask {mask.describe()}: cannot be drawn, {error}>"
    return "\n".join([f"<mask {mask.describe()}{note}", *picture, ">"])


def _sample(mask: Mask, grid: Grid) -> tuple[list[str], str]:
    rows, columns = _spread(grid.query_length, grid.device), _spread(grid.key_length, grid.device)
    block = Block(grid, batch=slice(0, 1), heads=slice(0, 1), rows=rows, columns=columns)
    shape = (1, 1, len(rows), len(columns))
    visible = mask.visible(block)
    # One head of one item, so the picture stays small.
    shown = torch.ones(shape, dtype=torch.bool) if visible is None else visible.expand(shape)
    lines = ["  " + "".join("■" if mark else "·" for mark in row) for row in shown[0, 0].tolist()]
    notes: list[str] = []
    if grid.batch_size > 1 or grid.num_heads > 1:
        notes.append(f"item 0 of {grid.batch_size}, head 0 of {grid.num_heads}")
    if len(rows) < grid.query_length or len(columns) < grid.key_length:
        notes.append(f"{len(rows)} of {grid.query_length} queries × {len(columns)} of {grid.key_length} keys")
    return lines, "".join(f", {note}" for note in notes)


def _spread(length: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, length - 1, min(length, _SIDE), device=device).round().long()
