"""Who watches `attention` in this thread: recorders that read a call, interventions that change its output."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from .spec import AttentionCall

__all__ = ["Observer", "computing", "is_computing", "notify", "observing", "watched"]


class Observer(Protocol):
    """Something that is told of every attention call of its thread.

    Args:
        recomputing: whether it is told of calls that activation checkpointing repeats in a backward pass: what changes
            outputs has to change them again, what counts calls must not count them twice.
    """

    @property
    def recomputing(self) -> bool: ...

    def attended(self, call: AttentionCall, output: Tensor) -> Tensor:
        """See a call and its output (B, H, L, Dv); return the output that goes on."""
        ...


class _Watch(threading.local):
    observers: tuple[Observer, ...] = ()
    computing: bool = False


_watch = _Watch()


def watched() -> bool:
    """Whether any observer is to be told of a call that runs now in this thread."""
    return bool(_watch.observers) and bool(_listening())


def _listening() -> tuple[Observer, ...]:
    if not _in_backward():
        return _watch.observers
    return tuple(observer for observer in _watch.observers if observer.recomputing)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # pyright: ignore


def is_computing() -> bool:
    """Whether a watched call is being computed right now, so that its inner calls are not counted again."""
    return _watch.computing


def notify(call: AttentionCall, output: Tensor) -> Tensor:
    """Show the call to every observer, the innermost last."""
    for observer in _listening():
        output = observer.attended(call, output)
    return output


@contextmanager
def observing(observer: Observer) -> Generator[None, None, None]:
    """Let `observer` see the calls of this thread inside the block."""
    before = _watch.observers
    _watch.observers = (*before, observer)
    try:
        yield
    finally:
        _watch.observers = before


@contextmanager
def computing() -> Generator[None, None, None]:
    """Mark that a watched call is being computed."""
    before = _watch.computing
    _watch.computing = True
    try:
        yield
    finally:
        _watch.computing = before
