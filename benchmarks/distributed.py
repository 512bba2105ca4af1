"""Attention split over processes: collectives, bytes, what autograd holds, and time, per method.

    python -m benchmarks.distributed [--world 2] [--length 8192] [--heads 8] [--kv-heads 8] [--rounds 5] [--no-times]

Processes of this machine, on gloo, with one thread each. Bytes are what one process receives, as the calls of
collectives say, beside the formulas of docs/distributed.md. Times are medians of rounds in which one process works
alone and then all of them together; with more processes than cores they mean little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
METHODS = ("tensor parallel", "heads", "gather", "ring")


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


def _received(kind: str, largest: int) -> float:
    """Of a collective whose largest tensor has so many bytes."""
    others = (dist.get_world_size() - 1) / dist.get_world_size()
    if kind.startswith("recv"):
        return largest
    if kind.startswith("send"):
        return 0.0
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
        return (world - 1) * keys / world, (2 * world - 1) * keys / world
    sent = 2 * heads + 2 * max(kv_heads, world)
    return (others * length / world * sent * HEAD_DIM * number,) * 2


def measure(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, options.world), rank=rank, world_size=options.world)
    mesh = init_device_mesh("cpu", (options.world,), mesh_dim_names=("cp",))
    embed, rows = options.heads * HEAD_DIM, []
    for method in METHODS:
        layouts = ("contiguous",) if method in ("tensor parallel", "heads") else ("contiguous", "zigzag")
        for layout in layouts:
            torch.manual_seed(0)
            whole = clearhead.MultiHeadAttention(embed, options.heads, num_kv_heads=options.kv_heads)
            torch.manual_seed(0)
            split: Any = clearhead.MultiHeadAttention(embed, options.heads, num_kv_heads=options.kv_heads)
            x = torch.randn(1, options.length, embed)
            if method == "tensor parallel":
                split, part = tensor_parallel(split, mesh), x
            else:
                split = context_parallel(split, mesh, method=method, layout=layout)  # type: ignore[arg-type]
                part = shard_sequence(x, mesh, layout=layout).clone()  # type: ignore[arg-type]
            found = compare(whole, split, x, part, options)
            rows.append((f"{method}, {layout}" if len(layouts) > 1 else method, method, found))
    if rank == 0:
        show(rows, options)
    dist.destroy_process_group()


def compare(whole: Any, split: Any, x: Tensor, part: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    mask = clearhead.masks.causal()
    found: dict[str, Any] = {}
    for name, module, given in (("one", whole, x), ("split", split, part)):
        given = given.detach().requires_grad_()
        held: dict[int, int] = {}

        def hold(tensor: Tensor, held: dict[int, int] = held) -> Tensor:
            if not isinstance(tensor, DTensor | torch.nn.Parameter):
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor), Received() as forward:
            output = module(given, mask=mask)
        with Received() as backward:
            output.square().sum().backward()
        found[name] = forward, backward, sum(held.values())
    if options.times:
        for index, work in enumerate((_forward, _both)):
            found[f"times {index}"] = times(work, whole, split, x, part, options.rounds)
    return found


def _forward(module: Any, x: Tensor) -> None:
    with torch.no_grad():
        module(x, mask=clearhead.masks.causal())


def _both(module: Any, x: Tensor) -> None:
    module(x.detach().requires_grad_(), mask=clearhead.masks.causal()).square().sum().backward()


def times(
    work: Callable[[Any, Tensor], None], whole: Any, split: Any, x: Tensor, part: Tensor, rounds: int
) -> tuple[float, float, float]:
    """Seconds of one process, the others idle, and of all together; processor time of the busiest over the least busy.

    Medians of rounds. Processes wait for each other in exchanges, so that processor time shows which of them does more.
    """
    alone, together, busy = [], [], []
    for _ in range(rounds + 1):
        dist.barrier()
        if dist.get_rank() == 0:
            alone.append(_seconds(lambda: work(whole, x))[0])
        dist.barrier()
        seconds, own = _seconds(lambda: work(split, part))
        together.append(seconds)
        busy.append(own)
    own = torch.tensor([statistics.median(together[1:]), statistics.median(busy[1:])])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    seconds, processor = torch.stack(every).unbind(1)
    ratio = processor.max() / processor.min()
    return statistics.median(alone[1:]) if alone else 0.0, float(seconds.max()), float(ratio)


def _seconds(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the clock, and of this process's processor time."""
    start, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - used


def show(rows: list[tuple[str, str, dict[str, Any]]], options: argparse.Namespace) -> None:
    names = [
        "method",
        "collectives forward",
        "backward",
        "MB forward (formula)",
        "MB backward (formula)",
        "MB held (of one)",
    ]
    if options.times:
        names += ["forward ×", "busiest / least", "forward + backward ×", "busiest / least"]
    table = Table(
        *names,
        title=f"W = {options.world}, L = {options.length}, H = {options.heads}, Hkv = {options.kv_heads}, causal",
    )
    sizes = options.world, options.length, options.heads, options.kv_heads
    for name, method, found in rows:
        forward, backward, held = found["split"]
        expected = formulas(method, *sizes)
        cells = [name, *(", ".join(f"{n} {kind}" for kind, n in mode.counts.items()) for mode in (forward, backward))]
        cells += [f"{m.bytes / 1e6:.1f} ({e / 1e6:.1f})" for m, e in zip((forward, backward), expected, strict=True)]
        # What tensor parallelism holds are DTensors, its parameters among them.
        cells.append("" if method == "tensor parallel" else f"{held / 1e6:.1f} ({found['one'][2] / 1e6:.1f})")
        if options.times:
            for alone, together, ratio in (found["times 0"], found["times 1"]):
                cells += [f"{alone / together:.2f}", f"{ratio:.2f}"]
        table.add_row(*cells)
    console.print(table)
    console.print(f"Measured on: {machine()}.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.distributed", description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-times", dest="times", action="store_false")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options, str(Path(folder) / "store")), nprocs=options.world)


if __name__ == "__main__":
    main()
