"""Attention split over processes: collectives, bytes, keys and values that are held, and time, per method.

    python -m benchmarks.cpu.distributed [--rounds 3] [--docs]

Processes of this machine, on gloo, with one thread each: four count, two are timed beside one. Bytes are what one
process receives, as the calls of collectives say. Held are the keys and values that autograd keeps for the backward
pass, and most are those alive at once in the forward pass, what is on its way included; both in shares of one process.
Times are medians of rounds in which one process works alone and then all of them together; the busiest process is
compared with the least busy by processor time, since they wait for each other.
"""

from __future__ import annotations

import json
import os
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
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.writing import table
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel

HEAD_DIM = 64


class Sizes(NamedTuple):
    """Of the processes and of the module.

    Args:
        world: processes.
        length: of the whole sequence.
        heads, kv_heads: of the module.
        rounds: how often it is timed; 0 counts alone.
    """

    world: int
    length: int
    heads: int
    kv_heads: int
    rounds: int


COUNTED, TIMED = "four processes, counted", "two processes, timed"


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


class Split(NamedTuple):
    """A module that is split, and what this process gives it: its part of the sequence, or all of it."""

    way: Way
    module: Any
    part: Tensor


def measure(rank: int, options: Sizes, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", options.world), rank=rank, world_size=options.world
    )
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
    if options.rounds:
        for causal in (False, True):
            times |= _timed(whole, x, [split for split in splits if split.way.causal == causal], options.rounds)
    if rank == 0:
        rows = {way.name: _row(way, *found[way], times.get(way, [])) for way in found}
        Path(folder, "found.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()
    # PyTorch's caches of DTensor keep the group and its threads alive. A thread that frees its last exchange while
    # Python shuts down aborts the process: https://github.com/python/cpython/issues/87135
    os._exit(0)


def _module(options: Sizes) -> clearhead.MultiHeadAttention:
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


def _row(way: Way, forward: Received, backward: Received, held: float, most: float, times: list[Any]) -> dict[str, Any]:
    passes = (forward, backward)
    return {
        "exchanges": [sum(one.counts.values()) for one in passes],
        "collectives": [one.counts for one in passes],
        "megabytes": [one.bytes / 1e6 for one in passes],
        "held": held,
        "most": most,
        "times": times,
    }


def spawned(sizes: Sizes) -> dict[str, Any]:
    """What the first of so many processes found, by the name of the way."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (sizes, folder), nprocs=sizes.world)
        return json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))


def lines(effort: Effort) -> list[Line]:
    counted = Sizes(4, effort.size(2048, 512), 8, 4, 0)
    timed = Sizes(2, effort.size(8192, 64), 8, 8, effort.rounds)
    if effort.smallest:  # one start of two processes shows both
        return [Line(TIMED, lambda: spawned(timed))]
    return [Line(COUNTED, lambda: spawned(counted)), Line(TIMED, lambda: spawned(timed))]


def texts(measured: Figures) -> dict[str, str]:
    counted, timed = measured.get(COUNTED, measured[TIMED]), measured[TIMED]
    counts: list[list[str]] = []
    for way in WAYS[: len(METHODS) + 1]:
        found = counted[way.name]
        bytes_ = (f"{number:.1f}" for number in found["megabytes"])
        exchanges = " + ".join(map(str, found["exchanges"]))
        counts.append([_label(way), *bytes_, exchanges, f"{found['held']:.2f}", f"{found['most']:.2f}"])
    times: list[list[str]] = []
    for way in WAYS:
        (forward, one), (both, other) = timed[way.name]["times"]
        times.append([_label(way), f"{forward:.2f}×", f"{both:.2f}×", f"{max(one, other):.2f}"])
    speeds = [pair[0] for way in WAYS for pair in timed[way.name]["times"]]
    return {
        "exchanges": table(("method", "forward, MB", "backward, MB", "exchanges", "kept for backward", "peak"), counts),
        "times": table(("method", "forward", "forward + backward", "busiest ÷ other"), times),
        "slowest": f"{min(speeds):.2f}×",
        "fastest": f"{max(speeds):.2f}×",
    }


def _label(way: Way) -> str:
    name = "`tensor_parallel`" if way.method == "tensor parallel" else f"*{way.method}*"
    return f"{name}, causal, zigzag" if way.causal else name


BENCHMARK = Benchmark("distributed", __doc__, lines, texts, minutes=3, rounds=3)

if __name__ == "__main__":
    BENCHMARK.main()
