"""Train a two-layer model on repeated sequences, and find its induction head with a census.

    python examples/induction.py [--steps 1200] [--figure induction.svg] [--page heads.html]

Each sequence repeats a few random tokens, so the next token is known only to a model that looks up what followed the
token before. Two layers of attention learn to: a head of the first layer attends to the previous token, and one of the
second to the token that followed an earlier occurrence (Olsson et al., "In-context Learning and Induction Heads",
2022). The census names both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from clearhead import masks, positions

VOCABULARY, LENGTH, WIDTH, HEADS = 48, 33, 64, 4


class AttentionOnly(nn.Module):
    """Two layers of causal attention, each added to what it read, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            clearhead.MultiHeadAttention(WIDTH, HEADS, position=positions.Rotary(WIDTH // HEADS)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.read = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # (B, L, E)
        for norm, attend in zip(self.norms, self.layers, strict=True):
            x = x + attend(norm(x), mask=masks.causal())
        return self.read(x)  # (B, L, vocabulary)


def repeated(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences (B, L) with a random period each, and where the next token is known, bool (B, L − 1)."""
    periods = torch.randint(6, LENGTH // 2 + 1, (batch, 1), generator=generator)
    tokens = torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)
    places = torch.arange(LENGTH)
    return tokens.gather(1, places % periods), places[1:] >= periods


def train(steps: int, generator: torch.Generator) -> AttentionOnly:
    """A model that has learned to continue repeated sequences."""
    model = AttentionOnly()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens, known = repeated(32, generator)
        logits = model(tokens[:, :-1])  # (B, L − 1, vocabulary)
        loss = F.cross_entropy(logits[known], tokens[:, 1:][known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    return model.eval()


def draw(model: nn.Module, tokens: Tensor, found: clearhead.Census, path: Path) -> None:
    """The heads that the census names, on one sequence."""
    import matplotlib.pyplot as plt

    with clearhead.record(model, ("entropy",), keep="queries_keys") as rec, torch.no_grad():
        model(tokens)
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.2), layout="constrained")
    for axis, kind in zip(axes, ("previous", "induction"), strict=True):
        best = found.rank_heads(kind)[0]
        axis.imshow(rec.weights(best.layer, best.head)[0], cmap="Blues", vmin=0, vmax=1)
        axis.set_title(f"{kind}: {best.layer}, head {best.head} ({best.weight:.2f})", fontsize=10)
        axis.set_xlabel("key")
        axis.set_ylabel("query")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> clearhead.Census:
    """Train, take the census, and print what it found."""
    parser = argparse.ArgumentParser(description="Train a two-layer model and find its induction head.")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--page", type=Path)
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = train(chosen.steps, generator)
    found = clearhead.census(model, [repeated(32, generator)[0] for _ in range(8)])
    print(found)
    if chosen.figure:
        draw(model, repeated(1, generator)[0], found, chosen.figure)
    if chosen.page:
        found.page(title="What the heads of a two-layer model do").save(chosen.page)
    return found


if __name__ == "__main__":
    main()
