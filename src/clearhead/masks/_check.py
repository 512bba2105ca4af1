"""Finding the usual mistakes in a mask, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import INTEGERS, existing_device, integer, strided
from ..errors import ArgumentError, ClearheadError, DeviceError, ShapeError, shape_text
from ._base import Mask
from ._coverage import find_coverage
from ._grid import Block, Grid
from ._report import MaskReport

_CORNER = 64  # rows and columns looked at to tell a causal mask from its opposite


def check_mask(mask: Mask, grid: Grid) -> MaskReport:
    """See `Mask.check`."""
    if grid.device.type == "meta":
        raise DeviceError("mask", expected="a mask with values to look at", got="one on meta")
    # A mask that does not fit is what a check is for; it is reported, not raised.
    try:
        mask.validate(grid)
        seen = find_coverage(mask, grid)
    except ClearheadError as error:
        return MaskReport(mask.describe(), (f"shape or value: {error}",))
    findings: list[str] = []
    queries = None if seen.queries is None else _per_item(seen.queries, grid)
    keys = None if seen.keys is None else _per_item(seen.keys, grid)
    # First, because keys that no query sees follow from it, and would hide the cause.
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
    # Keys that only some items hide are padding, and nothing to report.
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
    """The sizes that were given, completed by what the mask's own tensors say."""
    known = mask.sizes()
    given = {"query_length": query_length, "key_length": key_length, "batch_size": batch_size, "num_heads": num_heads}
    for name, value in given.items():
        if value is not None:
            integer(name, value, least=0)
    query_positions = as_positions("query_positions", query_positions)
    key_positions = as_positions("key_positions", key_positions, per_head=True)
    length = _first(query_length, known.query_length, _count(query_positions))
    keys = _first(key_length, known.key_length, _count(key_positions))
    if keys is None:
        # Self-attention is what is usually meant, unless there are lengths that need more keys.
        keys = max(length or 0, known.fewest_keys) or length
    if length is None:
        length = keys
    if length is None or keys is None:
        raise ArgumentError(
            "query_length",
            expected=f"a length, because {mask.describe()} fits any",
            got="none",
            fix="Write for example mask.dense(8).",
        )
    batch = _first(batch_size, known.batch_size, _batch(query_positions), _batch(key_positions))
    heads = _first(num_heads, known.num_heads)
    grid = Grid(
        batch_size=1 if batch is None else batch,
        num_heads=1 if heads is None else heads,
        query_length=length,
        key_length=keys,
        device=_device_of(mask) if device is None else existing_device(device),
        query_positions=query_positions,
        key_positions=key_positions,
    )
    _require_positions("query_positions", query_positions, grid, length)
    _require_positions("key_positions", key_positions, grid, keys)
    return grid


def as_positions(name: str, positions: object, *, per_head: bool = False) -> Tensor | int | None:
    """Read positions: an int stays one, a tensor (n,) or (B, n) becomes int64 (1 or B, n).

    Args:
        name: of the argument.
        positions: what was given.
        per_head: whether (B, H, n) may be given too; it stays as it is.
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
    # int64, because small and unsigned integers overflow when a window is added or taken off.
    return (positions[None] if positions.dim() == 1 else positions).long()


def _first(*sizes: int | None) -> int | None:
    return next((size for size in sizes if size is not None), None)


def _count(positions: Tensor | int | None) -> int | None:
    return positions.shape[-1] if isinstance(positions, Tensor) else None


def _batch(positions: Tensor | int | None) -> int | None:
    return positions.shape[0] if isinstance(positions, Tensor) and positions.shape[0] != 1 else None


def _require_positions(name: str, positions: Tensor | int | None, grid: Grid, length: int) -> None:
    if not isinstance(positions, Tensor):
        return
    if positions.device != grid.device:
        got = str(positions.device)
        raise DeviceError(name, expected=f"positions on {grid.device}, like the mask", got=got)
    got = shape_text(positions.shape)
    if positions.shape[0] not in (1, grid.batch_size) or (
        positions.dim() == 3 and positions.shape[1] != grid.num_heads
    ):
        expected = f"positions for B = {grid.batch_size} batch items and H = {grid.num_heads} heads"
        raise ShapeError(name, expected=expected, got=got)
    if positions.shape[-1] != length:
        fix = f"Give one for each of {name.replace('positions', 'length')}."
        raise ShapeError(name, expected=f"{length} positions", got=got, fix=fix)


def _device_of(mask: Mask) -> torch.device:
    known = mask.sizes().device
    devices = (tensor.device for tensor in (*mask.bias_tensors(), *mask.tensors()))
    return next(devices, torch.device("cpu")) if known is None else known


def _per_item(seen: Tensor, grid: Grid) -> Tensor:
    """(1 or B, 1 or H, n, 1) → (B, n): seen in any head."""
    return seen[..., 0].any(1).expand(grid.batch_size, -1)


def _hidden_text(what: str, so: str, hidden: Tensor) -> str:
    item, first = (int(index) for index in hidden.nonzero()[0])
    return f"{what}: {int(hidden.sum())} (the first: item {item}, index {first}); {so}"


def _inverted_padding(keys: Tensor, description: str) -> str:
    """Properly padded batches have one item without padding; an inverted one has an item with nothing else."""
    by_marks = "keep(" in description or "drop(" in description  # lengths have no polarity
    if keys.shape[0] < 2 or keys.shape[1] < 2 or not by_marks:
        return ""
    other = "if 1 marks padding in this tensor, use masks.drop(keys=t)"
    if "drop(" in description and "keep(" not in description:
        other = "if 1 marks real keys in this tensor, use masks.keep(keys=t)"
    # An item of full length has, inverted, nothing visible; a batch without such an item says nothing.
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
    # The corner tells the two apart; the whole matrix may not fit into memory.
    size = min(grid.query_length, grid.key_length, _CORNER)
    if size < 2:
        return False
    visible = mask.visible(Block(grid, rows=slice(0, size), columns=slice(0, size)))
    if visible is None or visible.shape[-2:] != (size, size):
        return False
    after = torch.ones(size, size, dtype=torch.bool, device=visible.device).triu(1)
    return bool((visible == after).all())
