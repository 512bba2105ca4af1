"""What a picture needs of a record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from .._call.spec import AttentionCall
from .._checks import shown
from .._statistics.result import AttentionStatistics
from .._statistics.summary import Summary
from .._weights import Queries
from ..errors import DTypeError
from ._patches import PatchLayout


class Recorded(Protocol):
    """A `clearhead.record` after its block, or weights that were `given`."""

    def __iter__(self) -> Iterator[str]:
        """Names of the modules, in the order in which they ran."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, name: str, /) -> Sequence[AttentionStatistics]:
        """The calls of a module."""
        ...

    def name_of(self, layer: int | str) -> str:
        """The module of a layer given by number or name."""
        ...

    def weights(
        self, layer: int | str, head: int | None = None, queries: Queries | None = None, call: int = 0
    ) -> Tensor:
        """Exact weights of one call."""
        ...

    def kept_call(self, layer: int | str, call: int = 0) -> AttentionCall:
        """Query and key of one call; raises `RecordError` if they were not kept."""
        ...

    def patches(self, layer: int | str) -> PatchLayout:
        """Where the tokens of a vision model's layer lie on its input."""
        ...

    def rollout(
        self, targets: Sequence[int] | Tensor, *, layers: Sequence[int | str] | None = None, residual: float = 0.5
    ) -> Tensor:
        """Attention rollout."""
        ...

    def summary(self) -> Summary:
        """One number per head and statistic."""
        ...


def require_record(rec: object) -> None:
    """Raise unless a picture can be made of it."""
    if isinstance(rec, type) or not all(hasattr(rec, name) for name in ("name_of", "kept_call", "rollout", "summary")):
        expected = "a clearhead.record, or clearhead.plot.given(weights)"
        raise DTypeError("rec", expected=expected, got=shown(rec))
