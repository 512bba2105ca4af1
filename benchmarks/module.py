"""`clearhead.MultiHeadAttention` beside `torch.nn.MultiheadAttention`: eval and training, with and without weights.

    python -m benchmarks.module

Both modules hold the same weights; each pair is timed in turn in one process. "Eval" is a forward pass under
`no_grad`, "train" forward and backward. A ratio above 1 means Clearhead is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table

import clearhead
from benchmarks.timing import console, interleaved, machine, progress

SHAPES = [(2, 5, 16, 4), (32, 16, 64, 4), (8, 128, 768, 12), (8, 512, 768, 12), (1, 2048, 512, 8), (1, 4096, 512, 8)]


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    batch_size: int
    length: int
    embed_dim: int
    num_heads: int
    train: bool
    need_weights: bool
    causal: bool


def settings() -> list[Setting]:
    return [
        Setting(*shape, train=train, need_weights=need_weights, causal=causal)
        for shape in SHAPES
        for train in (False, True)
        for need_weights, causal in ((False, False), (False, True), (True, False))
    ]


def twins(embed_dim: int, num_heads: int) -> tuple[clearhead.MultiHeadAttention, torch.nn.MultiheadAttention]:
    """The two modules with the same weights."""
    theirs = torch.nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
    ours = clearhead.MultiHeadAttention(embed_dim, num_heads)
    with torch.no_grad():
        weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
        for projection, weight, bias in zip((ours.q_proj, ours.k_proj, ours.v_proj), weights, biases, strict=True):
            projection.weight.copy_(weight)
            projection.bias.copy_(bias)
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    return ours, theirs


def calls(setting: Setting) -> dict[str, Callable[[], object]]:
    ours, theirs = twins(setting.embed_dim, setting.num_heads)
    ours.train(setting.train)
    theirs.train(setting.train)
    x = torch.randn(setting.batch_size, setting.length, setting.embed_dim)
    hidden = torch.ones(setting.length, setting.length, dtype=torch.bool).triu(1) if setting.causal else None
    mask = clearhead.masks.causal() if setting.causal else None

    def run_ours() -> torch.Tensor:
        output = ours(x, mask=mask, need_weights=setting.need_weights)
        return output[0] if setting.need_weights else output

    def run_theirs() -> torch.Tensor:
        return theirs(x, x, x, need_weights=setting.need_weights, attn_mask=hidden, is_causal=setting.causal)[0]

    return {"clearhead": _timed(run_ours, setting.train), "torch": _timed(run_theirs, setting.train)}


def _timed(run: Callable[[], torch.Tensor], train: bool) -> Callable[[], object]:
    if train:
        return lambda: run().sum().backward()

    def without_gradients() -> torch.Tensor:
        with torch.no_grad():
            return run()

    return without_gradients


def main() -> None:
    torch.manual_seed(0)
    table = Table(
        title="MultiHeadAttention and nn.MultiheadAttention, float32, milliseconds (medians)", caption=machine()
    )
    for column in ("B", "L", "E", "H", "mode", "weights", "causal", "clearhead", "torch", "ratio"):
        table.add_column(column, justify="right")
    for setting in progress(settings(), "timing"):
        times = interleaved(calls(setting))
        table.add_row(
            str(setting.batch_size),
            str(setting.length),
            str(setting.embed_dim),
            str(setting.num_heads),
            "train" if setting.train else "eval",
            "yes" if setting.need_weights else "no",
            "yes" if setting.causal else "no",
            f"{times['clearhead'] * 1e3:.2f}",
            f"{times['torch'] * 1e3:.2f}",
            f"{times['torch'] / times['clearhead']:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
