"""`Calls`: the calls of one module in a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

from .._call.call import AttentionCall
from .._checks import item_number, require_slice
from .._statistics.result import AttentionStatistics


class Calls(Sequence[AttentionStatistics]):
    """The calls of one module, in order. The statistics of a single call are also attributes of this object."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.statistics: list[AttentionStatistics] = []
        self.saved: list[AttentionCall] = []

    @overload
    def __getitem__(self, index: int) -> AttentionStatistics: ...

    @overload
    def __getitem__(self, index: slice) -> list[AttentionStatistics]: ...

    def __getitem__(self, index: int | slice) -> AttentionStatistics | list[AttentionStatistics]:
        if not isinstance(index, slice):
            return self.statistics[item_number("index", index, len(self.statistics))]
        require_slice("index", index)
        return self.statistics[index]

    def __len__(self) -> int:
        return len(self.statistics)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "statistics":
            raise AttributeError(name)
        if len(self.statistics) == 1:
            return getattr(self.statistics[0], name)
        one = f"rec[{self.name!r}][0].{name}"
        count = f"{self.name}: called {len(self.statistics)} times."
        raise AttributeError(f"{count} Take one call with {one}, or fold the batches together with rec.reduce().")

    def keep(self, call: AttentionCall) -> None:
        """Save copies of the query and key of a call. The key replaces the value.

        Views would keep a full projection or cache in memory, and caches are overwritten in place.
        """
        query, key = call.query.detach().clone(), call.key.detach().clone()
        self.saved.append(replace(call, query=query, key=key, value=key, grid_=None, coverage_=None))

    def __repr__(self) -> str:
        return f"Calls({self.name!r}, {len(self.statistics)} calls)"
