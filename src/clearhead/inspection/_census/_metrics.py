"""The metrics of a census: numbers per query, the queries that each counts, and what else is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Metric(NamedTuple):
    """One number per query and head.

    Args:
        name: its name.
        meaning: the number in one line.
        counts: the queries that count, besides that they are no padding and see a key.
    """

    name: str
    meaning: str
    counts: str = "all"


#: Statistics of `attention_statistics`. The name of the last one there is ``top_logit``.
STATISTICS = (
    Metric("entropy", "−Σ_j p_ij ln p_ij, in nats"),
    Metric("confidence", "the largest weight"),
    Metric("distance", "Σ_j p_ij · |i − j|, in tokens; between patches of an image their distance in patches"),
    Metric("output_norm", "the norm of the head's output"),
    Metric("top_logit", "the largest score"),
)
#: Weights on some of the keys.
MASSES = (
    Metric("special", "the weight on special tokens", "those that see a special token"),
    Metric("first", "the weight on the first token that the text's mask shows", "those that see it"),
    Metric("previous", "the weight on the token before", "those that see it"),
    Metric("same", "the weight on the token itself", "those that see it"),
    Metric("next", "the weight on the token after", "those that see it"),
    Metric("window", "the weight on tokens at most `window` positions away", "those that see one"),
    Metric("duplicate", "the weight on the same token at earlier positions", "those that see one"),
    Metric("duplicate_later", "the weight on the same token at later positions", "those that see one"),
    Metric("induction", "the weight on the token after an earlier occurrence of the token", "those that see one"),
)
METRICS = (*STATISTICS, *MASSES)
NAMES = tuple(metric.name for metric in METRICS)

#: Kinds of heads, the most telling first: the mass whose mean names them, and the least mean that does.
KINDS = {
    **dict.fromkeys(("induction", "duplicate", "duplicate_later", "previous", "next", "same", "first", "special"), 0.4),
    "window": 0.8,
}


class Pair(NamedTuple):
    """The weight from some tokens to others.

    Args:
        name: of the metric.
        queries, keys: their ids.
    """

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Counted:
    """What a census counts.

    Args:
        special: ids of special tokens.
        window: the reach of the mass ``window``, in positions.
        strongest: how many texts each metric of a head keeps.
        pairs: further metrics.
    """

    special: tuple[int, ...] = ()
    window: int = 5
    strongest: int = 8
    pairs: tuple[Pair, ...] = ()

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All metrics, those of pairs last."""
        counts = "those of the pair's first tokens that see one of its second"
        chosen = (Metric(name, "the weight on chosen tokens from chosen tokens", counts) for name, _, _ in self.pairs)
        return (*METRICS, *chosen)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all metrics."""
        return (*NAMES, *(pair.name for pair in self.pairs))
