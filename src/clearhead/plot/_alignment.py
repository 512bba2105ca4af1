"""Which tokens of two texts are the same, and which rows and columns of two calls that makes comparable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from ._tokens import Tokens

#: Texts of which less is the same are not compared token by token.
LEAST_SHARE = 0.5


@dataclass(frozen=True)
class Pairs:
    """Places in two texts that hold the same token, ascending in both, and the lengths of the texts."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    lengths: tuple[int, int]

    def __len__(self) -> int:
        return len(self.first)

    @property
    def whole(self) -> bool:
        """Whether every token of both texts has a counterpart."""
        return (len(self), len(self)) == self.lengths

    @property
    def enough(self) -> bool:
        """Whether at least half of both texts has a counterpart."""
        return len(self) > 0 and len(self) >= LEAST_SHARE * max(self.lengths)


@dataclass(frozen=True)
class Alignment:
    """The comparable queries and keys of one batch item, counted without padding."""

    queries: Pairs
    keys: Pairs


def align(first: Tokens, second: Tokens) -> Pairs:
    """Pair the tokens that two texts share, in order.

    Special tokens count only beside others: two texts that share nothing but ``[CLS]`` and ``[SEP]`` share nothing.

    Example:
        >>> align(Tokens(["it", "was", "too", "tired"]), Tokens(["it", "was", "wide"]))
        Pairs(first=(0, 1), second=(0, 1), lengths=(4, 3))
    """
    matcher = SequenceMatcher(None, first.names, second.names, autojunk=False)
    places = [(block.a + step, block.b + step) for block in matcher.get_matching_blocks() for step in range(block.size)]
    lengths = (len(first), len(second))
    if all(first.special[a] for a, _ in places) and not all(first.special):
        places = []
    return Pairs(tuple(a for a, _ in places), tuple(b for _, b in places), lengths)


def same_places(first: int, second: int) -> Pairs | None:
    """Pair two texts of equal length place by place; ``None`` for other lengths."""
    places: Sequence[int] = range(first)
    return Pairs(tuple(places), tuple(places), (first, second)) if first == second else None
