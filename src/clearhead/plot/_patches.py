"""Patches of a picture taken together, where there are more than a page holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._statistics.patch_layout import PatchLayout
from ._tokens import Tokens


@dataclass(frozen=True)
class Tiles:
    """Squares of patches that are pooled, so that the weights between them fit on a page.

    A tile is `side` patches high and wide, and smaller at the right and lower edge.

    Example:
        >>> tiles = Tiles(PatchLayout(("class",), (3, 4), (8, 8), (24, 32)), side=2)
        >>> tiles.grid, tiles.places().tolist()
        ((2, 2), [0, 1, 1, 2, 2, 1, 1, 2, 2, 3, 3, 4, 4])
    """

    layout: PatchLayout
    side: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        rows, columns = (-(-count // self.side) for count in self.layout.grid)
        return rows, columns

    @property
    def length(self) -> int:
        """How many tokens there are, tiles counted as one."""
        return len(self.layout.prefix) + self.grid[0] * self.grid[1]

    def places(self) -> Tensor:
        """(tokens,): the tile of each token. Every other token is a tile of its own."""
        rows, columns = self.layout.grid
        row, column = torch.arange(rows) // self.side, torch.arange(columns) // self.side
        tiles = (row[:, None] * self.grid[1] + column).flatten() + len(self.layout.prefix)
        return torch.cat([torch.arange(len(self.layout.prefix)), tiles])

    def even_weights(self) -> Tensor:
        """(tiles,): the weight of each tile if all tokens are alike."""
        return torch.bincount(self.places()) / self.layout.length

    def tokens(self) -> Tokens:
        """The tiles by name."""
        prefix = self.layout.prefix
        if self.side == 1:
            names = self.layout.names()
        else:
            names = [
                *prefix,
                *(self._name(row, column) for row in range(self.grid[0]) for column in range(self.grid[1])),
            ]
        special = [True] * len(prefix) + [False] * (len(names) - len(prefix))
        return Tokens(names, special, range(len(names)))

    def _name(self, row: int, column: int) -> str:
        spans = [
            f"{place * self.side}–{min((place + 1) * self.side, most) - 1}"
            for place, most in zip((row, column), self.layout.grid, strict=True)
        ]
        return f"patches {spans[0]}, {spans[1]}"

    def merge(self, values: Tensor, dim: int, *, mean: bool) -> Tensor:
        """Add up, or average, the patches of every tile along a dimension."""
        members = torch.nn.functional.one_hot(self.places(), self.length).to(values)  # (tokens, tiles)
        if mean:
            members = members / members.sum(0)
        return (values.movedim(dim, -1) @ members).movedim(-1, dim)
