"""Attention alone: forward, causal, with gradients, dropout, masks, in bfloat16, and of other head sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import clearhead
from benchmarks.command import Effort
from benchmarks.comparing import OURS, Contest, TimedCase, enter, scale_difference
from benchmarks.peers import PEERS, SDPA
from benchmarks.peers.work import AttentionWork, Operands, Outputs, Way, draw, with_backward

from .ceilings import add_gemm

__all__ = ["CAUSAL", "FORWARD", "FORWARD_BACKWARD", "attention_cases", "kernel_of", "our_mask", "ours", "peers"]

FORWARD, CAUSAL, FORWARD_BACKWARD = "attention forward, fp32", "causal forward, fp32", "forward + backward, fp32"
NOT_CAUSAL = f"{OURS} without the mask"


def attention_cases(effort: Effort) -> Iterator[TimedCase]:
    def case(section: str, name: str, work: AttentionWork, **how: Any) -> TimedCase:
        work = replace(work, length=effort.size(work.length))
        return TimedCase(section, name, lambda: _contest(work, effort), "GFLOP/s", **how)

    for length in (512, 1024, 2048, 4096, 8192):
        yield case(FORWARD, f"L={length}", AttentionWork(length))
    for length in (512, 1024, 2048, 4096, 8192):
        yield case(CAUSAL, f"L={length}", AttentionWork(length, causal=True))
    for length in (512, 1024, 2048, 4096):
        yield case(FORWARD_BACKWARD, f"L={length}", AttentionWork(length, backward=True))
    dropout = AttentionWork(1024, dropout_p=0.1, backward=True)
    # The scales of a few numbers differ by chance.
    scales: dict[str, Any] = {"difference": scale_difference, "tolerance": 1.0 if effort.smallest else 0.02}
    yield case("forward + backward, dropout 0.1", "L=1024", dropout, **scales)
    for kind in ("bool", "float"):
        for length in (1024, 4096):
            yield case("dense (L, S) mask", f"{kind}, L={length}", AttentionWork(length, mask=kind))
    for length in (512, 1024, 4096):
        work = AttentionWork(length, dtype=torch.bfloat16)
        # Some peers round scores and weights to bfloat16's eight bits too, which moves a weight by up to a few percent.
        yield case("attention forward, bf16", f"L={length}", work, tolerance=5e-2)
    for length in (1024, 4096):
        work = AttentionWork(length, dtype=torch.bfloat16, backward=True)
        yield case("forward + backward, bf16", f"L={length}", work, tolerance=5e-2)
    for size in (32, 80, 128, 256):
        yield case("head sizes, fp32", f"D={size}, L=2048", AttentionWork(2048, head_dim=size))
    for size in (32, 128):
        yield case("head sizes, fp32", f"D=64, Dv={size}, L=2048", AttentionWork(2048, value_dim=size))


def _contest(work: AttentionWork, effort: Effort) -> Contest:
    operands = draw(work)
    contest = Contest(kernel=kernel_of(work, operands))
    enter(contest, OURS, lambda: ours(work, operands), work.flops)
    for name, peer in peers(effort).items():
        enter(contest, name, lambda peer=peer: peer(work, operands), work.flops)
    if work.causal:
        enter(contest, NOT_CAUSAL, lambda: _silent(ours(replace(work, causal=False), operands)))
    if not work.backward and not work.causal and work.mask is None:
        add_gemm(contest, work.dtype, effort.size(2048))
    return contest


def peers(effort: Effort) -> dict[str, Callable[[AttentionWork, Operands], Way]]:
    """All of them, or PyTorch's fused call alone."""
    return PEERS if effort.peers else {SDPA: PEERS[SDPA]}


def ours(work: AttentionWork, operands: Operands) -> Way:
    """Clearhead on the kernel it chooses."""
    mask = our_mask(work, operands)

    def forward() -> Tensor:
        return clearhead.attention(operands.query, operands.key, operands.value, mask, dropout_p=work.dropout_p)

    return with_backward(forward, work, operands)


def our_mask(work: AttentionWork, operands: Operands) -> clearhead.masks.Mask | None:
    if work.causal:
        return clearhead.masks.causal()
    if operands.mask is None:
        return None
    return clearhead.masks.bias(operands.mask) if work.mask == "float" else clearhead.masks.keep(operands.mask)


def kernel_of(work: AttentionWork, operands: Operands) -> str:
    """The kernel that runs the work."""
    with torch.set_grad_enabled(work.backward):
        explanation = clearhead.explain(
            operands.query, operands.key, operands.value, our_mask(work, operands), dropout_p=work.dropout_p
        )
    return explanation.kernel or "none"


def _silent(way: Way) -> Way:
    """Timed, not compared: it computes something else."""

    def run() -> Outputs:
        way()
        return ()

    return run
