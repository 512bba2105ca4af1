"""Two records in pairs of heads: which rows of theirs are comparable, and how far those are apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from .._statistics.distributions import jensen_shannon
from .._statistics.recorded import Recorded
from .._statistics.result import AttentionStatistics
from ..errors import ArgumentError, RecordError, ShapeError
from ._alignment import Alignment, align, same_places
from ._divergence import HeadPair
from ._language import say
from ._sections import Section, extent_of, find_sections, fitted, number_of_calls
from ._tokens import Tokens

#: The first of these that both records have replaces the divergence. All but the last two lie in [0, 1].
STAND_INS = ("normalized_entropy", "confidence", "sink", "distance", "entropy")


class ComparedRecords:
    """Two records with the same layers and heads, paired: what `Comparison` is made of, without page and pictures."""

    def __init__(
        self, first: Recorded, second: Recorded, tokens: list[Tokens] | None, other_tokens: list[Tokens] | None
    ) -> None:
        self.records: tuple[Recorded, Recorded] = (first, second)
        _require_same_heads(first, second)
        self.texts: tuple[list[Tokens] | None, list[Tokens] | None]
        self.texts = (tokens, tokens if other_tokens is None else other_tokens)
        if tokens is None and other_tokens is not None:
            raise ArgumentError("tokens", expected="those of the first record too", got="None")
        #: Module of the first record → module of the second, and → numbers of its heads.
        self.modules: dict[str, str] = dict(zip(first, second, strict=True))
        self.heads: dict[str, tuple[int, ...]] = {name: first[name][0].heads for name in first}
        self._pairs: dict[tuple[str, int], HeadPair] = {}
        self._reason: _Incomparable | None = None
        try:
            self._pair()
        except _Incomparable as reason:
            self._reason = reason

    @property
    def by(self) -> str:
        """``"divergence"``, or the statistic that replaces it if weights cannot be compared."""
        return "divergence" if self._reason is None else self._stand_in()

    @property
    def note(self) -> str:
        """A sentence about the compared tokens."""
        if self._reason is not None:
            return say("{0} Heads are compared by their {1}.", say(*self._reason.args), self._stand_in())
        keys = [alignment.keys for pair in self._pairs.values() for alignment in pair.alignments]
        if all(pairs.whole for pairs in keys):
            return say("Every row is compared with the same row of the other.")
        compared, least = sum(len(pairs) for pairs in keys), sum(max(pairs.lengths) for pairs in keys)
        return say(
            "Tokens agree in {0} % of the places. Only their rows are compared. Keys without a counterpart are added "
            "up into one key.",
            f"{100 * compared / least:.0f}",
        )

    @cached_property
    def divergence(self) -> dict[str, Tensor]:
        """Module of the first record → (H,): Jensen–Shannon divergence of the heads' weights in nats, 0 … ln 2.

        ::

            m = (p + q) / 2        JS(p, q) = ½ Σ_j p_j ln(p_j / m_j) + ½ Σ_j q_j ln(q_j / m_j)

        (Lin, "Divergence measures based on the Shannon entropy", 1991), the mean over rows that are no padding and see
        a key in both records, of all batch items and calls. Keys without a counterpart, and sinks, count as one key.

        Raises:
            RecordError: if queries and keys were not kept in both records, or the texts cannot be paired.
        """
        self.require_weights()
        return {name: self._mean_divergence(name) for name in self.modules}

    @cached_property
    def differences(self) -> dict[str, dict[str, Tensor]]:
        """Statistic → module of the first record → (H,): the second's `summary` minus the first's."""
        first, second = (rec.summary().values for rec in self.records)
        return {
            statistic: {
                name: second[statistic][self.modules[name]].cpu() - values.cpu() for name, values in modules.items()
            }
            for statistic, modules in first.items()
            if statistic in second
        }

    def scores(self) -> dict[str, Tensor]:
        """Module of the first record → (H,) ≥ 0, the score that `by` names."""
        if self._reason is None:
            return self.divergence
        return {name: values.abs() for name, values in self.differences[self._stand_in()].items()}

    def ranked(self) -> list[tuple[str, int, float]]:
        """Module, head and score of every head, the most different first.

        Example:
            >>> import torch
            >>> from clearhead.plot import given
            >>> weights = torch.stack([torch.eye(3), torch.full((3, 3), 1 / 3)])
            >>> given([weights]).compare(given([torch.eye(3).expand(2, 3, 3)])).ranked()[0]
            ('0', 1, 0.3183)
        """
        return ranked_heads(self.scores(), self.heads)

    def require_weights(self) -> None:
        """Raise `RecordError` unless weights can be compared."""
        if self._reason is not None:
            raise RecordError(f"compare: {self._reason} Comparison.differences has the heads' statistics.")

    def pair(self, name: str, call: int) -> HeadPair:
        """One module of the first record in one call, beside that of the second."""
        return self._pairs[name, call]

    def __repr__(self) -> str:
        heads = sum(map(len, self.heads.values()))
        return f"<comparison of {heads} heads by {self.by}>"

    def _pair(self) -> None:
        counts = [number_of_calls(rec) for rec in self.records]
        if counts[0] != counts[1]:
            raise _Incomparable("The records hold {0} and {1} calls.", *counts)
        for section in find_sections(self.records[0], two_texts=False):
            for name in section.layers:
                for call in range(counts[0]):
                    self._pair_call(section, (name, self.modules[name]), call)

    def _pair_call(self, section: Section, names: tuple[str, str], call: int) -> None:
        both = tuple(zip(self.records, names, strict=True))
        try:
            for rec, name in both:
                rec.kept_call(name, call)
        except RecordError:
            raise _Incomparable("Queries and keys were not kept in both records (keep='queries_keys').") from None
        first, second = (rec[name][call] for rec, name in both)
        if first.batch_size != second.batch_size:
            raise _Incomparable("The records hold batches of {0} and {1}.", first.batch_size, second.batch_size)
        items = range(first.batch_size)
        alignments = tuple(self._aligned(section, (first, second), call * first.batch_size, item) for item in items)
        self._pairs[names[0], call] = HeadPair(self.records, names, call, section.same, alignments)

    def _aligned(
        self, section: Section, statistics: Sequence[AttentionStatistics], before: int, item: int
    ) -> Alignment:
        """Pair one batch item of two calls, `before` of which others come."""
        extents = [extent_of(each, item) for each in statistics]
        lengths = [stop - start for start, stop in extents]
        if self.texts[0] is None or self.texts[1] is None or section.kind == "encoder":
            queries = same_places(*lengths)
            reason = _Incomparable("The texts have {0} and {1} tokens; tokens= would pair them.", *lengths)
        else:
            texts = [
                fitted(what, given, before + item, each.query_length, extent)
                for what, given, each, extent in zip(
                    ("tokens", "other_tokens"), self.texts, statistics, extents, strict=True
                )
            ]
            queries = align(*texts)
            reason = _Incomparable("The tokens agree in {0} places only, of {1} and {2}.", len(queries), *lengths)
        if queries is None or not queries.enough:
            raise reason
        sizes = [each.key_length for each in statistics]
        keys = queries if section.same else same_places(*sizes)
        if keys is None:
            raise _Incomparable("The texts looked at have {0} and {1} tokens.", *sizes)
        return Alignment(queries, keys)

    def _stand_in(self) -> str:
        for statistic in STAND_INS:
            if statistic in self.differences:
                return statistic
        raise RecordError(
            "other",
            expected=f"a statistic that both records have, one of {', '.join(STAND_INS)}",
            got="none",
            fix="Record both with keep='queries_keys'.",
        )

    def _mean_divergence(self, name: str) -> Tensor:
        heads = len(self.heads[name])
        total, count = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
        for call in range(len(self.records[0][name])):
            pair = self.pair(name, call)
            for items in pair.groups():
                counted = pair.counted(items)
                for part, p, q in pair.blocks(items):
                    values = jensen_shannon(p, q)  # (b, H, n)
                    total += (values * counted[:, :, part]).sum((0, 2))
                count += counted.sum((0, 2))
        return total / count.clamp(min=1)


def ranked_heads(scores: Mapping[str, Tensor], heads: Mapping[str, Sequence[int]]) -> list[tuple[str, int, float]]:
    """Module, head and score of every head, the largest score first."""
    pairs = [
        (name, head, value)
        for name, values in scores.items()
        for head, value in zip(heads[name], values.tolist(), strict=True)
    ]
    return sorted(pairs, key=lambda each: -each[2])


class _Incomparable(Exception):
    """Why the weights of two records cannot be compared: a sentence for `say`, and its values."""

    def __str__(self) -> str:
        english, *values = self.args
        return english.format(*values)


def _require_same_heads(first: Recorded, second: Recorded) -> None:
    shapes = [[rec[name][0].heads for name in rec] for rec in (first, second)]
    if not shapes[0] or not shapes[1]:
        raise ArgumentError("rec and other", expected="records with calls", got="an empty one")
    if shapes[0] != shapes[1]:
        texts = [f"{len(shape)} layers with {_counts(shape)} heads" for shape in shapes]
        if texts[0] == texts[1]:
            texts = [f"heads {', '.join(map(str, shape[0]))}" for shape in shapes]
        raise ShapeError("other", expected=texts[0], got=texts[1])


def _counts(heads: list[tuple[int, ...]]) -> str:
    counts = sorted({len(each) for each in heads})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
