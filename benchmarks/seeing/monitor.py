"""What `clearhead.monitor` costs a training of MiniLM's size: a measured step, and a run that measures few.

    python -m benchmarks.seeing.monitor [--docs]

A BERT of MiniLM's sizes (random weights, attention ``clearhead``) is trained with AdamW on B=8 texts of L=128 tokens,
with the default statistics. *A measured step* is timed beside an ordinary one, in turn. *A run* is two trainings in
turn, step by step, one of them monitored, so that a machine that slows down slows both; their times are sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.timing import interleaved, progress
from benchmarks.writing import ratio, table

BATCH, LENGTH = 8, 128
STEPS, EVERY = 100, 100
STEP, MEASURED = "an ordinary step", "a measured step"
PLAIN, WATCHED = f"{STEPS} steps without it", f"{STEPS} steps with `every={EVERY}`"
SIZES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


def training(effort: Effort) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A model, and one step of its training."""
    from transformers import BertConfig, BertForSequenceClassification

    import clearhead.integrations.transformers  # noqa: F401  (registers "clearhead")

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(**{name: effort.size(size, 24) for name, size in SIZES.items()})
    ).train()
    model.set_attn_implementation("clearhead")
    texts, labels = torch.randint(1000, 30000, (BATCH, effort.size(LENGTH))), torch.arange(BATCH) % 2
    mask = torch.ones_like(texts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=texts, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()

    return model, step


def ignore(step: int, values: dict[str, float]) -> None:
    """Take the scalars."""


def one_step(effort: Effort) -> dict[str, float]:
    """Seconds of an ordinary step and of a measured one."""
    model, step = training(effort)

    def measured() -> None:
        with clearhead.monitor(model, every=1, to=ignore):
            step()

    return interleaved({STEP: step, MEASURED: measured}, rounds=effort.rounds, budget=600.0)


def whole_run(effort: Effort) -> dict[str, float]:
    """Seconds of two trainings, step by step in turn."""
    (_, plain), (model, watched) = training(effort), training(effort)
    ways = {PLAIN: plain, WATCHED: watched}
    seconds = dict.fromkeys(ways, 0.0)
    for way in ways.values():
        way()
    with clearhead.monitor(model, EVERY, to=ignore):
        for number in progress(range(effort.size(STEPS, 2)), "training"):
            for name, way in reversed(ways.items()) if number % 2 else ways.items():
                start = time.perf_counter()
                way()
                seconds[name] += time.perf_counter() - start
    return seconds


def lines(effort: Effort) -> list[Line]:
    return [Line("one step", lambda: one_step(effort)), Line("a run", lambda: whole_run(effort))]


def texts(measured: Figures) -> dict[str, str]:
    step, run = measured["one step"], measured["a run"]
    rows = [
        [name, f"{seconds:.3f}", f"{seconds / next(iter(found.values())):.3f}"]
        for found in (step, run)
        for name, seconds in found.items()
    ]
    return {
        "table": table(("what", "seconds", "relative"), rows),
        "step": ratio(step[MEASURED] / step[STEP]),
        "run": ratio(run[WATCHED] / run[PLAIN]),
    }


BENCHMARK = Benchmark("monitor", __doc__, lines, texts, minutes=2, rounds=9, peers=("transformers",))

if __name__ == "__main__":
    BENCHMARK.main()
