"""The base of statistics: meaning, shape, and forms for blocks, the native and the Triton kernels.

Notation: p_ij are the weights and s_ij the scores of `attention`. Q are the counted queries: all, or those of
`query_mask`. A masked weight is exactly 0. A fully masked query has p = 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .._call.call import Call
from .._weights import Queries
from ..kernels._block_rows import BlockRows
from .masses import Masses
from .totals import ONE_PROCESS, Totals

#: The kernels list at most this many keys per query. Longer lists take memory comparable to the scores.
MOST_LISTED_KEYS = 64


@dataclass(frozen=True)
class Options:
    """Options of statistics; see `attention_statistics`."""

    top_k: int = 8
    map_size: int = 128
    map_pooling: Literal["mass", "max"] = "mass"
    sink_keys: int = 1
    offsets: tuple[int, ...] = (-1,)
    masses: Masses = field(default_factory=Masses)
    #: Whether few keys are scored in double precision on the CPU.
    exact: bool = True


@dataclass(eq=False)
class Statistic(ABC):
    """One quantity, accumulated over blocks, or read from buffers that the native or Triton kernels write.

    Several blocks may hold the same row, with some of its columns each. Their weights are normalised over all columns.

    Args:
        call: the call. Its tensors may be the shards of one process.
        options: see `attention_statistics`.
        counted: bool (B, 1, L, 1), the queries in Q; ``None`` for all.
        queries: the chosen queries of the full call.
        totals: merges sums over the queries of this process with those of other processes.
    """

    name: ClassVar[str]
    #: The formula in one line, for lists of statistics.
    meaning: ClassVar[str]
    #: Additional results of the same shape, and their meanings.
    beside: ClassVar[dict[str, str]] = {}
    #: The dimensions of the results. L and S count the queries and keys of this process, n the chosen queries.
    shape: ClassVar[tuple[str, ...]] = ("B", "H", "L")
    #: The tensors from which it is computed.
    of: ClassVar[Literal["weights", "scores", "values"]] = "weights"
    #: Whether ``per="kv_head"`` may average it over query heads.
    averaged: ClassVar[bool] = True
    #: The argument without which there is nothing to compute.
    argument: ClassVar[str | None] = None
    #: Whether batch items are combined by their maximum, not by their mean.
    by_maximum: ClassVar[bool] = False

    call: Call
    options: Options
    counted: Tensor | None
    queries: Queries | None = None
    totals: Totals = ONE_PROCESS

    def __post_init__(self) -> None:
        grid = self.call.grid
        # The query of the call has the l queries of this process, its grid all L.
        self.row_shape = (grid.batch_size, grid.num_heads, self.call.query.shape[2])
        self.column_shape = (grid.batch_size, grid.num_heads, grid.key_length)

    @classmethod
    def results(cls) -> tuple[str, ...]:
        """Names of its results."""
        return cls.name, *cls.beside

    @classmethod
    def labels(cls, options: Options) -> tuple[str, ...]:
        """Labels, in summaries and pictures, of its numbers per head."""
        return cls.results() if cls.shape in (Statistic.shape, ("B", "H")) else ()

    def begin(self) -> None:
        """Make the tensors to which blocks are added. Default: `accumulator`, one number per query."""
        self.accumulator = self.zeros(*self.row_shape)

    @abstractmethod
    def add(self, rows: BlockRows) -> None:
        """Add a block."""

    def result(self) -> dict[str, Any]:
        """The final tensors by name. Sums over queries go through `totals`. Default: `accumulator`."""
        return {self.name: self.accumulator}

    def kernel_form(self) -> dict[str, Any] | None:
        """Arguments for kernels, by the names of `Statistics` in ``_native/problem.h``. Default: blocks compute it.

        A tuple is the shape of a buffer that the kernels write.
        """
        return None

    def native_form(self) -> dict[str, Any] | None:
        """The arguments for the native kernel."""
        return self.kernel_form()

    def triton_form(self) -> dict[str, Any] | None:
        """The arguments for the Triton kernels. They write the buffers that `_triton_statistics.statistics` names."""
        return self.kernel_form()

    def read(self, buffers: dict[str, Any]) -> dict[str, Any]:
        """The final tensors by name, after the native or Triton kernels ran. Default: the buffer of its own name.

        Args:
            buffers: those of all statistics of the call, and always ``largest``, the largest score of each query.
        """
        return {self.name: buffers[self.name]}

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.call.layout.compute_dtype, device=self.call.query.device)

    def put(self, target: Tensor, rows: BlockRows, value: Tensor) -> None:
        """Add (b, h, l, 1) to a (B, H, L) tensor."""
        target[rows.block.batch, rows.block.heads, rows.place] += value.squeeze(-1)
