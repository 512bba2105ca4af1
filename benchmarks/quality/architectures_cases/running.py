"""Each architecture in a worker process: a crash or a timeout of one is an outcome, not the end of the run."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, final

from .results import Finding, Outcome
from .types import Architecture

__all__ = ["compare_all", "run_all"]


def run_all(
    architectures: list[Architecture], jobs: int, seconds: float, work: Callable[[Connection], None] | None = None
) -> Iterator[Outcome]:
    """Compare all architectures in processes of their own; outcomes come as they are ready.

    Args:
        architectures: which.
        jobs: processes at a time.
        seconds: time limit of each architecture.
        work: what a process does with its end of the pipe; by default it compares one architecture after the other.
    """
    waiting = list(reversed(architectures))
    workers = [_Worker(work or compare_all) for _ in range(min(jobs, len(waiting)))]
    try:
        while waiting or any(worker.current for worker in workers):
            for worker in workers:
                if worker.current is None and waiting:
                    worker.start(waiting.pop())
            wait([worker.connection for worker in workers if worker.current], timeout=1.0)
            for worker in workers:
                outcome = worker.outcome(seconds)
                if outcome is not None:
                    yield outcome
    finally:
        for worker in workers:
            worker.stop()


@final
class _Worker:
    """One process, started again after a crash or a timeout."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        self.current: Architecture | None = None
        self._work = work
        self._process: Any = None

    def start(self, architecture: Architecture) -> None:
        if self._process is None or not self._process.is_alive():
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self._process = context.Process(target=self._work, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self.current, self._started = architecture, time.monotonic()
        self.connection.send(architecture)

    def outcome(self, seconds: float) -> Outcome | None:
        """The outcome of the current architecture if there is one by now."""
        if self.current is None:
            return None
        if self.connection.poll():
            try:
                return self._finish(self.connection.recv())
            except EOFError:
                self.stop()
                return self._finish(_failed(self.current, f"the process ended with exit code {self._process.exitcode}"))
        if time.monotonic() - self._started > seconds:
            self.stop()
            return self._finish(_failed(self.current, f"no result after {seconds:.0f} s"))
        return None

    def stop(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
        if self._process is not None:
            self._process.join()

    def _finish(self, outcome: Outcome) -> Outcome:
        self.current = None
        return outcome


def _failed(architecture: Architecture, text: str) -> Outcome:
    found = Finding("both routes", "all", text=text)
    return Outcome(architecture.name, architecture.class_name, errors=[found])


def compare_all(connection: Connection) -> None:
    """Compare every architecture that comes through the pipe, and send its outcome back."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    import torch
    import transformers

    import clearhead.integrations.transformers  # noqa: F401  (registers the implementation)

    from .comparing import compare

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    while True:
        connection.send(compare(connection.recv()))
