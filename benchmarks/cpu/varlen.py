"""Documents end to end (`clearhead.attention_varlen`) beside the same documents as a batch (`clearhead.attention`).

    python -m benchmarks.cpu.varlen [--only PATTERN] [--rounds 5] [--docs]

65,536 tokens, once in documents of 256 tokens and once in documents of 16 to 1,024 tokens; the batch of the latter is
padded, and its mask marks padding among queries and keys alike. Both are timed in turn in one process, full and causal,
forward alone and forward + backward, after their results are compared. Memory is how far one call raises the peak
resident memory of a process of its own beyond its operands and results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing import (
    OURS,
    Case,
    Contest,
    Result,
    TimedCase,
    enter,
    lines_of,
    markdown,
    read_results,
    wrong_results,
)
from benchmarks.figures import Figures
from benchmarks.memory import growth_of_peak
from benchmarks.peers.work import AttentionWork, Operands, Outputs, Way, with_backward
from benchmarks.writing import ratio

HEADS, HEAD_DIM = 8, 64
TOKENS = 65_536
EQUAL, MIXED = "256 documents of 256 tokens", "129 documents of 16 to 1024 tokens"
BATCH = "the same documents as a batch"


@final
@dataclass(frozen=True)
class Setting:
    """Documents, and the call they are attended with.

    Args:
        lengths: tokens of each document.
        causal: causal within each document.
        backward: forward and the gradients of query, key and value.
    """

    lengths: tuple[int, ...]
    causal: bool
    backward: bool

    @property
    def mask(self) -> clearhead.masks.Mask | None:
        return clearhead.masks.causal() if self.causal else None

    def __str__(self) -> str:
        return f"{'causal' if self.causal else 'full'}, {'forward + backward' if self.backward else 'forward'}"


def all_cases(effort: Effort) -> list[Case]:
    """Every line of the table: documents of 256 tokens, and of 16 to 1,024."""
    tokens, equal, longest = effort.size(TOKENS, 35), effort.size(256, 7), effort.size(1024, 11)
    same, mixed = (equal,) * (tokens // equal), mixed_lengths(tokens, effort.size(16, 1), longest)
    sections = {
        EQUAL: same,
        MIXED: mixed,
    }
    return [case for section, lengths in sections.items() for case in _cases(section, lengths)]


def _cases(section: str, lengths: tuple[int, ...]) -> Iterator[Case]:
    settings = [Setting(lengths, causal, backward) for causal in (False, True) for backward in (False, True)]
    for setting in settings:
        yield TimedCase(section, str(setting), lambda setting=setting: _contest(setting))
    for setting in settings:
        yield MemoryCase(section, f"memory, {setting}", setting)


def mixed_lengths(tokens: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Uniformly drawn lengths that add up to `tokens`; the last document is cut where they end."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(torch.randint(shortest, longest + 1, (), generator=generator))))
    return tuple(lengths)


@final
@dataclass(frozen=True)
class MemoryCase(Case):
    """Peak memory beyond operands and results, of each way in a process of its own."""

    section: str
    name: str
    setting: Setting

    def measure(self, effort: Effort) -> Result:
        figures = {name: effort.in_a_process(extra_memory, name, self.setting) for name in WAYS}
        return Result(self.section, self.name, "MB", figures, kernel=_kernel(self.setting))


def extra_memory(name: str, setting: Setting) -> float:
    """Megabytes (10⁶ bytes) that one call needs beyond its operands and results."""
    WAYS[name](Setting((5, 3), setting.causal, setting.backward))()  # libraries and thread pools are loaded once
    growth, results = growth_of_peak(WAYS[name](setting))
    # Less than 0.1 MB is a matter of single pages, and would make ratios meaningless.
    return max(0.1, growth - sum(result.nbytes for result in results) / 1e6)


def end_to_end(setting: Setting) -> Way:
    """The documents as (T, H, D) with their running lengths."""
    operands = _operands(setting, as_batch=False)
    ends = torch.tensor([0, *accumulate(setting.lengths)])  # (n + 1,)

    def forward() -> Tensor:
        return clearhead.attention_varlen(operands.query, operands.key, operands.value, ends, ends, setting.mask)

    return with_backward(forward, _work(setting), operands)


def as_batch(setting: Setting) -> Way:
    """The documents as (B, H, L, D), L the longest; shorter ones are padded."""
    operands = _operands(setting, as_batch=True)
    mask = setting.mask
    if len(set(setting.lengths)) > 1:
        lengths = torch.tensor(setting.lengths)
        padding = clearhead.masks.lengths(lengths, query_lengths=lengths)
        mask = padding if mask is None else mask & padding

    def forward() -> Tensor:
        return clearhead.attention(operands.query, operands.key, operands.value, mask)

    return with_backward(forward, _work(setting), operands)


WAYS = {OURS: end_to_end, BATCH: as_batch}


def _contest(setting: Setting) -> Contest:
    real = torch.arange(max(setting.lengths)) < torch.tensor(setting.lengths)[:, None]  # (B, L)

    def tokens_of(outputs: Outputs) -> Outputs:
        """(B, H, L, D) → (T, H, D)."""
        return tuple(tensor.transpose(1, 2)[real] if tensor.dim() == 4 else tensor for tensor in outputs)

    contest = Contest(kernel=_kernel(setting), compared=tokens_of)
    for name, build in WAYS.items():
        enter(contest, name, lambda build=build: build(setting))
    return contest


def _operands(setting: Setting, as_batch: bool) -> Operands:
    query, key, value = (_draw(setting.lengths, seed, as_batch).requires_grad_(setting.backward) for seed in range(3))
    return Operands(query, key, value, None, _draw(setting.lengths, 3, as_batch))


def _draw(lengths: tuple[int, ...], seed: int, as_batch: bool) -> Tensor:
    """The same tokens in either layout, document by document: a temporary of full size would raise the peak."""
    generator = torch.Generator().manual_seed(seed)
    longest = (len(lengths), HEADS, max(lengths), HEAD_DIM)
    tensor = torch.zeros(longest if as_batch else (sum(lengths), HEADS, HEAD_DIM))
    for document, (end, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
        tokens = torch.randn(length, HEADS, HEAD_DIM, generator=generator)
        if as_batch:
            tensor[document, :, :length] = tokens.transpose(0, 1)
        else:
            tensor[end - length : end] = tokens
    return tensor


def _work(setting: Setting) -> AttentionWork:
    return AttentionWork(sum(setting.lengths), backward=setting.backward)


def _kernel(setting: Setting) -> str:
    """The kernel for one document of the mean length."""
    length = sum(setting.lengths) // len(setting.lengths)
    head = torch.zeros(1, HEADS, length, HEAD_DIM, requires_grad=setting.backward)
    return clearhead.explain(head, head, head, setting.mask).kernel or "none"


def lines(effort: Effort) -> list[Line]:
    return lines_of(all_cases(effort), effort)


def texts(measured: Figures) -> dict[str, str]:
    results = {result.work: result for result in read_results(measured)}
    return {
        "tables": markdown(list(results.values())),
        "mixed": ratio(results[f"{MIXED}: causal, forward + backward"].ratios[BATCH]),
        "equal": ratio(results[f"{EQUAL}: causal, forward + backward"].ratios[BATCH]),
    }


BENCHMARK = Benchmark("varlen", __doc__, lines, texts, minutes=2, wrong=wrong_results)

if __name__ == "__main__":
    BENCHMARK.main()
