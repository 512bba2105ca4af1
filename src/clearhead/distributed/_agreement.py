"""Agreement before a collective: every process gets the facts and the errors of the others.

If a process raised before a collective, the others would wait in it. So each process sends a record of fixed size, with
its facts or with its error, and all raise if one of them does. Every agreement reads errors, whatever its facts are. A
process that raises between two agreements announces its error for the next one, and goes on.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from typing import Any, ClassVar, Self, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._environment import outside_graphs
from .._torch_private import all_gather_single, timeout_of
from ..errors import ArgumentError, DeviceError, DistributedError
from ._collectives import from_every_rank

_FACTS = 32  # int64 numbers of facts in a record
_TEXT = 640  # bytes of a refusal's text in a record
_READABLE = 1 << 40  # larger facts are fingerprints
_SECONDS_AT_EXIT = 5

#: The numbers that a process sends, by name.
Facts = Mapping[str, int]

#: The facts of every process of a group.
Gathered = list[dict[str, int]]


@outside_graphs
def agree(where: str, group: dist.ProcessGroup, device: torch.device | str, facts: Facts | Exception) -> Gathered:
    """Exchange facts with all processes of a group.

    Args:
        where: the called function, for messages.
        group: the group of the processes.
        device: the device of the group's collectives. The facts do not pass through it.
        facts: the facts of this process, at most 32. All processes send the same names. Or the error that this process
            raises.

    Returns:
        The facts of every process.

    Raises:
        The error of this process, if it has one.
        DistributedError: if another process has an error, or if the group cannot be reached.
    """
    group = _on_the_host(group, device)
    record = _record(where, facts)
    try:
        records = from_every_rank(record, group)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"{where}: the processes could not agree on the call, because one of them has ended or makes another call: "
            f"{error}"
        ) from error
    if bool((records[:, 0] > 0).any() or (records[:, 1] != record[1]).any()):
        # Wait until every process has read the records. If this one raised and exited at once, the others would find a
        # closed connection instead of its error.
        with suppress(RuntimeError, ValueError):  # the error is known already
            from_every_rank(torch.zeros(1, dtype=torch.int64, device="cpu"), group)
    if isinstance(facts, Exception):
        raise facts
    for rank, received in enumerate(records):
        if length := int(received[0]):
            text = bytes(received[2 + _FACTS :].view(torch.uint8)[:length].tolist()).decode(errors="ignore")
            raise DistributedError(
                f"{where}: process {rank} of the group refused the call, so that none of them runs it: {text}"
            )
    for rank, received in enumerate(records):
        if received[1] != record[1]:
            raise DistributedError(
                f"{where}: process {rank} of the group makes another call. All of them make the same."
            )
    return [dict(zip(facts, numbers, strict=True)) for numbers in records[:, 2 : 2 + len(facts)].tolist()]


@contextmanager
def agreement(
    where: str, groups: Sequence[dist.ProcessGroup], device: str
) -> Generator[Callable[[Facts], Gathered], None, None]:
    """A block that all processes of all groups finish, or none: if it raises in one process, all of them raise.

    The block gets a function, and calls it once with the facts of this process. The function returns the facts of every
    process of the first group.

    Args:
        where, device: as for `agree`.
        groups: the group that shares the sequence, and the groups that share the heads of one shard.
    """
    waiting = list(groups)

    def exchange(facts: Facts) -> Gathered:
        return agree(where, waiting.pop(0), device, facts)

    try:
        yield exchange
        while waiting:
            exchange({})
    except Exception as error:
        for group in waiting:
            with suppress(Exception):  # the error is raised below
                agree(where, group, device, error)
        raise


#: Groups for agreements, by the group with the same processes. They end with it: if a group outlives
#: `destroy_process_group`, its threads may abort a process that ends.
_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def group_for_agreements(group: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
    """Another group of the same processes, in which an announced error meets no other collective.

    All processes of the group make it when they call this for the first time.
    """
    if group not in _groups:
        ranks, timeout = dist.get_process_group_ranks(group), timeout_of(group, device)
        backend = None if torch.device(device).type == "cpu" else "gloo"
        agreements = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
        _groups[group] = cast(dist.ProcessGroup, agreements)
    return _groups[group]


def _on_the_host(group: dist.ProcessGroup, device: torch.device | str) -> dist.ProcessGroup:
    """A group of the same processes that exchanges tensors on the CPU, so that an agreement waits for no device."""
    if torch.device(device).type == "cpu" or dist.get_backend(group) == "gloo":
        return group
    return group_for_agreements(group, str(device))


#: Numbers for the modules that are split over the sequence, from 1 on, by group. They are equal in processes that split
#: modules in the same order.
module_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


@contextmanager
def not_announced() -> Generator[None, None, None]:
    """Mark an error that is raised while no other process waits in an agreement. `announce` ignores it."""
    try:
        yield
    except Exception as error:
        cast(Any, error).not_announced = True
        raise


@outside_graphs
def announce(where: str, groups: Sequence[dist.ProcessGroup], device: str, problem: Exception) -> None:
    """Send an error to the next agreement of the others, without waiting for them.

    Args:
        where, groups, device: as for `agreement`.
        problem: the error, which the caller raises.
    """
    if getattr(problem, "not_announced", False):
        return
    record = _record(where, problem)
    for group in groups:
        group = _on_the_host(group, device)
        records = record.new_empty((dist.get_world_size(group), len(record)))
        read = record.new_empty((dist.get_world_size(group), 1))
        with suppress(RuntimeError, ValueError):  # the problem is what counts
            all_gather_single(records, record[None], group=group, async_op=True)
            # The second exchange of `agree`. A process waits for it before it ends.
            exchange = all_gather_single(read, read.new_zeros((1, 1)), group=group, async_op=True)
            if not _announced:  # late, so that it runs before what was registered earlier, such as the end of the group
                atexit.register(_wait_for_announced)
            _announced[:] = [*(work for work in _announced if not work.is_completed()), exchange]


#: The last exchanges of announced errors that have not ended.
_announced: list[Any] = []


def _wait_for_announced() -> None:
    for exchange in _announced:
        with suppress(RuntimeError, ValueError):
            exchange.wait(timedelta(seconds=_SECONDS_AT_EXIT))


def _record(where: str, facts: Facts | Exception) -> Tensor:
    record = torch.zeros(2 + _FACTS + _TEXT // 8, dtype=torch.int64, device="cpu")
    if not isinstance(facts, Exception):
        record[1] = fingerprint(where, *facts)
        record[2 : 2 + len(facts)] = torch.tensor(list(facts.values()), dtype=torch.int64, device="cpu")
        return record
    text = f"{type(facts).__name__}: {facts}".encode()[:_TEXT]
    record[0] = len(text)
    record[2 + _FACTS :].view(torch.uint8)[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
    return record


def fingerprint(*values: object) -> int:
    """An int64 number that is equal for equal values, in every process."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "little", signed=True)


def require_equal(where: str, gathered: Gathered, names: Iterable[str], fix: str) -> None:
    """Raise, in every process alike, unless these facts are equal in all of them."""
    for name in names:
        values = [facts[name] for facts in gathered]
        if len(set(values)) > 1:
            rank = next(rank for rank, value in enumerate(values) if value != values[0])
            readable = all(abs(value) < _READABLE for value in values)
            got = str(values) if readable else f"another in process {rank} of the group than in process 0"
            raise DistributedError(f"{where}: {name}", expected="the same in every process", got=got, fix=fix)


def require_mesh(mesh: object) -> None:
    """Raise unless the mesh is a `DeviceMesh` of one dimension."""
    if not isinstance(mesh, DeviceMesh):
        fix = 'torch.distributed.device_mesh.init_device_mesh("cpu", (4,)) makes one.'
        raise ArgumentError("mesh", expected="a DeviceMesh", got=type(mesh).__name__, fix=fix)
    if mesh.ndim != 1:
        fix = 'Take one dimension of it, as mesh["cp"].'
        raise ArgumentError("mesh", expected="one dimension", got=f"{mesh.ndim}", fix=fix)


def group_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, str]:
    """The group and the device of a mesh.

    For an invalid mesh it is the group of all processes: these can still agree that one of them raises.
    """
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
        return mesh.get_group(), mesh.device_type
    if not (dist.is_available() and dist.is_initialized()):
        require_mesh(mesh)
    return cast(dist.ProcessGroup, dist.group.WORLD), getattr(mesh, "device_type", "cpu")


def require_device(where: str, name: str, x: object, device: str) -> None:
    """Raise for a tensor that the processes of a mesh cannot exchange."""
    if isinstance(x, Tensor) and x.device.type != device:
        fix = "Move module and input there. Build a module on the meta device before it is split."
        expected = f"a tensor on {device}, the device of the mesh"
        raise DeviceError(f"{where}: {name}", expected=expected, got=f"one on {x.device}", fix=fix)


class OfThisProcess:
    """A part of a split module. It is shared by copies of the module, and refuses to be pickled."""

    where: ClassVar[str]

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> str:
        raise DistributedError(
            f"{self.where}: a split module cannot be pickled, because its process group belongs to this process. Save "
            "its parameters with torch.distributed.checkpoint and get_model_state_dict(module), or pickle the module "
            "before it is split."
        )
