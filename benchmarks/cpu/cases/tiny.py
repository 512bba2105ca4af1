"""Calls so small that little but their overhead is timed: 2 × 5 × 16, four heads, on one thread and on two."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from benchmarks.command import Effort
from benchmarks.comparing import OURS, Contest, Result, TimedCase, enter
from benchmarks.cpu.module import twins
from benchmarks.peers.by_hand import ByHand
from benchmarks.peers.work import Outputs, Way

from .modules import DROP_IN, THEIRS, drop_in

__all__ = ["pairs_of", "tiny_cases"]

BATCH, LENGTH, SIZE, HEADS = 2, 5, 16, 4
ATTENTION = f"tiny attention, B={BATCH} L={LENGTH} D={SIZE // HEADS} H={HEADS}"
MODULES = f"tiny modules, B={BATCH} L={LENGTH} E={SIZE} H={HEADS}"
SDPA, BY_HAND = "F.scaled_dot_product_attention", "four Linear and SDPA"
SOFTCAP, SINKS = f"{OURS}, softcap", f"{OURS}, sinks"
#: What is compared with what, by the names of two ways.
PAIRS = (
    *((ours, theirs) for theirs in (SDPA, THEIRS) for ours in (OURS, DROP_IN)),
    (OURS, BY_HAND),
    *((changed, OURS) for changed in (SOFTCAP, SINKS)),
)


def tiny_cases(effort: Effort) -> Iterator[TimedCase]:
    contests: dict[tuple[str, str], tuple[Callable[[], Contest], bool]] = {
        (ATTENTION, "forward"): (_attention, False),
        (f"{ATTENTION}, options", "forward"): (partial(_options, False), False),
        (f"{ATTENTION}, options", "forward, inputs with gradients"): (partial(_options, True), True),
        (MODULES, "eval"): (partial(_modules, _forward), False),
        (MODULES, "eval, key_padding_mask"): (_padded, False),
        (MODULES, "eval, parameters with gradients"): (partial(_modules, _forward), True),
        (MODULES, "training step"): (partial(_modules, _training_step, train=True), True),
    }
    for (section, name), (prepare, with_gradients) in contests.items():
        for threads in (1, 2):
            within = partial(_within, threads, with_gradients)
            what = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
            yield TimedCase(section, what, prepare, repeats=effort.size(200, 1), within=within)


def pairs_of(result: Result) -> Iterator[tuple[str, str, float, float]]:
    """Every comparison of a line of this file: the names of two ways, and their figures."""
    if result.section.startswith((ATTENTION, MODULES)):
        for ours, theirs in PAIRS:
            if ours in result.figures and theirs in result.figures:
                yield ours, theirs, result.figures[ours], result.figures[theirs]


@contextmanager
def _within(threads: int, with_gradients: bool) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.set_grad_enabled(with_gradients):
            yield
    finally:
        torch.set_num_threads(before)


def _attention() -> Contest:
    query, key, value = _operands(False)
    contest = Contest()
    attend = clearhead.attention
    enter(contest, OURS, lambda: lambda: (attend(query, key, value),))
    for name, function in {
        SDPA: F.scaled_dot_product_attention,
        DROP_IN: clearhead.nn.functional.scaled_dot_product_attention,
    }.items():
        enter(contest, name, lambda function=function: lambda: (function(query, key, value),))
    return contest


def _options(requires_grad: bool) -> Contest:
    """What a soft-cap and sinks add to a call; they change its result, which is not compared."""
    query, key, value = _operands(requires_grad)
    attend, sinks = clearhead.attention, torch.zeros(HEADS)
    contest = Contest()
    enter(contest, OURS, lambda: lambda: (attend(query, key, value),))
    enter(contest, SOFTCAP, lambda: _silent(lambda: attend(query, key, value, softcap=30.0)))
    enter(contest, SINKS, lambda: _silent(lambda: attend(query, key, value, sinks=sinks)))
    return contest


def _silent(run: Callable[[], Tensor]) -> Way:
    """Timed, not compared."""

    def way() -> Outputs:
        run()
        return ()

    return way


def _modules(way: Callable[[Callable[[], Tensor]], Way], *, train: bool = False) -> Contest:
    ours, theirs, replacement, by_hand = _all_modules(train)
    x = torch.randn(BATCH, LENGTH, SIZE)
    contest = Contest()
    enter(contest, OURS, lambda: way(lambda: ours(x)))
    for name, module in ((THEIRS, theirs), (DROP_IN, replacement)):
        enter(contest, name, lambda module=module: way(lambda: module(x, x, x, need_weights=False)[0]))
    enter(contest, BY_HAND, lambda: way(lambda: by_hand(x)))
    return contest


def _padded() -> Contest:
    ours, theirs, replacement, _ = _all_modules(False)
    x = torch.randn(BATCH, LENGTH, SIZE)
    hidden = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    hidden[-1, 3:] = True
    mask = clearhead.masks.drop(keys=hidden)
    contest = Contest()
    enter(contest, OURS, lambda: lambda: (ours(x, mask=mask),))
    for name, module in ((THEIRS, theirs), (DROP_IN, replacement)):
        call = partial(module, x, x, x, key_padding_mask=hidden, need_weights=False)
        enter(contest, name, lambda call=call: lambda: call()[:1])
    return contest


def _operands(requires_grad: bool) -> list[Tensor]:
    shape = (BATCH, HEADS, LENGTH, SIZE // HEADS)
    return [torch.randn(shape, requires_grad=requires_grad) for _ in range(3)]


def _all_modules(train: bool) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
    """Clearhead's, PyTorch's, the drop-in and that written by hand, with the same weights."""
    torch.manual_seed(0)
    ours, theirs = twins(SIZE, HEADS)
    modules = ours, theirs, drop_in(theirs), ByHand(ours)
    for module in modules:
        module.train(train)
    return modules


def _forward(run: Callable[[], Tensor]) -> Way:
    return lambda: (run(),)


def _training_step(run: Callable[[], Tensor]) -> Way:
    """Forward, sum and backward; the gradients of the parameters add up."""

    def step() -> Outputs:
        output = run()
        output.sum().backward()
        return (output,)

    return step
