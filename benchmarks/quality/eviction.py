"""What is lost when a cache keeps a quarter of the keys: every policy beside random eviction.

    python -m benchmarks.quality.eviction [--docs]

The model is that of examples/character_model.py, trained here for 400 steps. It reads held-out passages of
its training length character by character with an `EvictingKVCache` in every layer. Counted are the characters after
the budget is full, where something has been evicted:

* output error: how far the stack's output is from that with a full cache, ‖o − o_full‖ / ‖o_full‖ over all of them.
* divergence: of what it expects next, KL(full ‖ evicting) in bits per character.
* bits per character: what the text costs; with a full cache, the model's own figure.

The first row of the table has room for everything and shows what rounding alone does. By lot: the mean over seeds, and
the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.timing import progress
from benchmarks.writing import table
from clearhead import masks
from clearhead.caches import Cache, EvictingKVCache, EvictionPolicy, HeavyHitters, RandomEviction, SinksAndRecent
from examples.character_model import LENGTH, CharacterModel, Corpus, read_corpus, trained

__all__ = ["POLICIES", "Loss", "compare", "held_out_passages"]

#: What is compared with random eviction.
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


def measured_losses(effort: Effort) -> dict[str, dict[str, float]]:
    corpus = read_corpus()
    model = trained(corpus, effort.size(400, 1), 0, None)
    text = held_out_passages(corpus, effort.size(32, 1))
    found = compare(model, text, LENGTH // 4, effort.size(5, 1))
    return {name: asdict(loss) for name, loss in found.items()}


def lines(effort: Effort) -> list[Line]:
    return [Line("losses", lambda: measured_losses(effort))]


def texts(measured: Figures) -> dict[str, str]:
    losses = {name: Loss(**loss) for name, loss in measured["losses"].items()}
    lots = [loss for name, loss in losses.items() if name.startswith("by lot")]
    mean = Loss(*(sum(one) / len(lots) for one in zip(*(asdict(loss).values() for loss in lots), strict=True)))
    shown = {"everything kept": losses["full cache"], **{f"`{name}`": losses[name] for name in POLICIES}}
    best = min(lots, key=lambda one: one.error)
    shown |= {f"`RandomEviction()`, mean of {len(lots)} seeds": mean, "`RandomEviction()`, the best seed": best}
    rows = [[name, f"{loss.error:.3f}", f"{loss.divergence:.3f}", f"{loss.bits:.3f}"] for name, loss in shown.items()]
    return {"table": table(("policy", "output error", "divergence, bits", "bits per character"), rows)}


BENCHMARK = Benchmark("eviction", __doc__, lines, texts, minutes=2)

if __name__ == "__main__":
    BENCHMARK.main()
