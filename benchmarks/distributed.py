"""Attention split over processes: collectives, bytes, keys and values that are held, and time, per method.

    python -m benchmarks.distributed [--world 2] [--length 8192] [--heads 8] [--kv-heads 8] [--rounds 3] [--no-times]

Processes of this machine, on gloo, with one thread each. Bytes are what one process receives, as the calls of
collectives say, beside the formulas of docs/distributed-methods.md. Held are the keys and values that autograd keeps
for the backward pass, and most are those alive at once in the forward pass, what is on its way included; both in
shares of one process. Times are medians of rounds in which one process works alone and then all of them together; the
busiest process is compared with the least busy by processor time, since they wait for each other. With more processes
than cores times mean little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead
from benchmarks.timing import console, machine
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel

HEAD_DIM = 64


class Way(NamedTuple):
    """How the module is split, and the call: without a mask in parts of equal length, or causal in zigzag."""

    method: str
    causal: bool

    @property
    def name(self) -> str:
        return f"{self.method}, causal, zigzag" if self.causal else self.method

    @property
    def layout(self) -> Any:
        return "zigzag" if self.causal else "contiguous"

    @property
    def mask(self) -> Any:
        return clearhead.masks.causal() if self.causal else None


METHODS = ("heads", "gather", "ring")
WAYS = [Way(method, False) for method in ("tensor parallel", *METHODS)] + [Way(method, True) for method in METHODS]


class Received(TorchDispatchMode):
    """Counts collectives, and the bytes that one process receives by them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kind = func._overloadpacket.__name__.strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and not kind.startswith(("wait", "wrap")):
            sizes = [x.nbytes for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            # The record by which processes agree is left out: one of fixed size per call.
            if max(sizes) > 1 << 14 or kind == "send":
                self.counts[kind] = self.counts.get(kind, 0) + 1
                self.bytes += _received(kind, max(sizes))
        return func(*args, **(kwargs or {}))


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors made while it is entered, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        given = {_storage(x)._cdata for x in _tensors((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for storage in map(_storage, _tensors(found)):
            if storage._cdata not in self._alive and storage._cdata not in given:
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._ended, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def _ended(self, name: int, count: int) -> None:
        self._alive.discard(name)
        self.now -= count


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> torch.UntypedStorage:
    return _local(x).untyped_storage()


def _received(kind: str, largest: int) -> float:
    """Of a collective whose largest tensor has so many bytes."""
    others = (dist.get_world_size() - 1) / dist.get_world_size()
    if kind.startswith(("recv", "alltoall")):  # a process's own pieces are not in what is exchanged
        return largest
    if kind.startswith("send"):
        return 0.0
    if kind == "reduce_scatter":  # of a list, whose tensors are one for each process
        return largest * (dist.get_world_size() - 1)
    return largest * others * (2 if "all_reduce" in kind or kind.startswith("allreduce") else 1)


def formulas(method: str, world: int, length: int, heads: int, kv_heads: int) -> tuple[float, float]:
    """Bytes that one process receives forward and backward, in float32 and for one batch item."""
    number, others = 4, (world - 1) / world
    keys = 2 * kv_heads * length * HEAD_DIM * number
    if method == "tensor parallel":
        return (2 * others * length * heads * HEAD_DIM * number,) * 2
    if method == "gather":
        return others * keys, others * keys
    if method == "ring":
        return (world - 1) * keys / world, 2 * (world - 1) * keys / world
    sent = 2 * heads + 2 * max(kv_heads, world)
    return (others * length / world * sent * HEAD_DIM * number,) * 2


class Split(NamedTuple):
    """A module that is split, and what this process gives it: its part of the sequence, or all of it."""

    way: Way
    module: Any
    part: Tensor


def measure(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, options.world), rank=rank, world_size=options.world)
    mesh = init_device_mesh("cpu", (options.world,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    whole = _module(options)
    x = torch.randn(1, options.length, whole.embed_dim)
    queries = x[:, : options.world]
    held, most = _held(whole, queries, x), _most(whole, queries, x)
    splits, found = [], {}
    for way in WAYS:
        split, part = _module(options), x
        if way.method == "tensor parallel":
            split = tensor_parallel(split, mesh)
        else:
            split = context_parallel(split, mesh, method=way.method, layout=way.layout)  # type: ignore[arg-type]
            part = shard_sequence(x, mesh, layout=way.layout).clone()
        splits.append(Split(way, split, part))
        few = part[:, : options.world] if part is x else part[:, :1]
        found[way] = (*_counted(splits[-1]), _held(split, few, part) / held, _most(split, few, part) / most)
    times = {}
    if options.times:
        for causal in (False, True):
            times |= _timed(whole, x, [split for split in splits if split.way.causal == causal], options.rounds)
    if rank == 0:
        show(found, times, options)
    dist.destroy_process_group()


def _module(options: argparse.Namespace) -> clearhead.MultiHeadAttention:
    return clearhead.MultiHeadAttention(options.heads * HEAD_DIM, options.heads, num_kv_heads=options.kv_heads)


def _counted(split: Split) -> tuple[Received, Received]:
    """What is exchanged forward and backward."""
    given = split.part.detach().requires_grad_()
    with Received() as forward:
        output = split.module(given, mask=split.way.mask)
    with Received() as backward:
        output.square().sum().backward()
    return forward, backward


def _held(module: Any, queries: Tensor, keys: Tensor) -> int:
    """Bytes that autograd keeps of keys and values: of a call with few queries, of which alone a gradient is wanted."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    module.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(queries.detach().requires_grad_(), keys.detach())
    output.sum().backward()
    module.requires_grad_(True)
    parameters = {_local(parameter).untyped_storage().data_ptr() for parameter in module.parameters()}
    return sum(size for where, size in storages.items() if where not in parameters)


def _most(module: Any, queries: Tensor, keys: Tensor) -> int:
    """The most bytes of keys and values alive at once: of a call with few queries."""
    with Live() as live:
        _forward(module, queries, None, keys)
    return live.most


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _forward(module: Any, x: Tensor, mask: Any, keys: Tensor | None = None) -> None:
    with torch.no_grad():
        module(x, keys, mask=mask)


def _both(module: Any, x: Tensor, mask: Any) -> None:
    module(x.detach().requires_grad_(), mask=mask).square().sum().backward()


def _timed(whole: Any, x: Tensor, splits: list[Split], rounds: int) -> dict[Way, list[tuple[float, float]]]:
    """Of each way, forward and forward + backward: how many times faster; the busiest process over the least busy."""
    found: dict[Way, list[tuple[float, float]]] = {split.way: [] for split in splits}
    for work in (_forward, _both):
        alone: list[float] = []
        together: dict[Way, list[tuple[float, float]]] = {split.way: [] for split in splits}
        for _ in range(rounds + 1):
            dist.barrier()
            if dist.get_rank() == 0:
                alone.append(_seconds(lambda: work(whole, x, splits[0].way.mask))[0])  # noqa: B023
            for split in splits:
                dist.barrier()
                together[split.way].append(_seconds(lambda: work(split.module, split.part, split.way.mask)))  # noqa: B023
        one = statistics.median(alone[1:]) if alone else 0.0
        for way, samples in together.items():
            own = torch.tensor(samples[1:]).median(0).values  # seconds, and processor seconds
            every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(every, own)
            seconds, processor = torch.stack(every).unbind(1)
            found[way].append((one / float(seconds.max()), float(processor.max() / processor.min())))
    return found


def _seconds(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the clock, and of this process's processor time."""
    start, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - used


def show(found: dict[Way, Any], times: dict[Way, Any], options: argparse.Namespace) -> None:
    names = [
        "method",
        "collectives forward",
        "backward",
        "MB forward (formula)",
        "MB backward (formula)",
        "held ×",
        "most ×",
    ]
    if times:
        names += ["forward ×", "busiest ÷ least", "forward + backward ×", "busiest ÷ least"]
    sizes = options.world, options.length, options.heads, options.kv_heads
    table = Table(*names, title="W = {}, L = {}, H = {}, Hkv = {}".format(*sizes))
    for way, (forward, backward, held, most) in found.items():
        expected = formulas(way.method, *sizes)
        modes = forward, backward
        cells = [way.name, *(", ".join(f"{count} {kind}" for kind, count in mode.counts.items()) for mode in modes)]
        cells += [f"{m.bytes / 1e6:.1f} ({e / 1e6:.1f})" for m, e in zip(modes, expected, strict=True)]
        cells += [f"{held:.2f}", f"{most:.2f}"]
        cells += [f"{number:.2f}" for pair in times.get(way, ()) for number in pair]
        table.add_row(*cells)
    console.print(table)
    console.print(f"Measured on: {machine()}.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.distributed", description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-times", dest="times", action="store_false")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options, str(Path(folder) / "store")), nprocs=options.world)


if __name__ == "__main__":
    main()
