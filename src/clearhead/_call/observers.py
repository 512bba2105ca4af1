"""Observers of `attention` in this thread: recorders that read a call, interventions that change its output."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from .._environment import listening, state
from .call import AttentionCall


class Observer(Protocol):
    """An object that receives every attention call of its thread.

    Args:
        recomputing: whether it changes outputs. Then it is also shown the calls that activation checkpointing repeats
            in a backward pass, to change them again; what only reads calls must not count them twice.
    """

    @property
    def recomputing(self) -> bool: ...

    def wanted(self) -> Hashable:
        """What it does with the call that runs now, equal in every process that holds a part of it.

        Raises:
            RecordError: if it cannot be shown calls of which there are parts.
        """
        ...

    def attended(self, call: AttentionCall, output: Tensor) -> Tensor:
        """See a call and its output (B, H, L, Dv); return the output that goes on."""
        ...


def changes_outputs() -> bool:
    """Whether an observer of this thread changes outputs; the same in a recomputation as in the forward pass."""
    return any(observer.recomputing for observer in state.observers)


def is_computing() -> bool:
    """Whether an observed call is being computed right now, so that its inner calls are not counted again."""
    return state.computing


def notify(call: AttentionCall, output: Tensor) -> Tensor:
    """Show the call to every observer, the innermost last."""
    for observer in listening():
        output = observer.attended(call, output)
    return output


@contextmanager
def observing(observer: Observer) -> Generator[None, None, None]:
    """Let `observer` see the calls of this thread inside the block."""
    state.observers = (*state.observers, observer)
    try:
        yield
    finally:  # blocks that are entered from hooks need not end in the order of a stack
        state.observers = tuple(each for each in state.observers if each is not observer)


@contextmanager
def computing() -> Generator[None, None, None]:
    """Mark that an observed call is being computed."""
    # Kept, because a call that an observer makes ends inside the one that it observes.
    before = state.computing
    state.computing = True
    try:
        yield
    finally:
        state.computing = before
