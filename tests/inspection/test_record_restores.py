"""`record` leaves nothing behind, whatever happens inside, and threads are independent."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead.errors import ShapeError

from .conftest import BATCH, HEADS, LENGTH, NAMES, WIDTH, Stack, hooks, nothing_left


@pytest.mark.parametrize("where", ["in the block", "in the model", "in a hook"])
def test_exceptions_pass_and_only_the_users_hooks_stay(where: str, model: Stack, x: Tensor) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    calls: list[str] = []
    handle = model.blocks[0].register_forward_hook(lambda *_: calls.append("after"))
    if where == "in a hook":
        model.blocks[1].register_forward_pre_hook(fail)
    if where == "in the model":
        model.blocks[1].attend.out_proj.forward = fail
    before, rec = hooks(model), clearhead.record(model)
    with contextlib.suppress(ZeroDivisionError), rec:
        model(x)
        fail()
    assert hooks(model) == before
    assert calls == ["after"]
    assert list(rec) == {"in the block": NAMES, "in the model": NAMES[:2], "in a hook": NAMES[:1]}[where]
    handle.remove()
    model.blocks[1]._forward_pre_hooks.clear()
    assert nothing_left(model)


def test_names_are_right_again_after_a_caught_exception(model: Stack, x: Tensor) -> None:
    with clearhead.record(model) as rec:
        with pytest.raises(ShapeError, match="features"):
            model(x[..., :5])
        model(x, attention_mask=torch.arange(LENGTH).expand(BATCH, LENGTH) < 3)
    assert list(rec) == NAMES
    assert rec[NAMES[0]].counted.sum() == 3 * BATCH, "it was a root call again"


class Theirs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = clearhead.split_heads(x, HEADS)
        return scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.parametrize("models", [lambda: (Stack(2), Theirs()), lambda: (Stack(2),) * 2], ids=["two", "one"])
def test_threads_record_independently(models: Any) -> None:
    """Both threads are inside their blocks while both models run."""
    models = models()
    together = threading.Barrier(2, timeout=60)
    records: dict[int, Any] = {}

    def work(number: int) -> None:
        x = torch.randn(number + 1, LENGTH, WIDTH)
        with clearhead.record(models[number]) as rec:
            together.wait()
            for model in {models[number], models[1 - number]}:  # the other thread's model is not in this record
                model(x)
            together.wait()
        records[number] = rec

    list(ThreadPoolExecutor(2).map(work, range(2)))
    for number, rec in records.items():
        assert list(rec) == ([""] if isinstance(models[number], Theirs) else NAMES[:2])
        assert [call.batch_size for calls in rec.values() for call in calls] == [number + 1] * len(rec)
    assert all(map(nothing_left, models))


def test_overlapping_threads_leave_the_compiler_on(model: Stack, x: Tensor) -> None:
    """The first thread to enter leaves first, and the second must not restore an older state."""
    entered, left, second = threading.Event(), threading.Event(), Stack(1)
    torch.compile(lambda y: y * 2, backend="eager")(x)  # loads the compiler

    def first() -> None:
        with clearhead.record(model):
            model(x)
            entered.wait(60)
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    with clearhead.record(second):
        second(x)
        entered.set()
        assert left.wait(60)
    thread.join(60)
    counter = CompileCounter()
    torch.compile(lambda y: y + 3, backend=counter)(x)
    assert counter.frame_count == 1


def test_records_nest(model: Stack, x: Tensor) -> None:
    with clearhead.record(model, ("entropy",)) as outer:
        with clearhead.record(model.blocks[1], ("received",)) as inner:
            model(x)
        model(x)
    assert list(inner) == ["attend"]
    assert [len(calls) for calls in outer.values()] == [2, 2, 2]


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_recomputation_is_not_a_second_call(use_reentrant: bool, x: Tensor) -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    model = Checkpointed()
    with clearhead.record(model, ("entropy",)) as rec:
        model(x.requires_grad_()).sum().backward()
    assert [len(calls) for calls in rec.values()] == [1, 1, 1]
    assert model.blocks[0].attend.q_proj.weight.grad is not None
