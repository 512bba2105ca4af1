"""`Calls`: the calls of one layer in a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from .._call.call import Call
from .._checks import item_number, require_slice
from .._statistics.result import AttentionStatistics


class Calls(Sequence[AttentionStatistics]):
    """The calls of one layer, in order. The statistics of a single call are also attributes of this object."""

    def __init__(self) -> None:
        self.name = ""
        self.statistics: list[AttentionStatistics] = []
        self.saved: list[Call] = []
        self._root_calls: list[int] = []  # the number of the model's call, for each call here

    @classmethod
    def of_runs(cls, name: str, runs: Sequence[Calls]) -> Calls:
        """The calls of all runs of one module, in the order in which they ran."""
        calls = cls().named(name)
        order = sorted(
            (root, run, place) for run, each in enumerate(runs) for place, root in enumerate(each._root_calls)
        )
        for root, run, place in order:
            calls._root_calls.append(root)
            calls.statistics.append(runs[run].statistics[place])
            calls.saved += runs[run].saved[place : place + 1]
        return calls

    def named(self, name: str) -> Calls:
        """The same object with this name, for its errors. A module gets another one when it runs again."""
        self.name: str = name
        return self

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

    def add(self, root_call: int, statistics: AttentionStatistics, kept: Call | None) -> None:
        """Add a call. Of `kept`, copies of query and key are saved. The key replaces the value.

        Views would keep a full projection or cache in memory, and caches are overwritten in place.
        """
        self._root_calls.append(root_call)
        self.statistics.append(statistics)
        if kept is not None:
            query, key = kept.query.detach().clone(), kept.key.detach().clone()
            self.saved.append(kept.alike(query=query, key=key, value=key, bound_=None))

    def __repr__(self) -> str:
        return f"Calls({self.name!r}, {len(self.statistics)} calls)"
