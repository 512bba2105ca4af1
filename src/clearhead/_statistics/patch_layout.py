"""The positions of a vision transformer's tokens on its input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PatchLayout:
    """The tokens of one attention module: prefix tokens, then the patches, row by row.

    Args:
        prefix: names of the tokens before the patches, such as the class token and registers.
        grid: rows and columns of patches.
        patch: height and width of one patch, in pixels of the input.
        size: height and width of the input.
        queries: names of the queries if they are no tokens of the input, such as those of a pooling layer.
    """

    prefix: tuple[str, ...]
    grid: tuple[int, int]
    patch: tuple[int, int]
    size: tuple[int, int]
    queries: tuple[str, ...] | None = None

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.prefix) + self.grid[0] * self.grid[1]

    def names(self) -> list[str]:
        """The names of all tokens: ``class``, ``register 1``, ``patch 3, 5`` (row and column, from 0)."""
        rows, columns = self.grid
        return [*self.prefix, *(f"patch {row}, {column}" for row in range(rows) for column in range(columns))]
