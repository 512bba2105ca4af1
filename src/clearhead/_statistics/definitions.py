"""The list of all statistics, and tables derived from their declarations."""

from __future__ import annotations

from collections.abc import Sequence

from .over_queries import Map, MaxLogit, RawMaxLogit, Received, WeightAtOffset
from .per_query import Confidence, Distance, Entropy, LostMass, Sink, TopLogit
from .statistic import Statistic
from .vectors import Extremes, HeadAverage, MassOf, Output, OutputNorm, Rows, TopKeys

STATISTICS: dict[str, type[Statistic]] = {
    kind.name: kind
    for kind in (
        Entropy,
        Received,
        MaxLogit,
        RawMaxLogit,
        Confidence,
        TopLogit,
        TopKeys,
        Extremes,
        Sink,
        Distance,
        LostMass,
        WeightAtOffset,
        MassOf,
        Map,
        HeadAverage,
        Output,
        OutputNorm,
        Rows,
    )
}

#: Results with one number per query, (B, H, L).
PER_QUERY = tuple(result for kind in STATISTICS.values() if kind.shape == Statistic.shape for result in kind.results())
#: Statistics that combine batch items and calls by their maximum.
BY_MAXIMUM = frozenset(name for name, kind in STATISTICS.items() if kind.by_maximum)
#: Statistics of the weights that need no argument, except those that hold weights of single queries and keys.
OF_WEIGHTS = tuple(
    name
    for name, kind in STATISTICS.items()
    if kind.of == "weights" and kind.argument is None and kind.shape[-2:] not in (("L", "S"), ("n", "S"))
)
#: The dimensions of each result, as in `Statistic.shape`, and of ``sees``.
SHAPES = {result: kind.shape for kind in STATISTICS.values() for result in kind.results()} | {"sees": Statistic.shape}
#: The list of statistics in a docstring.
LIST = f"\n{' ' * 12}".join(
    f"* ``{kind.name}`` ({', '.join(kind.shape)}): {kind.meaning}"
    + "".join(f"; with ``{name}``: {meaning}" for name, meaning in kind.beside.items())
    for kind in STATISTICS.values()
)


def need_values(names: Sequence[str]) -> bool:
    """Whether any of these statistics is computed from values."""
    return any(STATISTICS[name].of == "values" for name in names)
