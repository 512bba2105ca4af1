"""`clearhead.MultiHeadAttention` beside `torch.nn.MultiheadAttention`: eval and training, with and without weights.

    python -m benchmarks.cpu.module [--docs]

Both modules hold the same weights; each pair is timed in turn in one process. "Eval" is a forward pass under
`no_grad`, "train" forward and backward. A ratio above 1 means Clearhead is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing.pictures import draw_speed
from benchmarks.figures import ROOT, Figures
from benchmarks.timing import interleaved
from benchmarks.writing import ratio, significant, table

SHAPES = [(2, 5, 16, 4), (32, 16, 64, 4), (8, 128, 768, 12), (8, 512, 768, 12), (1, 2048, 512, 8), (1, 4096, 512, 8)]
PICTURE = ROOT / "docs" / "images" / "module.svg"


@final
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

    def __str__(self) -> str:
        shape = f"{self.batch_size}, {self.length}, {self.embed_dim}, {self.num_heads}"
        options = f"{', causal' if self.causal else ''}{', weights' if self.need_weights else ''}"
        return f"{shape}, {'training step' if self.train else 'eval'}{options}"


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


LONG, TINY, SMALL, SHORT = "1, 4096, 512, 8", "2, 5, 16, 4", "32, 16, 64, 4", "8, 128, 768, 12"
#: The ratio of PyTorch's time to Clearhead's, by marker.
RATIOS = {
    "eval": f"{LONG}, eval",
    "causal-eval": f"{LONG}, eval, causal",
    "eval-weights": f"{LONG}, eval, weights",
    "train": f"{LONG}, training step",
    "causal-train": f"{LONG}, training step, causal",
    "train-weights": f"{LONG}, training step, weights",
    "tiny-eval": f"{TINY}, eval",
    "tiny-train": f"{TINY}, training step",
    "small-eval": f"{SMALL}, eval",
    "small-train": f"{SMALL}, training step",
    "short-eval": f"{SHORT}, eval",
    "short-train": f"{SHORT}, training step",
}


def lines(effort: Effort) -> list[Line]:
    def measure(setting: Setting) -> dict[str, float]:
        return interleaved(calls(setting), rounds=effort.rounds)

    return [
        Line(str(each), lambda each=each: measure(replace(each, length=effort.size(each.length))))
        for each in settings()
    ]


def texts(measured: Figures) -> dict[str, str]:
    ratios = {name: times["torch"] / times["clearhead"] for name, times in measured.items()}
    rows = [
        [name, significant(times["clearhead"] * 1e3), significant(times["torch"] * 1e3), ratio(ratios[name])]
        for name, times in measured.items()
    ]
    header = ("B, L, E, H, work", "Clearhead, ms", "nn.MultiheadAttention, ms", "ratio")
    return {"table": table(header, rows), **{name: ratio(ratios[line]) for name, line in RATIOS.items()}}


def pictures(measured: Figures) -> dict[Path, str]:
    """Inference of every size, and training, from the smallest to the largest."""
    shown = {name: times for name, times in measured.items() if name.endswith((", eval", ", training step"))}
    speeds = {f"B, L, E, H = {name}": times["torch"] / times["clearhead"] for name, times in shown.items()}
    return {PICTURE: draw_speed(speeds, "speed relative to nn.MultiheadAttention (1: as fast; longer: faster)")}


BENCHMARK = Benchmark("module", __doc__, lines, texts, minutes=2, rounds=15)

if __name__ == "__main__":
    BENCHMARK.main()
