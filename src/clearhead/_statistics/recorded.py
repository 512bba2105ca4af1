"""What was recorded of a model, or given of it: statistics by module, and what can be read from its calls later."""

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
    """From the names of modules, in the order in which they ran, to the statistics of their calls."""

    __slots__ = ()

    @abstractmethod
    def name_of(self, layer: int | str) -> str:
        """The module name of a layer given by its number in running order, or by name."""

    @abstractmethod
    def kept_call(self, layer: int | str, call: int = 0) -> AttentionCall:
        """The query and key of one call with its mask; the key stands in for the values.

        Raises:
            RecordError: if they were not kept.
        """

    @abstractmethod
    def patches(self, layer: int | str) -> PatchLayout:
        """Where the tokens of a vision model's layer lie on its input, from the model's own configuration.

        Raises:
            ArgumentError: if that is not known of the model.
        """

    def weights(
        self, layer: int | str, head: int | None = None, queries: Queries | None = None, call: int = 0
    ) -> Tensor:
        """Exact weights of one call, computed now; of a record made with ``keep="queries_keys"``.

        Args:
            layer: number in the order in which modules first ran, or name.
            head: one head, or ``None`` for all.
            queries: which queries; default all.
            call: which call of the module. Default the first.

        Returns:
            (B, n, S) for one head, else (B, H, n, S).

        Raises:
            RecordError: if queries and keys were not kept.
            ArgumentError: for a layer, head or row that is not there.
        """
        kept = self.kept_call(layer, call)
        head = None if head is None else index("head", head, kept.grid.num_heads) % kept.grid.num_heads
        return exact_weights(kept, row_numbers(queries, kept.grid.query_length, "queries"), head)

    def rollout(
        self, targets: Sequence[int] | Tensor, *, layers: Sequence[int | str] | None = None, residual: float = 0.5
    ) -> Tensor:
        """Attention rollout from target tokens of the last layer to the input; needs ``keep="queries_keys"``.

        Args:
            targets: token numbers, (t,).
            layers: which layers, first to last. Default all.
            residual: share of the residual connection. Default 0.5.

        Returns:
            (B, t, L): r ← residual · r + (1 − residual) · r A_l from the last layer to the first, A_l the mean of
            layer l's weights over heads.

        Raises:
            RecordError: if queries and keys were not kept. And what `rollout` raises.
        """
        chosen = list(self) if layers is None else items("layers", layers, "a list of names or numbers")
        return rollout([self.kept_call(layer) for layer in chosen], targets, residual)

    def summary(self) -> Summary:
        """One number per head for every statistic that has one; print it for a layers × heads table."""
        return summarize(self)
