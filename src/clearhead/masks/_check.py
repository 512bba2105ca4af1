"""The search for common mistakes in a mask, and the sizes and positions of calls without tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import INTEGERS, existing_device, integer, same_device, strided
from ..errors import ArgumentError, ClearheadError, DeviceError, ShapeError, shape_text
from ._base import Mask
from ._coverage import coverage
from ._grid import Block, Grid, Sizes
from ._report import MaskReport

_CORNER = 64  # rows and columns that are enough to recognise an inverted causal mask


def check_mask(mask: Mask, grid: Grid) -> MaskReport:
    """See `Mask.check`."""
    if grid.device.type == "meta":
        raise DeviceError("mask", expected="a mask with values to look at", got="one on meta")
    # A mask that does not fit is a finding, not an error.
    try:
        mask.validate(grid)
        covered = coverage(mask, grid)
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


def as_positions(name: str, positions: object, *, per_head: bool = False) -> Tensor | int | None:
    """Read positions: an int stays an int, and a tensor (n,) or (B, n) becomes int64 (1 or B, n).

    Args:
        name: of the argument.
        positions: the argument.
        per_head: whether (B, H, n) is allowed too; its shape stays.
    """
    if positions is None:
        return None
    shapes = "(n,), (B, n) or (B, H, n)" if per_head else "(n,) or (B, n)"
    if isinstance(positions, (int, torch.SymInt)) and not isinstance(positions, bool):
        return integer(name, positions, least=0, expected="a first position ≥ 0")
    expected = f"an int, or an integer tensor {shapes}"
    positions = strided(name, positions, expected, dtypes=INTEGERS)
    if positions.dim() not in ((1, 2, 3) if per_head else (1, 2)):
        raise ShapeError(name, expected=f"shape {shapes}", got=shape_text(positions.shape))
    # int64, because a window added to small or unsigned integers overflows.
    return (positions[None] if positions.dim() == 1 else positions).long()


def _sizes_of(length: str, positions: Tensor | int | None) -> Sizes:
    """The sizes that positions of queries, or of keys, require."""
    if not isinstance(positions, Tensor):
        return Sizes()
    return Sizes.of(positions.shape[0])._replace(**{length: positions.shape[-1]})


def require_fit(name: str, positions: Tensor, batch: int, length: int, heads: int | None = None) -> None:
    """Raise unless positions have the shape (n,), (1 or B, n) or (B, H, n) of a call."""
    shape = positions.shape
    fits = shape[-1] == length and (len(shape) == 1 or shape[0] == 1 or shape[0] == batch)
    if not fits or (len(shape) == 3 and shape[1] != heads):
        per_head = "" if heads is None else f" or ({batch}, {heads}, {length})"
        expected = f"shape ({length},) or ({batch}, {length}){per_head}"
        fix = "Give every query, or every key, its absolute position."
        raise ShapeError(name, expected=expected, got=shape_text(shape), fix=fix)


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
