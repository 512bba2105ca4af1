"""What tests of the native kernel share: the instruction sets of this machine, and the mark for machines without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import settings

from clearhead._call.spec import Layout
from clearhead._native import best_first, extension, instruction_sets, use_instruction_set
from clearhead.kernels._native_arguments import OPERANDS, NativeArguments
from clearhead.kernels._native_plan import NativePlan, plan_of
from tests.support.budgets import in_turn

__all__ = ["OPERANDS", "SETS", "Layout", "NativeArguments", "NativePlan", "best_first", "extension"]
__all__ += ["fewer_unless_best", "needs_native", "on_every_set", "plan_of", "threads", "use_instruction_set"]

SETS = instruction_sets()

needs_native = pytest.mark.skipif(not SETS, reason="the extension was not built here")


def fewer_unless_best(instructions: str) -> settings:
    """All instruction sets share their source, so all but the best (and ``""``, none) get a third of the budget."""
    budget = settings.default.max_examples
    return settings(max_examples=budget if instructions in ("", *SETS[:1]) else budget // 3)


def on_every_set(
    cases: Mapping[str, Iterable[Any]],
    turns: Mapping[str, Iterable[Any]],
    fixture: str = "instructions",
    whole: Sequence[str] = SETS[:1],
    rest: Sequence[str] = SETS[1:],
) -> pytest.MarkDecorator:
    """Parametrize by `cases`, `turns` and instruction sets, whose source is one.

    The best set runs the whole product; the others run the product of `cases`, each with the next of `turns`.
    """
    sets = {fixture: (*whole, *rest)}
    return in_turn({**sets, **cases}, turns, whole=lambda name, *_: name in whole, indirect=[fixture])


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
