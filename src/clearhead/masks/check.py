"""Finding the usual mistakes in a mask, in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError, ClearheadError, ShapeError, explain_problem, shape_text
from .base import Mask
from .grid import Block, Grid
from .lowering import reach

__all__ = ["MaskReport", "check_mask", "grid_for"]

_CORNER = 64  # rows and columns looked at to tell a causal mask from its opposite


@dataclass(frozen=True)
class MaskReport:
    """What `Mask.check` found; ``ok`` if nothing."""

    description: str
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if self.ok:
            return f"{self.description}: nothing suspicious"
        return "\n".join([f"{self.description}:", *(f"  - {finding}" for finding in self.findings)])


def check_mask(
    mask: Mask,
    query_length: int | None,
    key_length: int | None,
    batch_size: int | None,
    num_heads: int | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
) -> MaskReport:
    """See `Mask.check`."""
    grid = grid_for(mask, query_length, key_length, batch_size, num_heads, query_positions, key_positions)
    try:
        mask.validate(grid)
        seen = reach(mask, grid)
    except ClearheadError as error:
        return MaskReport(mask.describe(), (f"shape or value: {error}",))
    findings: list[str] = []
    queries = None if seen.queries is None else _per_item(seen.queries, grid)
    keys = None if seen.keys is None else _per_item(seen.keys, grid)
    inverted = None if keys is None else _inverted_padding(keys)
    if inverted:
        findings.append(inverted)
    if _looks_anticausal(mask, grid):
        findings.append(
            "inverted causal mask: the visible keys are exactly those after the query; "
            "if 1 marks hidden keys in this tensor, use masks.drop(t)"
        )
    if queries is not None and not bool(queries.all()):
        findings.append(_hidden_text("queries that see no key", "their output will be zero", ~queries))
    if keys is not None and not bool(keys.all()):
        findings.append(_hidden_text("keys that no query sees", "fine for padding", ~keys))
    return MaskReport(mask.describe(), tuple(findings))


def grid_for(
    mask: Mask,
    query_length: int | None,
    key_length: int | None,
    batch_size: int | None,
    num_heads: int | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
) -> Grid:
    """The sizes that were given, completed by what the mask's own tensors say."""
    known = mask.sizes()
    length = query_length if query_length is not None else known.query_length
    keys = key_length if key_length is not None else known.key_length
    if length is None and query_positions is not None:
        length = query_positions.shape[-1]
    if keys is None and key_positions is not None:
        keys = key_positions.shape[-1]
    if length is None:
        length = keys
    if length is None:
        raise ArgumentError(
            explain_problem(
                "query_length",
                expected=f"a length, because {mask.describe()} fits any",
                got="none",
                fix="Write for example mask.dense(8).",
            )
        )
    bias_tensors = mask.bias_tensors()
    return Grid(
        batch_size=batch_size if batch_size is not None else (known.batch_size or 1),
        num_heads=num_heads if num_heads is not None else (known.num_heads or 1),
        query_length=length,
        key_length=length if keys is None else keys,
        device=bias_tensors[0].device if bias_tensors else _device_of(mask),
        query_positions=None if query_positions is None else as_positions("query_positions", query_positions),
        key_positions=None if key_positions is None else as_positions("key_positions", key_positions),
    )


def as_positions(name: str, positions: Tensor) -> Tensor:
    """Read positions given as (n,) or (B, n) as (1 or B, n)."""
    if positions.dim() not in (1, 2):
        raise ShapeError(explain_problem(name, expected="shape (n,) or (B, n)", got=shape_text(positions.shape)))
    return positions if positions.dim() == 2 else positions[None]


def _device_of(mask: Mask) -> torch.device:
    for part in mask.parts():
        for value in vars(part).values():
            if isinstance(value, Tensor):
                return value.device
            if isinstance(value, Mask):
                return _device_of(value)
    return torch.device("cpu")


def _per_item(seen: Tensor, grid: Grid) -> Tensor:
    """(1 or B, 1 or H, n, 1) → (B, n): seen in any head."""
    return seen[..., 0].any(1).expand(grid.batch_size, -1)


def _hidden_text(what: str, so: str, hidden: Tensor) -> str:
    item, first = (int(index) for index in hidden.nonzero()[0])
    return f"{what}: {int(hidden.sum())} (the first: item {item}, index {first}); {so}"


def _inverted_padding(keys: Tensor) -> str:
    """Properly padded batches have one item without padding; an inverted one has an item with nothing else."""
    if keys.shape[0] < 2 or keys.shape[1] < 2:
        return ""
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
        "end; if 1 marks padding in this tensor, use masks.drop(keys=t)"
    )


def _looks_anticausal(mask: Mask, grid: Grid) -> bool:
    size = min(grid.query_length, grid.key_length, _CORNER)
    if size < 2:
        return False
    visible = mask.visible(Block(grid, rows=slice(0, size), columns=slice(0, size)))
    if visible is None or visible.shape[-2:] != (size, size):
        return False
    after = torch.ones(size, size, dtype=torch.bool, device=visible.device).triu(1)
    return bool((visible == after).all())
