"""The contests of soft-cap, ALiBi, sinks and a learned bias beside FlexAttention, whose scores are changed by hand.

Short ones put FlexAttention beside blocks: they show from how many scores on it pays.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import clearhead
from benchmarks.comparing import OURS, Case, Contest, TimedCase, enter
from benchmarks.gpu.timing import device_samples
from benchmarks.peers.work import Outputs, Unsupported
from clearhead import masks
from clearhead.positions import ALiBi

__all__ = ["BARS", "CROSSING", "FLEX", "SCORED", "scored_cases", "scored_name"]

SCORED = "causal attention with changed scores, forward and backward, bf16, B=1 H=16"
FLEX = "FlexAttention, compiled"
#: What changes the scores, and the least time of FlexAttention in Clearhead's.
BARS = {"soft-cap": 0.97, "ALiBi": 0.97, "sinks": 0.9, "bias of keys": 0.97}
CROSSING = "soft-cap by blocks and by FlexAttention, forward and backward, bf16, B=1 H=16"
#: 2²⁰, 2²² and 2²⁴ scores of 16 heads.
SHORT_LENGTHS = (256, 512, 1024)
_SOFTCAP = 50.0


def scored_cases(device: str, length: int, head_dim: int, heads: int, peers: bool) -> Iterator[Case]:
    """A contest for each of `BARS`; ``peers`` takes in FlexAttention, which is compiled."""
    for what in BARS:
        prepare = partial(_contest, what, (1, heads, length, head_dim), device, peers)
        yield TimedCase(
            SCORED, scored_name(what, head_dim, length), prepare, tolerance=5e-2, budget=2.0, sample=device_samples
        )

    for short in SHORT_LENGTHS if device != "cpu" else ():
        prepare = partial(_crossing, (1, heads, short, head_dim), device)
        name = scored_name("soft-cap", head_dim, short)
        yield TimedCase(CROSSING, name, prepare, tolerance=5e-2, budget=1.0, sample=device_samples)


def _crossing(shape: tuple[int, int, int, int], device: str) -> Contest:
    """A call that runs in blocks below the threshold, and on FlexAttention above it, on both."""
    torch.manual_seed(0)
    query, key, value, gradient = (torch.randn(shape, device=device).bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (query, key, value)]

    def forced(kernel: str) -> Outputs:
        with clearhead.use_kernel(kernel):
            output = clearhead.attention(query, key, value, masks.causal(), softcap=_SOFTCAP)
        return output, *torch.autograd.grad(output, leaves, gradient)

    chosen = clearhead.explain(query, key, value, masks.causal(), softcap=_SOFTCAP).kernel or "none"
    contest = Contest(kernel=chosen)
    enter(contest, OURS, lambda: partial(forced, chosen))
    for kernel in ("chunked", "flex"):
        enter(contest, kernel, lambda kernel=kernel: partial(forced, kernel))
    return contest


def scored_name(what: str, head_dim: int, length: int) -> str:
    return f"{what}, D={head_dim}, L={length:,}"


def _contest(what: str, shape: tuple[int, int, int, int], device: str, peers: bool) -> Contest:
    _, heads, length, _ = shape
    torch.manual_seed(0)
    query, key, value, gradient = (torch.randn(shape, device=device).bfloat16() for _ in range(4))
    sinks, bias = torch.randn(heads, device=device), torch.randn(1, heads, 1, length, device=device)
    more = {"sinks": [sinks], "bias of keys": [bias]}.get(what, [])
    leaves = [x.requires_grad_() for x in (query, key, value, *more)]
    added = {"ALiBi": ALiBi(heads), "bias of keys": masks.bias(bias)}.get(what)
    mask = masks.causal() if added is None else masks.causal() & added
    mask = mask.prepare(length, length, batch_size=1, num_heads=heads, device=torch.device(device))
    softcap, learned = _SOFTCAP if what == "soft-cap" else None, sinks if what == "sinks" else None

    def ours() -> Tensor:
        return clearhead.attention(query, key, value, mask, softcap=softcap, sinks=learned)

    def trained(forward: Callable[[], Tensor]) -> Outputs:
        output = forward()
        return output, *torch.autograd.grad(output, leaves, gradient)

    contest = Contest(
        kernel=clearhead.explain(query, key, value, mask, softcap=softcap, sinks=learned).kernel or "none"
    )
    enter(contest, OURS, lambda: lambda: trained(ours))
    if peers:
        enter(
            contest,
            FLEX,
            lambda: partial(trained, partial(_flex(what, device, length, sinks, bias), query, key, value)),
        )
    return contest


def _flex(
    what: str, device: str, length: int, sinks: Tensor, bias: Tensor
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if device == "cpu":
        raise Unsupported("it is compiled for GPUs here")
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    slopes = ALiBi(len(sinks)).slopes.to(device)

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if what == "bias of keys":
            return score + bias[0, h, 0, j]
        return _SOFTCAP * torch.tanh(score / _SOFTCAP) if what == "soft-cap" else score - slopes[h] * (i - j).abs()

    blocks = flex.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, length, length, device=device)
    attend = torch.compile(flex.flex_attention, dynamic=False)
    if what != "sinks":
        return lambda query, key, value: attend(query, key, value, change, blocks)

    def with_sinks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, aux = attend(query, key, value, block_mask=blocks, return_aux=flex.AuxRequest(lse=True))
        return output * torch.sigmoid(aux.lse - sinks[None, :, None])[..., None].to(output.dtype)

    return with_sinks
