"""What is lost when a cache keeps a quarter of the keys: every policy beside eviction by lot.

    python -m benchmarks.eviction [--weights out/character_model.pt] [--budget 32] [--rows 32] [--seeds 5]

The model is that of examples/character_model.py, trained here unless the file is there. It reads held-out passages of
its training length character by character with an `EvictingKVCache` in every layer. Counted are the characters after
the budget is full, where something has been evicted:

* output error: how far the stack's output is from that with a full cache, ‖o − o_full‖ / ‖o_full‖ over all of them.
* divergence: of what it expects next, KL(full ‖ evicting) in bits per character.
* bits per character: what the text costs; with a full cache, the model's own figure.

The first row has room for everything and shows what rounding alone does. By lot: the mean over seeds, and the best of
them; a policy beats it if it has a smaller output error than the best.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.timing import console, machine, progress
from clearhead import masks
from clearhead.caches import Cache, EvictingKVCache, EvictionPolicy, HeavyHitters, RandomEviction, SinksAndRecent
from examples.character_model import LENGTH, CharacterModel, Corpus, read_corpus, trained

__all__ = ["POLICIES", "Loss", "compare", "held_out_passages"]

#: What is compared with eviction by lot.
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "HeavyHitters()": HeavyHitters,
    "SinksAndRecent()": SinksAndRecent,
}


@dataclass(frozen=True)
class Loss:
    """What a policy loses, over all rows and over the characters after the budget is full.

    Args:
        error: ‖o − o_full‖ / ‖o_full‖ of the stack's output.
        divergence: of the next character, KL(full ‖ evicting) in bits.
        bits: what a character costs.
    """

    error: float
    divergence: float
    bits: float


def held_out_passages(corpus: Corpus, rows: int) -> Tensor:
    """(rows, LENGTH + 1) characters, spread evenly over the held-out text."""
    starts = torch.linspace(0, len(corpus.held_out) - LENGTH - 1, rows).long()
    return corpus.held_out[starts[:, None] + torch.arange(LENGTH + 1)]


@torch.no_grad()
def outputs(model: CharacterModel, text: Tensor, caches: list[Cache] | None) -> Tensor:
    """The stack's output (B, L, E): in one pass, or character by character with caches."""
    x = model.embed(text)
    if caches is None:
        return model.decoder(x, mask=masks.causal())
    steps = [model.decoder(x[:, [n]], mask=masks.causal(), cache=caches) for n in range(x.shape[1])]
    return torch.cat(steps, 1)


def evicting(model: CharacterModel, rows: int, budget: int, policy: Callable[[], EvictionPolicy]) -> list[Cache]:
    """An evicting cache for every layer, each with a policy of its own."""
    attentions = [layer.self_attention for layer in model.decoder.layers]
    return [
        EvictingKVCache(rows, attention.num_kv_heads, budget, attention.head_dim, policy=policy())
        for attention in attentions
    ]


@torch.no_grad()
def lost(model: CharacterModel, text: Tensor, full: Tensor, found: Tensor, start: int) -> Loss:
    """Compare outputs (B, L, E) from character `start` on."""
    full, found, following = full[:, start:], found[:, start:], text[:, start + 1 :, None]
    expected, logs = (model.head(output).log_softmax(-1) for output in (full, found))
    return Loss(
        ((found - full).norm() / full.norm()).item(),
        max(0.0, (expected.exp() * (expected - logs)).sum(-1).mean().item()) / math.log(2),
        -logs.gather(-1, following).mean().item() / math.log(2),
    )


def policies(seeds: int, layers: int) -> Iterator[tuple[str, Callable[[], EvictionPolicy]]]:
    """Every policy, and random ones of which no two, in no two layers, draw alike."""
    yield from POLICIES.items()
    for seed in range(seeds):
        own = iter(range(seed * layers, (seed + 1) * layers))
        yield f"by lot, seed {seed}", lambda own=own: RandomEviction(next(own))


def compare(model: CharacterModel, text: Tensor, budget: int, seeds: int) -> dict[str, Loss]:
    """What every policy loses, by name, and the full cache as ``full cache``."""
    full = outputs(model, text[:, :-1], None)
    room = evicting(model, len(text), LENGTH, HeavyHitters)
    found = {"full cache": lost(model, text, full, outputs(model, text[:, :-1], room), budget)}
    jobs = list(policies(seeds, len(model.decoder.layers)))
    for name, policy in progress(jobs, "reading"):
        caches = evicting(model, len(text), budget, policy)
        found[name] = lost(model, text, full, outputs(model, text[:, :-1], caches), budget)
    return found


def show(found: dict[str, Loss], budget: int, rows: int) -> None:
    table = Table(
        title=f"{budget} of {LENGTH} keys kept, {rows} held-out passages, characters {budget + 1} … {LENGTH}",
        caption=machine(),
    )
    for column in ("cache", "output error", "divergence, bits", "bits per character", "beats the best lot"):
        table.add_column(column, justify="left" if column == "cache" else "right", no_wrap=column == "cache")
    lots = [loss for name, loss in found.items() if name.startswith("by lot")]
    rest = {name: loss for name, loss in found.items() if not name.startswith("by lot")}
    mean = Loss(*(sum(getattr(one, field.name) for one in lots) / len(lots) for field in fields(Loss)))
    best = min(lots, key=lambda loss: loss.error)
    for name, loss in (rest | {f"by lot, mean of {len(lots)}": mean, "by lot, the best": best}).items():
        beats = "" if name not in POLICIES else "yes" if loss.error < best.error else "NO"
        table.add_row(name, f"{loss.error:.4f}", f"{loss.divergence:.4f}", f"{loss.bits:.3f}", beats)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, help="the model's file; if it is not there, it is written")
    parser.add_argument("--steps", type=int, default=400, help="training steps if there is none (default 400)")
    parser.add_argument("--budget", type=int, default=LENGTH // 4, help=f"keys per head (default {LENGTH // 4})")
    parser.add_argument("--rows", type=int, default=32, help="held-out passages (default 32)")
    parser.add_argument("--seeds", type=int, default=5, help="of eviction by lot (default 5)")
    arguments = parser.parse_args()
    corpus = read_corpus()
    model = trained(corpus, arguments.steps, 0, arguments.weights)
    text = held_out_passages(corpus, arguments.rows)
    show(compare(model, text, arguments.budget, arguments.seeds), arguments.budget, arguments.rows)


if __name__ == "__main__":
    main()
