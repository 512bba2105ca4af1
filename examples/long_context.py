"""The character model learns from passages of 16,384 characters, each of them split over several processes.

    torchrun --nproc-per-node 2 examples/long_context.py                # 5 minutes at most on two cores
    torchrun --nproc-per-node 4 examples/long_context.py --steps 50     # goes on where the two stopped
    python examples/long_context.py --length 4096                       # one process, for comparison

Each process holds a part of the passage (zigzag context parallelism) and of the parameters and the optimizer's state
(FSDP2, `fully_shard`). After the last step model and optimizer are saved by `torch.distributed.checkpoint`; a folder
that was written by any number of processes is read by any other.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from character_model import CharacterModel, read_corpus
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard

from clearhead.distributed import context_parallel, shard_sequence

console = Console()


@contextmanager
def process_group() -> Generator[DeviceMesh]:
    """All processes that torchrun started, as a mesh of one dimension; without torchrun, this one alone."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


def split(model: CharacterModel, mesh: DeviceMesh) -> CharacterModel:
    """Split passages and parameters over the processes of a mesh; in place."""
    context_parallel(model.decoder, mesh, layout="zigzag")
    for module in (*model.decoder.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def passage(text: Tensor, step: int, length: int, seed: int) -> Tensor:
    """The passage of a step and the character after it, (1, length + 1): the same in every process and every run."""
    generator = torch.Generator().manual_seed(seed + 1_000_003 * step)
    start = int(torch.randint(len(text) - length, (), generator=generator))
    return text[None, start : start + length + 1]


def learn(model: CharacterModel, optimizer: torch.optim.Optimizer, whole: Tensor, mesh: DeviceMesh) -> float:
    """One step on a passage; its loss, the mean over all characters, in bits."""
    length = whole.shape[1] - 1
    # Labels are shifted first and cut then, so that the last of a part is the first character of another.
    part, labels = (shard_sequence(each, mesh, layout="zigzag") for each in (whole[:, :-1], whole[:, 1:]))
    scores = model(part)  # (1, part of L, characters)
    summed = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
    optimizer.zero_grad()
    (summed * mesh.size() / length).backward()  # fully_shard averages gradients over the processes
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    total = summed.detach()
    dist.all_reduce(total)
    return total.item() / length / math.log(2)


class Training:
    """What a checkpoint holds: parameters, the optimizer's state, and the losses so far.

    Args:
        model: after `split`.
        rate: learning rate.
    """

    def __init__(self, model: CharacterModel, rate: float) -> None:
        self.model, self.losses = model, list[float]()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.1)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self.state() | {"losses": self.losses}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state: dict[str, Any] = {**self.state(), "losses": self.losses}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.losses = state["losses"]


def train(training: Training, text: Tensor, mesh: DeviceMesh, steps: int, length: int, seed: int) -> None:
    """Go on until `steps` steps are done; the first process shows how far it is."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    times = TimeElapsedColumn(), TimeRemainingColumn()
    done = len(training.losses)
    with Progress(*columns, *times, console=console, disable=mesh.get_rank() != 0) as progress:
        task = progress.add_task("training", total=steps, completed=done)
        for step in range(done, steps):
            whole = passage(text, step, length, seed)
            training.losses.append(learn(training.model, training.optimizer, whole, mesh))
            progress.update(task, advance=1, description=f"training, {training.losses[-1]:.3f} bits per character")


def newest(folder: Path) -> Path | None:
    """The checkpoint of most steps in a folder; none that was not written to its end."""
    found = [path.parent for path in folder.glob("step_*/.metadata")]
    return max(found, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def report(training: Training, before: int, mesh: DeviceMesh, length: int, seconds: float) -> None:
    if len(training.losses) == before:
        console.print(f"{before} steps were done before; --steps {2 * before} goes on")
        return
    console.print(
        f"steps {before + 1} to {len(training.losses)} on {length:,} characters in {mesh.size()} processes: "
        f"{training.losses[before]:.3f} → {training.losses[-1]:.3f} bits per character, {seconds:.0f} s"
    )


def main(
    seed: Annotated[int, typer.Option(help="Of the model and the passages.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps in all, with those of the checkpoint.")] = 30,
    length: Annotated[int, typer.Option(min=1, help="Characters in a passage.")] = 16_384,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 4e-3,
    out: Annotated[Path, typer.Option(help="Folder for the losses and for checkpoints; the newest is read.")] = Path(
        "out"
    ),
) -> None:
    """Train, or go on with training from the newest checkpoint; save losses and a checkpoint."""
    started, corpus, folder = time.perf_counter(), read_corpus(), out / "long_context"
    if length >= len(corpus.training):
        raise SystemExit(f"--length {length}: the text has {len(corpus.training):,} characters; give fewer")
    folder.mkdir(parents=True, exist_ok=True)
    with process_group() as mesh:
        torch.manual_seed(seed)
        training = Training(split(CharacterModel(len(corpus.characters)), mesh), rate)
        checkpoint = newest(folder)
        if checkpoint is not None:
            training.load(checkpoint)
        before = len(training.losses)
        train(training, corpus.training, mesh, steps, length, seed)
        if len(training.losses) > before:
            training.save(folder / f"step_{len(training.losses)}")
        if mesh.get_rank() == 0:
            results = {"processes": mesh.size(), "length": length, "seed": seed, "losses": training.losses}
            (out / "long_context.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            report(training, before, mesh, length, time.perf_counter() - started)
            console.print(f"Saved {folder} and .json")


if __name__ == "__main__":
    record(typer.run)(main)  # with it, torchrun shows the traceback of the process that failed first
