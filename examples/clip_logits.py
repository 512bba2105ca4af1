"""A small model whose attention logits grow without bound at a high learning rate, and stay bounded with QK-Clip.

    python examples/clip_logits.py

One attention layer learns to write texts of random letters backwards. At a learning rate of 0.05 Adam enlarges the
query and key projections step by step: largest logits double and double again, long after the task is solved. With
`clearhead.qk_clip_` after every step they stay at the threshold, and the task is learnt all the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead

LETTERS, LENGTH, TEXTS, WIDTH, HEADS = 16, 12, 32, 32, 2


class Step(NamedTuple):
    """One step of training: the loss, and the largest scale · q·k of its forward pass."""

    loss: float
    logit: float


class Backwards(nn.Module):
    """Reads letters and writes them in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attend = clearhead.MultiHeadAttention(WIDTH, HEADS)
        self.write = nn.Linear(WIDTH, LETTERS)

    def forward(self, texts: Tensor) -> Tensor:
        """(B, L) → scores of letters (B, L, LETTERS)."""
        return self.write(self.attend(self.letters(texts) + self.places.weight))


def largest_logits(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """What `run` returns, and (B, H) largest raw logits of each attention module."""
    with clearhead.record(model, ("raw_max_logit",)) as rec:
        result = run()
    return result, {name: calls.raw_max_logit for name, calls in rec.items()}


def train(steps: int, *, threshold: float | None = None, learning_rate: float = 0.05) -> list[Step]:
    """Train on one set of texts, and clip logits after each step if there is a threshold."""
    torch.manual_seed(0)
    model, texts = Backwards(), torch.randint(LETTERS, (TEXTS, LENGTH))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    done: list[Step] = []
    for _ in range(steps):
        scores, logits = largest_logits(model, lambda: model(texts))
        loss = F.cross_entropy(scores.flatten(0, 1), texts.flip(1).flatten())
        done.append(Step(loss.item(), max(float(found.max()) for found in logits.values())))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if threshold is not None:
            clip(model, texts, threshold)
    return done


@torch.no_grad()
def clip(model: nn.Module, texts: Tensor, threshold: float) -> None:
    """Scale query projections until no logit on these texts is above the threshold."""
    _, logits = largest_logits(model, lambda: model(texts))
    for name, found in logits.items():
        clearhead.qk_clip_(model.get_submodule(name), found, threshold)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="of training (default 400)")
    parser.add_argument("--threshold", type=float, default=100.0, help="of the largest logit (default 100)")
    arguments = parser.parse_args()
    free, clipped = train(arguments.steps), train(arguments.steps, threshold=arguments.threshold)
    print(f"{'step':>6}{'logit':>10}{'loss':>9}{'clipped':>12}{'loss':>9}")
    for step in range(0, arguments.steps, max(1, arguments.steps // 8)):
        print(f"{step:>6}{free[step].logit:>10.1f}{free[step].loss:>9.3f}", end="")
        print(f"{clipped[step].logit:>12.1f}{clipped[step].loss:>9.3f}")
    print(f"largest: {max(s.logit for s in free):.1f} without, {max(s.logit for s in clipped):.1f} with qk_clip_")


if __name__ == "__main__":
    main()
