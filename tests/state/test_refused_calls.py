"""Every public callable after malformed calls: what it was given, and what surrounds it, is as it was before."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.caches import Cache
from clearhead.errors import ClearheadError
from clearhead.masks import Mask
from tests.malformed import cases  # noqa: F401  (registers them)
from tests.malformed.calls import CASES, malformed
from tests.support.snapshots import snapshot, surroundings

_ATTEMPTS = 8


def _reached(function: Any, arguments: dict[str, Any]) -> list[Any]:
    """Modules, caches, masks and tensors that a call reads or belongs to."""
    closed = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    result = [function, getattr(function, "__self__", None), *closed, *arguments.values()]
    result += [item for one in result if isinstance(one, (list, tuple)) for item in one]
    return [item for item in result if isinstance(item, (nn.Module, Cache, Mask, Tensor))]


@pytest.mark.parametrize("name", CASES)
def test_a_refused_call_changes_nothing(name: str) -> None:
    """Arguments are replaced at random; those calls count that raise."""
    rng = random.Random(name)
    before_all = surroundings()
    for _ in range(_ATTEMPTS):
        attempt = malformed(rng, [name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reached = _reached(attempt.call.function, attempt.call.arguments)
            before = [snapshot(item) for item in reached]
            try:
                attempt.call.function(**attempt.call.arguments)
            except Exception:
                assert [snapshot(item) for item in reached] == before, attempt
        assert surroundings() == before_all, attempt


X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(2))


class Model(nn.Module):
    """Two modules of ours, each called once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (clearhead.MultiHeadAttention(12, 3) for _ in range(2))

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return self.two(self.one(x, mask=masks.causal()), mask=mask)


WRONG = masks.keep(torch.ones(3, 3))
Block = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]
BLOCKS: dict[str, Block] = {
    "record": lambda model: clearhead.record(model),
    "record, kept": lambda model: clearhead.record(model, keep="queries_keys"),
    "record of a head that is not there": lambda model: clearhead.record(model, heads=[5]),
    "record of other marks": lambda model: clearhead.record(model, query_mask=torch.ones(7, 7)),
    "intervene": lambda model: clearhead.intervene(model, {("one", 0): 0.0, ("two", 1): "mean"}),
    "intervene in a head that is not there": lambda model: clearhead.intervene(model, {("one", 7): 0.0}),
    "intervene with a patch that does not fit": lambda model: clearhead.intervene(model, {("two", 0): torch.ones(7)}),
    "use_kernel": lambda model: clearhead.use_kernel("reference"),
    "use_linear": lambda model: clearhead.use_linear("pytorch"),
    "monitor": lambda model: clearhead.monitor(model, 1, to=lambda step, values: None),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("outer", [None, "use_kernel", "record", "intervene", "monitor"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_in_which_a_call_is_refused(block: str, outer: str | None, training: bool) -> None:
    """Caught inside, or outside, the block; then the model gives what it gave, with nothing attached to it."""
    model = Model().train(training)
    expected, held, around = model(X), snapshot(model), surroundings()
    for caught_inside in (False, True):
        with contextlib.suppress(ClearheadError), contextlib.ExitStack() as stack:
            if outer is not None:
                stack.enter_context(BLOCKS[outer](model))
            stack.enter_context(BLOCKS[block](model))
            for mask in (WRONG, "not a mask"):
                with contextlib.suppress(ClearheadError) if caught_inside else contextlib.nullcontext():
                    model(X, mask)
            model(X)
        assert snapshot(model) == held
        assert surroundings() == around
        assert torch.equal(model(X), expected)


def test_a_record_counts_calls_after_a_refused_one_as_before() -> None:
    model = Model().eval()
    with clearhead.record(model, ("rows",)) as rec:
        model(X)
        with pytest.raises(ClearheadError):
            model(X, WRONG)
        model(X)
    # The first module had computed its call before the second refused its own.
    assert [len(rec[name]) for name in rec] == [3, 2]
    assert torch.equal(rec["one"][0].rows, rec["one"][2].rows)
    assert torch.equal(rec["two"][0].rows, rec["two"][1].rows)
