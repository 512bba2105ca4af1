"""What a statistic declares: its meaning and shape, how blocks are folded into it, and what the native kernel writes.

Notation: p_ij the weights, s_ij the scores as `attention` defines them, Q the queries that are counted (all, or those
of `query_mask`). A masked weight is exactly 0. A query that sees no key has p = 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .._call.call import AttentionCall
from .._weights import Queries
from ..kernels._block_rows import BlockRows
from .totals import ONE_PROCESS, Totals

#: Keys that the native kernel lists of one query: longer lists are no longer short beside the scores.
MOST_NATIVE_KEYS = 64


@dataclass(frozen=True)
class Options:
    """Options of statistics; see `attention_statistics`."""

    top_k: int = 8
    map_size: int = 128
    map_pooling: Literal["mass", "max"] = "mass"
    sink_keys: int = 1
    offsets: tuple[int, ...] = (-1,)


@dataclass(eq=False)
class Statistic(ABC):
    """One quantity, gathered block by block, or read from what the native kernel writes.

    A row may come in several blocks, of some of its columns each, whose weights are those of the whole row.

    Args:
        call: all of it, or a part.
        options: see `attention_statistics`.
        counted: bool (B, 1, L, 1), the queries in Q; ``None`` for all.
        queries: those that are chosen, of the whole call.
        totals: finishes what is added up over the queries of one process.
    """

    name: ClassVar[str]
    #: In one line, for every list of statistics.
    meaning: ClassVar[str]
    #: Results of the same shape that come with it, and their meanings.
    beside: ClassVar[dict[str, str]] = {}
    #: Of the results: L queries and S keys that are here, n chosen queries; other sizes are the statistic's own.
    shape: ClassVar[tuple[str, ...]] = ("B", "H", "L")
    #: What it is computed of.
    of: ClassVar[Literal["weights", "scores", "values"]] = "weights"
    #: Whether `per="kv_head"` may average it over query heads.
    averaged: ClassVar[bool] = True
    #: Whether the number of several batch items is the largest of theirs; else it is their mean.
    largest: ClassVar[bool] = False

    call: AttentionCall
    options: Options
    counted: Tensor | None
    queries: Queries | None = None
    totals: Totals = ONE_PROCESS

    def __post_init__(self) -> None:
        grid = self.call.grid
        # Of L queries, those that are here.
        self.row_shape = (grid.batch_size, grid.num_heads, self.call.query.shape[2])
        self.column_shape = (grid.batch_size, grid.num_heads, grid.key_length)

    @classmethod
    def results(cls) -> tuple[str, ...]:
        """Names of what it gives."""
        return cls.name, *cls.beside

    @classmethod
    def labels(cls, options: Options) -> tuple[str, ...]:
        """What summaries and pictures call the numbers that it has for each head."""
        return cls.results() if cls.shape in (Statistic.shape, ("B", "H")) else ()

    def begin(self) -> None:
        """Make the tensors that blocks are added to. Default: `found`, one number per query that is here."""
        self.found = self.zeros(*self.row_shape)

    @abstractmethod
    def add(self, rows: BlockRows) -> None:
        """Add a block."""

    def result(self) -> dict[str, Any]:
        """The finished tensors by name, `found` by default, with `totals` over queries."""
        return {self.name: self.found}

    def native(self) -> dict[str, Any] | None:
        """Tensors that the native kernel writes in place of blocks, and sizes, as ``_native/problem.h`` names them.

        ``None``, the default: it is computed by blocks, beside those that are written.
        """
        return None

    def read(self, written: dict[str, Any]) -> dict[str, Any]:
        """The finished tensors by name, after the native kernel wrote. Default: `result`, from the tensors of `begin`.

        Args:
            written: what all statistics of the call named; and in any case ``largest`` and ``visible`` (B, H, L), the
                largest score (−∞ where nothing is visible) and how many keys are visible; ``output`` with values.
        """
        return self.result()

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.call.spec.compute_dtype, device=self.call.query.device)

    def put(self, target: Tensor, rows: BlockRows, value: Tensor) -> None:
        """Add (b, h, l, 1) to a (B, H, L) tensor."""
        target[rows.block.batch, rows.block.heads, rows.place] += value.squeeze(-1)
