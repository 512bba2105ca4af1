"""Each architecture in a worker process: a crash or a timeout of one is an outcome, not the end of the run."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, final

from .results import Outcome
from .types import Architecture

__all__ = ["run_all"]


def run_all(architectures: list[Architecture], jobs: int, seconds: float) -> Iterator[Outcome]:
    """Compare all architectures in `jobs` processes, with so many seconds for each; outcomes come as they are ready."""
    waiting = list(reversed(architectures))
    workers = [_Worker() for _ in range(min(jobs, len(waiting)))]
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

    def __init__(self) -> None:
        self.current: Architecture | None = None
        self._process: Any = None

    def start(self, architecture: Architecture) -> None:
        if self._process is None or not self._process.is_alive():
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self._process = context.Process(target=_work, args=(theirs,), daemon=True)
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
                return self._finish(self._failed(f"the process ended with exit code {self._process.exitcode}"))
        if time.monotonic() - self._started > seconds:
            self.stop()
            return self._finish(self._failed(f"no result after {seconds:.0f} s"))
        return None

    def stop(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
        if self._process is not None:
            self._process.join()

    def _failed(self, reason: str) -> Outcome:
        assert_current = self.current or Architecture("", "", "")
        return Outcome(assert_current.name, assert_current.class_name, not_built=reason)

    def _finish(self, outcome: Outcome) -> Outcome:
        self.current = None
        return outcome


def _work(connection: Connection) -> None:
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
