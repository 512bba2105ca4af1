"""What a command is at, on stderr."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

#: How long drawing the picture and writing the page take, as a share of the time to load a model: on any machine about
#: the same, since most of both is importing.
DRAWING = 0.4


class Work:
    """Shows what is at work, if that is a terminal; a bar and the time left where its parts are counted.

    Args:
        progress: the line on the terminal.
        loaded: called once, when what is to be kept to the end is loaded.
    """

    def __init__(self, progress: Progress, loaded: Callable[[], None]) -> None:
        self._progress, self._loaded = progress, loaded
        self._started = perf_counter()
        self.loading: float = 0.0

    def step(self, description: str, parts: int | None = None) -> Callable[[], None]:
        """Begin a step, of so many equal parts if they can be counted; gives what to call after each of them."""
        for done in self._progress.task_ids:
            self._progress.remove_task(done)
        left = "" if parts is None else "left"
        task = self._progress.add_task(description, total=parts, left=left, after=DRAWING * self.loading)
        return lambda: self._progress.advance(task)

    def loaded(self) -> None:
        """Note that the model, or both, are loaded."""
        self._loaded()
        self.loading = self.seconds()

    def seconds(self) -> float:
        """Since the work began."""
        return perf_counter() - self._started


class _TimeLeft(TimeRemainingColumn):
    """The time left of all that is to be done, not of the parts alone."""

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        if task.total is None or left is None:
            return super().render(task)
        minutes, seconds = divmod(math.ceil(left + task.fields["after"]), 60)
        return Text(f"{minutes // 60}:{minutes % 60:02}:{seconds:02}", style="progress.remaining")


@contextmanager
def at_work() -> Generator[Work]:
    """Work that begins with loading a model."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        _TimeLeft(),
    )
    console = Console(stderr=True)
    # Parts take equal times, so that the mean of all that are done is the best guess of those that are left.
    bar = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=3600
    )
    with collecting_later() as loaded, bar as progress:
        work = Work(progress, loaded)
        work.step("loading the model")
        yield work


@contextmanager
def collecting_later() -> Generator[Callable[[], None]]:
    """Collect no garbage until what is yielded is called, and later look at none of what was there by then.

    While modules are imported and a model is loaded there is no garbage, but the collector looks at every object again
    and again, which is a tenth of that time; later each full collection would look at all of them once more.
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
