"""Processes of one group on this machine, in which functions run side by side, and meshes of them."""

from __future__ import annotations

import functools
import inspect
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Forked from one process that has imported everything: starting four takes no longer than starting one.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.tensor", "clearhead.distributed", "clearhead.transformer"])

_LATE = "no answer in time"

#: For one test in all processes. The first one in a new environment compiles every module that each process imports.
SECONDS = 180.0

#: The processes of a group by their number. They are started once for a file of tests.
Groups = Callable[[int], "Processes"]


def in_processes(*counts: int, seconds: float = SECONDS) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorator of a test that runs in every process of a group, for each of these sizes in turn."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def test(groups: Groups, **arguments: Any) -> None:
            for count in counts:
                groups(count).run(test, *arguments.values(), seconds=seconds)

        parameters = inspect.signature(function).parameters.values()
        groups = inspect.Parameter("groups", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.body = function  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature([groups, *parameters])  # type: ignore[attr-defined]
        return test

    return decorate


class Processes:
    """The processes of one group, on gloo.

    Args:
        count: how many.
        seconds: after which a collective that waits for another process raises.
    """

    def __init__(self, count: int, seconds: float = SECONDS) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self.ends: list[Connection] = []
        self.started: list[Any] = []
        for rank in range(count):
            here, there = _context.Pipe()
            process = _context.Process(target=_work, args=(there, rank, count, store, seconds), daemon=True)
            process.start()
            there.close()
            self.ends.append(here)
            self.started.append(process)

    def run(
        self, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS, first: bool = False
    ) -> list[Any]:
        """What a function of a module returns in every process, or in the first one alone.

        Raises:
            AssertionError: with the traceback of each process in which it raised, or that did not answer in time. All
                processes are killed then, so that none of them loops on, and later calls fail at once.
        """
        for end in self.ends:
            end.send((function, arguments))
        deadline = time.monotonic() + seconds
        answers = [_answer(end, deadline) for end in (self.ends[:1] if first else self.ends)]
        if (False, _LATE) in answers:
            for process in self.started:
                process.kill()
        wrong = [f"process {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not wrong, "\n".join(wrong)
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for end in self.ends:
            end.close()
        for process in self.started:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


@functools.cache
def grid(rows: int) -> DeviceMesh:
    """A mesh of all processes, "cp" by "tp", with `rows` of them in the first dimension. Making one is a collective."""
    return init_device_mesh("cpu", (rows, dist.get_world_size() // rows), mesh_dim_names=("cp", "tp"))


@functools.cache
def line() -> DeviceMesh:
    """A mesh of all processes in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def square() -> DeviceMesh:
    """A mesh of four processes as 2 × 2."""
    return grid(2)


@contextmanager
def processes(count: int, seconds: float = SECONDS) -> Iterator[Processes]:
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
    warnings.filterwarnings("ignore", r"'\w+' deprecated - use")  # matplotlib 3.9 calls old names of pyparsing
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(\w+\) returned a view")  # as nn.Linear does
    torch.set_num_threads(1)
    options: dict[str, Any] = {"store": dist.FileStore(store, count), "timeout": timedelta(seconds=seconds)}
    dist.init_process_group("gloo", rank=rank, world_size=count, **options)
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            break
        torch.manual_seed(20170612)
        try:
            end.send((True, getattr(function, "body", function)(*arguments)))
        except BaseException:
            end.send((False, traceback.format_exc()))
    # No goodbye to the others: one of them may have been ended by a test.
