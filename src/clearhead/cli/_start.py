"""Starting a command that loads large libraries."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

STOPPED = 130
_kept: list[socket.socket] = []  # open for as long as the process lives


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


def stop_at_once() -> None:
    """End this process at the next Ctrl-C, whatever it is at, with one line and no half-written file.

    A KeyboardInterrupt would wait until a kernel returns, could be lost in a library that is being imported, and would
    take the interpreter down in order, which takes seconds. So a thread waits for the signal.
    """
    there, here = socket.socketpair()
    there.setblocking(False)
    _kept.append(there)
    signal.signal(signal.SIGINT, lambda *_: None)  # what is written to the wake-up socket is all of it
    signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_wait_for_the_signal, args=(here,), daemon=True).start()


def _wait_for_the_signal(here: socket.socket) -> None:
    while here.recv(1) != bytes([signal.SIGINT]):
        pass
    if "clearhead.plot._files" in sys.modules:
        sys.modules["clearhead.plot._files"].remove_unfinished()
    line = b"clearhead: stopped\n"
    if sys.stderr.isatty():
        line = b"\r\x1b[2K\x1b[?25h" + line  # in place of a bar, which hides the cursor
    os.write(2, line)
    os._exit(STOPPED)
