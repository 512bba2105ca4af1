"""Attention with four statistics of its weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from benchmarks.command import Effort
from benchmarks.comparing import OURS, Contest, TimedCase, enter
from benchmarks.peers import SDPA
from benchmarks.peers.work import AttentionWork, Outputs, draw

from .attention import kernel_of

__all__ = ["ALONE", "LINE", "inspecting_cases"]

STATISTICS = ("entropy", "received", "max_logit", "top_k")
#: The line in the result file.
LINE = "attention + entropy, received, max_logit, top-8: L=4096"
ALONE = f"{OURS}, attention alone"


class Attend(nn.Module):
    """A model of one attention and nothing else."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


def inspecting_cases(effort: Effort) -> Iterator[TimedCase]:
    section, _, name = LINE.partition(": ")
    yield TimedCase(section, name, lambda: _contest(effort.size(4096)))


def _contest(length: int) -> Contest:
    work = AttentionWork(length)
    operands = draw(work)
    query, key, value = operands.query, operands.key, operands.value
    model = Attend()

    def recorded() -> Outputs:
        with torch.no_grad(), clearhead.record(model, STATISTICS, top_k=8):
            return (model(query, key, value),)

    def computed() -> Outputs:
        with torch.no_grad():
            names = (*STATISTICS, "output")
            return (clearhead.attention_statistics(query, key, value=value, statistics=names, top_k=8).output,)

    def in_two_steps() -> Outputs:
        with torch.no_grad():
            output = clearhead.attention(query, key, value)
            clearhead.attention_statistics(query, key, statistics=STATISTICS, top_k=8)
            return (output,)

    def alone() -> Outputs:
        with torch.no_grad():
            return (clearhead.attention(query, key, value),)

    def sdpa() -> Outputs:
        with torch.no_grad():
            return (F.scaled_dot_product_attention(query, key, value),)

    contest = Contest(kernel=kernel_of(work, operands))
    enter(contest, OURS, lambda: computed)
    enter(contest, f"{OURS}, in two steps", lambda: in_two_steps)
    enter(contest, f"{OURS}, record of SDPA's model", lambda: recorded)
    enter(contest, ALONE, lambda: alone)
    enter(contest, SDPA, lambda: sdpa)
    return contest
