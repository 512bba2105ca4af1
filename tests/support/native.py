"""What tests of the native kernel share: the instruction sets of this machine, and the mark for machines without it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import settings

from clearhead._native import instruction_sets

__all__ = ["SETS", "fewer_unless_best", "needs_native", "on_every_set"]

SETS = instruction_sets()

needs_native = pytest.mark.skipif(not SETS, reason="the extension was not built here")


def fewer_unless_best(instructions: str) -> settings:
    """All instruction sets share their source, so the best one gets the whole budget and the others a third."""
    budget = settings.default.max_examples
    return settings(max_examples=budget if instructions == SETS[0] else budget // 3)


def on_every_set(
    cases: Mapping[str, Iterable[Any]],
    turns: Mapping[str, Iterable[Any]],
    fixture: str = "instructions",
    whole: Sequence[str] = SETS[:1],
    rest: Sequence[str] = SETS[1:],
) -> pytest.MarkDecorator:
    """Parametrize by `cases`, `turns` and instruction sets, whose source is one.

    The best set runs the whole product. The others run the product of `cases`, each with the next combination of
    `turns`; what is left of their product is marked ``slow``.
    """
    kinds, combinations = list(itertools.product(*cases.values())), list(itertools.product(*turns.values()))
    found: list[Any] = []
    for number, name in enumerate((*whole, *rest)):
        for kind, turn in itertools.product(range(len(kinds)), range(len(combinations))):
            chosen = name in whole or (kind + number) % len(combinations) == turn
            marks = () if chosen else (pytest.mark.slow,)
            found.append(pytest.param(*kinds[kind], *combinations[turn], name, marks=marks))
    return pytest.mark.parametrize((*cases, *turns, fixture), found, indirect=[fixture])
