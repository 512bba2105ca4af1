"""Processes of one group on this machine, started once for a file of tests, in which functions run side by side."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Processes", "processes"]

# Forked from one process that has imported everything: starting four takes no longer than starting one.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.tensor", "clearhead.distributed", "clearhead.transformer"])

_LATE = "no answer in time"


class Processes:
    """The processes of one group, on gloo.

    Args:
        count: how many.
        seconds: after which a collective that waits for another process raises.
    """

    def __init__(self, count: int, seconds: float = 60) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._ends: list[Connection] = []
        self.started: list[Any] = []
        for rank in range(count):
            here, there = _context.Pipe()
            process = _context.Process(target=_work, args=(there, rank, count, store, seconds), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self.started.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = 60) -> list[Any]:
        """What a function of a module returns in every process.

        Raises:
            AssertionError: with the traceback of each process in which it raised, or that did not answer in time. All
                processes are killed then, so that none of them loops on, and later calls fail at once.
        """
        for end in self._ends:
            end.send((function, arguments))
        deadline = time.monotonic() + seconds
        answers = [_answer(end, deadline) for end in self._ends]
        if (False, _LATE) in answers:
            for process in self.started:
                process.kill()
        wrong = [f"process {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not wrong, "\n".join(wrong)
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for end in self._ends:
            end.close()
        for process in self.started:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


@contextmanager
def processes(count: int, seconds: float = 60) -> Iterator[Processes]:
    """Processes that end with the block."""
    started = Processes(count, seconds)
    try:
        yield started
    finally:
        started.stop()


def _answer(end: Connection, deadline: float) -> tuple[bool, Any]:
    try:
        if not end.poll(max(0.0, deadline - time.monotonic())):
            return False, _LATE
        return end.recv()
    except (EOFError, ConnectionResetError):
        return False, "it has ended"


def _work(end: Connection, rank: int, count: int, store: str, seconds: float) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.[a-z_]+` is (deprecated|not supported)")  # PyTorch's own compiler
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(\w+\) returned a view")  # as nn.Linear does
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=timedelta(seconds=seconds)
    )
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            break
        torch.manual_seed(20170612)
        try:
            end.send((True, function(*arguments)))
        except BaseException:
            end.send((False, traceback.format_exc()))
    # No goodbye to the others: one of them may have been ended by a test.
