"""Products of cases that share most of their code: a part of them in the ordinary run, the others in the slow one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def slow(*values: object) -> list[Any]:
    """Values of a parametrization that only ``pytest -m slow`` runs."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def in_turn(
    cases: Mapping[str, Iterable[Any]],
    turns: Mapping[str, Iterable[Any]],
    *,
    always: int = 0,
    whole: Callable[..., bool] = lambda *_: False,
    indirect: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """Parametrize by the product of `cases`, each with the next combination of `turns`; the others are ``slow``.

    Args:
        cases: names and values, all combinations of which run.
        turns: names and values that take turns.
        always: as many combinations of `turns`, from the first on, run in every case besides.
        whole: of a case's values: whether it runs with every combination of `turns`.
        indirect: names that are fixtures.
    """
    combinations = list(itertools.product(*turns.values()))
    others = len(combinations) - always
    result: list[Any] = []
    for case in itertools.product(*(enumerate(values) for values in cases.values())):
        values, turn = [value for _, value in case], always + sum(place for place, _ in case) % others
        for number, combination in enumerate(combinations):
            runs = number in (turn, *range(always)) or whole(*values)
            result.append(pytest.param(*values, *combination, marks=() if runs else (pytest.mark.slow,)))
    return pytest.mark.parametrize((*cases, *turns), result, indirect=indirect)
