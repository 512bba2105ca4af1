"""What `benchmarks.gpu` measures. The device is an argument, so that the tests can run all of it on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from benchmarks.comparing import OURS, Case, Contest, TimedCase, enter
from benchmarks.module import twins
from benchmarks.peers.work import Outputs, Unsupported, Way
from clearhead.errors import KernelError
from clearhead.kernels._choice import KERNELS

__all__ = ["all_cases"]

THEIRS = "nn.MultiheadAttention"
EAGER = "eager with every weight"
HEAD_DIM = 64
STATISTICS = ("entropy", "received", "max_logit", "top_k")
#: Half precision is compared at its own accuracy.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@final
@dataclass(frozen=True)
class Setting:
    """One batch through one module."""

    device: str
    length: int
    heads: int
    dtype: torch.dtype
    train: bool = False
    need_weights: bool = False
    batch: int = 8

    @property
    def embed_dim(self) -> int:
        return self.heads * HEAD_DIM

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        weights = ", averaged weights" if self.need_weights else ""
        return f"{kind}, L={self.length}, {'training step' if self.train else 'eval'}{weights}"


def all_cases(device: str, lengths: tuple[int, ...] = (512, 2048), heads: int = 16) -> list[Case]:
    """Every line of the table."""
    return [*_module_cases(device, lengths, heads), *_record_cases(device, lengths, heads)]


def _module_cases(device: str, lengths: tuple[int, ...], heads: int) -> Iterator[Case]:
    for dtype, tolerance in TOLERANCES.items():
        for length in lengths:
            for train, need_weights in ((False, False), (True, False), (False, True), (True, True)):
                setting = Setting(device, length, heads, dtype, train, need_weights)
                section = f"module, B={setting.batch} E={setting.embed_dim} H={setting.heads}"
                yield TimedCase(
                    section,
                    str(setting),
                    lambda setting=setting: _module_contest(setting),
                    tolerance=tolerance,
                )


def _module_contest(setting: Setting) -> Contest:
    torch.manual_seed(0)
    ours, theirs = (
        module.to(setting.device, setting.dtype).train(setting.train)
        for module in twins(setting.embed_dim, setting.heads)
    )
    shape = (setting.batch, setting.length, setting.embed_dim)
    x = torch.randn(shape, device=setting.device, dtype=setting.dtype, requires_grad=setting.train)
    gradient = torch.randn_like(x)

    def run_ours() -> Outputs:
        output = ours(x, need_weights=setting.need_weights)
        return output if setting.need_weights else (output,)

    def run_theirs() -> Outputs:
        output, weights = theirs(x, x, x, need_weights=setting.need_weights)
        return (output,) if weights is None else (output, weights)

    def way(run: Callable[[], Outputs], module: nn.Module) -> Way:
        parameters = [x, *module.parameters()]

        def step() -> Outputs:
            with torch.set_grad_enabled(setting.train):
                outputs = run()
                if setting.train:
                    outputs = (*outputs, torch.autograd.grad(outputs[0], parameters, gradient)[0])
            _wait(setting.device)
            return outputs

        return step

    head = x.new_zeros(setting.batch, setting.heads, setting.length, HEAD_DIM)
    contest = Contest(kernel=clearhead.explain(head, head, head).kernel or "none")
    enter(contest, OURS, lambda: way(run_ours, ours))
    enter(contest, THEIRS, lambda: way(run_theirs, theirs))
    for kernel in ("sdpa", "flex"):
        enter(contest, f"{OURS} on {kernel}", lambda kernel=kernel: way(_forced(kernel, run_ours), ours))
    return contest


def _forced(kernel: str, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """The same on one kernel, called once to learn whether it supports the call."""
    if kernel not in {each.name for each in KERNELS}:
        raise Unsupported("Clearhead has no such kernel")

    def forced() -> Outputs:
        with clearhead.use_kernel(kernel):
            return run()

    try:
        forced()
    except KernelError as error:
        raise Unsupported(str(error)) from error
    return forced


def _record_cases(device: str, lengths: tuple[int, ...], heads: int) -> Iterator[Case]:
    for length in lengths:
        setting = Setting(device, length, heads, torch.float32)
        section = f"attention + entropy, received, max_logit, top-8, B={setting.batch} H={setting.heads} D={HEAD_DIM}"
        prepare = _preparing(setting)
        yield TimedCase(section, f"float32, L={length}", prepare, tolerance=1e-3)


def _preparing(setting: Setting) -> Callable[[], Contest]:
    return lambda: _record_contest(setting)


class Attend(nn.Module):
    """A model of one attention and nothing else."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


def _record_contest(setting: Setting) -> Contest:
    torch.manual_seed(0)
    shape = (setting.batch, setting.heads, setting.length, HEAD_DIM)
    query, key, value = (torch.randn(shape, device=setting.device) for _ in range(3))
    model = Attend()
    top = min(8, setting.length)

    def recorded() -> Outputs:
        with torch.no_grad(), clearhead.record(model, STATISTICS, top_k=top):
            output = model(query, key, value)
        _wait(setting.device)
        return (output,)

    def eager() -> Outputs:
        with torch.no_grad():
            scores = query @ key.transpose(-2, -1) * HEAD_DIM**-0.5  # (B, H, L, S)
            weights = scores.softmax(-1)
            _ = torch.special.entr(weights).sum(-1), weights.sum(-2), scores.amax(-1), weights.topk(top)
            output = weights @ value
        _wait(setting.device)
        return (output,)

    def alone() -> Outputs:
        with torch.no_grad():
            output = model(query, key, value)
        _wait(setting.device)
        return (output,)

    contest = Contest(kernel=clearhead.explain(query, key, value).kernel or "none")
    enter(contest, OURS, lambda: recorded)
    enter(contest, EAGER, lambda: eager)
    enter(contest, "SDPA without a record", lambda: alone)
    return contest


def _wait(device: str) -> None:
    """A GPU returns before it has finished."""
    if device != "cpu":
        torch.cuda.synchronize()
