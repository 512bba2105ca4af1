"""What `clearhead.monitor` costs a training of MiniLM's size: a measured step, and a run that measures few.

    python -m benchmarks.monitor [--steps 200] [--every 100]

A BERT of MiniLM's sizes (random weights, attention ``clearhead``) is trained with AdamW on B=8 texts of L=128 tokens,
with the default statistics. *A measured step* is timed beside an ordinary one, in turn. *A run* is two trainings in
turn, step by step, one of them monitored, so that a machine that slows down slows both; their times are sums.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.table import Table

import clearhead
from benchmarks.timing import console, interleaved, machine, progress

BATCH, LENGTH = 8, 128
SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


def training() -> tuple[torch.nn.Module, Callable[[], None]]:
    """A model, and one step of its training."""
    from transformers import BertConfig, BertForSequenceClassification

    import clearhead.integrations.transformers  # noqa: F401  (registers "clearhead")

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES)).train()
    model.set_attn_implementation("clearhead")
    texts, labels = torch.randint(1000, 30000, (BATCH, LENGTH)), torch.arange(BATCH) % 2
    mask = torch.ones_like(texts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=texts, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()

    return model, step


def ignore(step: int, values: dict[str, float]) -> None:
    """Take the scalars."""


def one_step(rounds: int) -> dict[str, float]:
    """Seconds of an ordinary step and of a measured one."""
    model, step = training()

    def measured() -> None:
        with clearhead.monitor(model, every=1, to=ignore):
            step()

    return interleaved({"an ordinary step": step, "a measured step": measured}, rounds=rounds, budget=600.0)


def whole_run(steps: int, every: int) -> dict[str, float]:
    """Seconds of two trainings, step by step in turn."""
    (_, plain), (model, watched) = training(), training()
    ways = {"a run without it": plain, f"a run with every={every}": watched}
    seconds = dict.fromkeys(ways, 0.0)
    for way in ways.values():
        way()
    with clearhead.monitor(model, every, to=ignore):
        for number in progress(range(steps), "training"):
            for name, way in reversed(ways.items()) if number % 2 else ways.items():
                start = time.perf_counter()
                way()
                seconds[name] += time.perf_counter() - start
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of the run (default 200)")
    parser.add_argument("--every", type=int, default=100, help="how many steps from one that is measured to the next")
    parser.add_argument("--rounds", type=int, default=15, help="how often a single step is timed (default 15)")
    arguments = parser.parse_args()
    table = Table(
        title=f"training, MiniLM's sizes, B={BATCH} L={LENGTH}, float32; {arguments.steps} steps",
        caption=machine(),
    )
    for column in ("what", "seconds", "relative"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for times in (one_step(arguments.rounds), whole_run(arguments.steps, arguments.every)):
        first = next(iter(times.values()))
        for name, seconds in times.items():
            table.add_row(name, f"{seconds:.3f}", f"{seconds / first:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
