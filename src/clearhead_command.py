"""The console script ``clearhead``.

It lies outside the package, whose import takes PyTorch and seconds, so that Ctrl-C ends the process at once then too.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import sys
import threading

_kept: list[socket.socket] = []  # open for as long as the process lives


def main() -> None:
    """Run the command that the arguments name."""
    status: object = 1  # of an exception that nothing handles

    def end() -> None:
        """End the process. Python would free each object on its own, which takes a second."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)

    atexit.register(end)  # first, so that it runs after the functions that libraries register
    stop_at_once()
    # Threads of OpenMP that wait for each other would spin, which multiplies processor time if other programs run.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    gc.disable()  # imports leave no garbage, but the collector would look at every object again and again
    from clearhead.cli import main as run

    gc.enable()
    try:
        run()
    except SystemExit as ending:
        status = 0 if ending.code is None else ending.code
        raise
    status = 0


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
    remove = getattr(sys.modules.get("clearhead.plot._files"), "remove_unfinished", None)  # None while it is imported
    if remove is not None:
        remove()
    line = b"clearhead: stopped\n"
    if sys.stderr.isatty():
        line = b"\r\x1b[2K\x1b[?25h" + line  # in place of a bar, which hides the cursor
    os.write(2, line)
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
