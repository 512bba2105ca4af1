"""Few cases in which every combination of values of some factors occurs, instead of the product of all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]
_DRAWS = 40  # cases of which the one that covers most is taken


def pairs(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Every pair of factors, as `covering` takes them."""
    return list(combinations(names, 2))


def covering(
    factors: Mapping[str, Sequence[Any]],
    together: Iterable[tuple[str, ...]],
    possible: Callable[[Case], bool] = lambda case: True,
) -> list[Case]:
    """Cases in which every combination of values of the factors that are named together occurs; greedily.

    The same in every run: draws are seeded.

    Args:
        factors: the values of each.
        together: names of factors, two or more each.
        possible: whether a case can be run; combinations that occur in none of its draws are left out.
    """
    rng = random.Random(20170612)
    missing: dict[tuple[tuple[str, ...], tuple[Any, ...]], None] = {
        (names, values): None for names in together for values in product(*(factors[name] for name in names))
    }
    wanted = {names for names, _ in missing}
    cases: list[Case] = []
    while missing:
        names, values = first = next(iter(missing))
        best, most = None, 0
        for _ in range(_DRAWS):
            case = {name: rng.choice(choices) for name, choices in factors.items()}
            case |= dict(zip(names, values, strict=True))
            count = sum(_combination(case, item) in missing for item in wanted) if possible(case) else 0
            if count > most:
                best, most = case, count
        if best is None:
            del missing[first]
            continue
        cases.append(best)
        for item in wanted:
            missing.pop(_combination(best, item), None)
    return cases


def _combination(case: Case, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    return names, tuple(case[name] for name in names)
