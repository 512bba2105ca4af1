"""Starting a command that loads large libraries."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["collecting_later"]


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
