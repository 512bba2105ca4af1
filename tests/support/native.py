"""What tests of the native kernel share: the instruction sets of this machine, and the mark for machines without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import settings

from clearhead._native import best_first, extension, instruction_set, instruction_sets
from clearhead.kernels._native_arguments import NativeArguments
from clearhead.kernels._native_plan import plan_of
from tests.support.budgets import in_turn

__all__ = ["FLOAT_SETS", "SETS", "NativeArguments", "best_first", "extension"]
__all__ += ["fewer_unless_best", "needs_native", "on_every_set", "on_sets_of_dtype", "plan_of", "threads"]
__all__ += ["use_instruction_set"]

SETS = tuple(instruction_sets())
_AVX512 = [name for name in SETS if name in ("amx", "avx512_bf16", "avx512")]
#: Sets of pairs have passes of their own for bfloat16 only; the others are AVX-512's (`with_pairs`).
FLOAT_SETS = tuple(name for name in SETS if name not in _AVX512[1:])

needs_native = pytest.mark.skipif(not SETS, reason="the extension was not built here")


#: Both dtypes, each on the sets whose passes of it differ.
on_sets_of_dtype = pytest.mark.parametrize(
    ("dtype", "instructions"),
    [*((torch.float32, name) for name in FLOAT_SETS), *((torch.bfloat16, name) for name in SETS)],
    ids=str,
    indirect=["instructions"],
)


def fewer_unless_best(instructions: str) -> settings:
    """All instruction sets share their source, so all but the best (and ``""``, none) get a third of the budget."""
    budget = settings.default.max_examples
    return settings(max_examples=budget if instructions in ("", *SETS[:1]) else budget // 3)


def on_every_set(
    cases: Mapping[str, Iterable[Any]],
    turns: Mapping[str, Iterable[Any]],
    fixture: str = "instructions",
    whole: Sequence[str] = FLOAT_SETS[:1],
    rest: Sequence[str] = FLOAT_SETS[1:],
    indirect: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """Parametrize by `cases`, `turns` and instruction sets, whose source is one.

    The best set runs the whole product; the others run the product of `cases`, each with the next of `turns`.
    """
    sets = {fixture: (*whole, *rest)}
    return in_turn({**sets, **cases}, turns, whole=lambda name, *_: name in whole, indirect=[fixture, *indirect])


@contextmanager
def use_instruction_set(name: str) -> Iterator[None]:
    """Run the native kernel on one of `SETS` inside the block."""
    numbers = instruction_sets()
    before = dict(numbers)
    chosen_first = {name: before[name]} | before
    try:
        numbers.clear()
        numbers.update(chosen_first)
        assert instruction_set() == name
        yield
    finally:
        numbers.clear()
        numbers.update(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on so many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
