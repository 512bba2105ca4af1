"""The base of records: statistics by module, and weights computed from saved calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from .._call.call import AttentionCall
from .._checks import index, items
from .._weights import Queries, row_numbers
from ..kernels._weights import exact_weights
from .patch_layout import PatchLayout
from .result import AttentionStatistics
from .rollout import rollout
from .summary import Summary, summarize


class Recorded(Mapping[str, Sequence[AttentionStatistics]]):
    """A mapping from module names, in running order, to the statistics of the modules' calls."""

    __slots__ = ()

    @abstractmethod
    def name_of(self, layer: int | str) -> str:
        """The module name of a layer. `layer` is its number in running order, or its name."""

    @abstractmethod
    def kept_call(self, layer: int | str, call: int = 0) -> AttentionCall:
        """The query, key and mask of one call. Its value is the key.

        Raises:
            RecordError: if queries and keys were not saved.
        """

    @abstractmethod
    def patches(self, layer: int | str) -> PatchLayout:
        """The positions of a vision model's tokens on its input, from the model's configuration.

        Raises:
            ArgumentError: if the model is not a supported vision model.
        """

    def weights(
        self, layer: int | str, head: int | None = None, queries: Queries | None = None, call: int = 0
    ) -> Tensor:
        """Compute exact weights of one call. The record needs ``keep="queries_keys"``.

        Args:
            layer: its number in running order, or its name.
            head: one head, or ``None`` for all.
            queries: the chosen queries. Default all.
            call: the number of the call of this module. Default the first.

        Returns:
            (B, n, S) for one head, else (B, H, n, S).

        Raises:
            RecordError: if queries and keys were not saved.
            ArgumentError: for a layer, head or row that does not exist.
        """
        saved = self.kept_call(layer, call)
        head = None if head is None else index("head", head, saved.grid.num_heads) % saved.grid.num_heads
        return exact_weights(saved, row_numbers(queries, saved.grid.query_length, "queries"), head)

    def rollout(
        self, targets: Sequence[int] | Tensor, *, layers: Sequence[int | str] | None = None, residual: float = 0.5
    ) -> Tensor:
        """Attention rollout from target tokens of the last layer to the input. It needs ``keep="queries_keys"``.

        Args:
            targets: token numbers, (t,).
            layers: the layers, first to last. Default all.
            residual: share of the residual connection. Default 0.5.

        Returns:
            (B, t, L). r ← residual · r + (1 − residual) · r A_l, from the last layer to the first. A_l is the mean of
            layer l's weights over heads.

        Raises:
            RecordError: if queries and keys were not saved.
            ShapeError, ArgumentError: for other layers than self-attention over the same tokens, or invalid arguments.
        """
        chosen = list(self) if layers is None else items("layers", layers, "a list of names or numbers")
        return rollout([self.kept_call(layer) for layer in chosen], targets, residual)

    def summary(self) -> Summary:
        """One number per head for each statistic that has one. Print it for a layers × heads table."""
        return summarize(self)
