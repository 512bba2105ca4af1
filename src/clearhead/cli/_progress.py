"""Progress of a command, on stderr."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from time import perf_counter

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..plot._language import say


class Work:
    """Shows the current step if stderr is a terminal, with a bar and the time left if its parts are counted.

    `loaded` is called once, when the model is loaded.
    """

    def __init__(self, progress: Progress, loaded: Callable[[], None]) -> None:
        self._progress, self._loaded = progress, loaded
        self._started = perf_counter()
        self.loading: float = 0.0

    def step(self, description: str, parts: int | None = None) -> Callable[[], None]:
        """Begin a step with a number of equal parts, or ``None``; return the function to call after each part."""
        for done in self._progress.task_ids:
            self._progress.remove_task(done)
        task = self._progress.add_task(description, total=parts, left="" if parts is None else say("left"))
        return lambda: self._progress.advance(task)

    def loaded(self) -> None:
        """Note that the model, or both, are loaded."""
        self._loaded()
        self.loading = self.seconds()

    def seconds(self) -> float:
        """Since the work began."""
        return perf_counter() - self._started


@contextmanager
def at_work() -> Generator[Work]:
    """Work that begins with loading a model."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # Parts take equal times, so that the mean of all that are done is the best guess of those that are left.
    bar = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=3600
    )
    # Up to rich 14 a bar that is disabled still prints an empty line at its end.
    with _collecting_later() as loaded, bar if console.is_terminal else nullcontext():
        work = Work(bar, loaded)
        work.step(say("loading the model"))
        yield work


@contextmanager
def _collecting_later() -> Generator[Callable[[], None]]:
    """Collect no garbage until the yielded function is called, and exempt all objects of that time from collection.

    Importing modules and loading a model leaves no garbage. The collector would scan every object again and again,
    which takes a tenth of that time.
    """
    enabled = gc.isenabled()
    gc.disable()

    def loaded() -> None:
        gc.freeze()
        if enabled:
            gc.enable()

    try:
        yield loaded
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
