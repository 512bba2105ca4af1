"""Observers of `attention` in this thread: recorders that read a call, interventions that change its output."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from .._environment import listening, state
from .call import Call


class Observer(Protocol):
    """An object that receives every attention call of its thread.

    Args:
        recomputing: whether it changes outputs. It then also receives the calls that activation checkpointing repeats
            in a backward pass, and changes them again. An observer that only reads calls must not count them twice.
    """

    @property
    def recomputing(self) -> bool: ...

    def wanted(self) -> Hashable:
        """A description of its work on the current call. It is equal in every process that holds a part of the call.

        Raises:
            RecordError: if it does not support calls that are split over processes.
        """
        ...

    def attended(self, call: Call, output: Tensor) -> Tensor:
        """Receive a call and its output (B, H, L, Dv), and return the output that the call returns."""
        ...


def changes_outputs() -> bool:
    """Whether an observer of this thread changes outputs. It is the same in a recomputation and in the forward pass."""
    return any(observer.recomputing for observer in state.observers)


def is_computing() -> bool:
    """Whether an observed call is being computed right now, so that its inner calls are not counted again."""
    return state.computing


def notify(call: Call, output: Tensor) -> Tensor:
    """Pass the call to every observer, the innermost last. What they compute is not observed."""
    with computing():
        for observer in listening():
            output = observer.attended(call, output)
    return output


@contextmanager
def observing(observer: Observer) -> Generator[None, None, None]:
    """Pass the calls of this thread to `observer` inside the block."""
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
