"""Wrappers for several processes, in a group of one process, and processes of their own."""

from __future__ import annotations

import atexit
import multiprocessing
import shutil
import tempfile
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from clearhead.masks import Mask

from ..subject import Numbers, Subject, backward, forward, numbers
from ._tool import Tool


@cache
def _group() -> None:
    """A group of this process alone. It is left open for a file of tests, because opening many in turn can hang."""
    folder = tempfile.mkdtemp()
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def close_group() -> None:
    """Close the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _group.cache_clear()


def _renamed(found: Numbers, prefix: str) -> Numbers:
    return {name.replace(prefix, ""): getattr(x, "full_tensor", lambda x=x: x)() for name, x in found.items()}


def _wrapped(subject: Subject, wrapper: nn.Module) -> Numbers:
    inputs = subject.leaves()
    outputs = forward(subject, inputs, wrapper)
    return backward(Subject(wrapper, inputs, subject.given), inputs, outputs)


def _ddp(subject: Subject) -> Numbers:
    _group()
    wrapper = nn.parallel.DistributedDataParallel(subject.module)
    return _renamed(_wrapped(subject, wrapper), "module.")


def _static_ddp(subject: Subject) -> Numbers:
    _group()
    wrapper = nn.parallel.DistributedDataParallel(subject.module, static_graph=True, gradient_as_bucket_view=True)
    return _renamed(_wrapped(subject, wrapper), "module.")


def _fsdp1(subject: Subject) -> Numbers:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _group()
    wrapper = FullyShardedDataParallel(subject.module, use_orig_params=True, device_id=torch.device("cpu"))
    return _renamed(_wrapped(subject, wrapper), "_fsdp_wrapped_module.")


def _fsdp2(subject: Subject) -> Numbers:
    """Every sub-module with children or parameters is sharded by itself, from the inside out."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _group()
    mesh = init_device_mesh("cpu", (1,))
    for part in reversed(list(subject.module.modules())):
        # Masks are read and not called, so nothing would gather the parameters of one that is sharded by itself.
        if not isinstance(part, (nn.ModuleList, nn.Linear, Mask)) and any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    return _renamed(numbers(subject), "")


def _forked(subject: Subject) -> Numbers:
    """In a forked process, after a call in this one."""
    numbers(subject)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there, subject))
    process.start()
    there.close()
    found = _received(here.recv())
    process.join()
    return found


def _answer(end: Any, subject: Subject) -> None:
    end.send(_sent(subject))


def _sent(subject: Subject) -> Any:
    torch.set_num_threads(1)
    try:
        return {name: x.detach().numpy() for name, x in numbers(subject).items()}
    except Exception as error:
        return error


def _received(answer: Any) -> Numbers:
    if isinstance(answer, Exception):
        raise answer
    return {name: torch.from_numpy(x) for name, x in answer.items()}


@cache
def _spawned_process() -> Any:
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=_serve, args=(there,), daemon=True).start()
    there.close()
    return here


def _serve(end: Any) -> None:
    while True:
        try:
            subject = end.recv()
        except EOFError:
            return
        end.send(_sent(subject))


def _spawned(subject: Subject) -> Numbers:
    """In a process that imported everything anew, which receives the module with its memory shared."""
    subject.module.share_memory()
    end = _spawned_process()
    end.send(subject)
    return _received(end.recv())


_MODULES = frozenset({"parameters", "gradients"})
TOOLS = (
    Tool("DDP", _ddp, needs=_MODULES),
    Tool("DDP with a static graph", _static_ddp, needs=_MODULES),
    Tool("FSDP1", _fsdp1, needs=_MODULES),
    Tool("FSDP2", _fsdp2, needs=_MODULES | {"classes"}),
    Tool("fork", _forked),
    Tool("spawn", _spawned, needs=frozenset({"pickle"})),
)
