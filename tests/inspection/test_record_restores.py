"""`record` leaves nothing behind, whatever happens inside, and threads do not see each other."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead._environment import state
from clearhead.errors import ArgumentError, ShapeError
from tests.support.threads import in_threads

from .stacks import BATCH, HEADS, LENGTH, NAMES, WIDTH, Stack, hooks


def test_no_hooks_are_left(model: Stack, x: Tensor) -> None:
    with clearhead.record(model):
        assert hooks(model)
        assert state.observers
        model(x)
    assert not hooks(model)
    assert not state.observers


def test_the_users_own_hooks_stay(model: Stack, x: Tensor) -> None:
    seen: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("after"))
    before = hooks(model)
    with clearhead.record(model):
        model(x)
    assert hooks(model) == before
    assert seen == ["after"]


@pytest.mark.parametrize("where", ["in the block", "in the model", "in a hook"])
def test_exceptions_pass_and_restore_everything(where: str, model: Stack, x: Tensor) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    if where == "in a hook":
        model.blocks[1].register_forward_pre_hook(fail)
    if where == "in the model":
        model.blocks[1].attend.out_proj.forward = fail
    before, rec = hooks(model), clearhead.record(model)
    with contextlib.suppress(ZeroDivisionError), rec:
        model(x)
        fail()
    assert hooks(model) == before
    assert not state.observers
    assert not torch.overrides._get_current_function_mode_stack()
    assert list(rec) == {"in the block": NAMES, "in the model": NAMES[:2], "in a hook": NAMES[:1]}[where]


def test_names_are_right_again_after_a_caught_exception(model: Stack, x: Tensor) -> None:
    with clearhead.record(model) as rec:
        with pytest.raises(ShapeError, match="features"):
            model(x[..., :5])
        model(x, attention_mask=torch.arange(LENGTH).expand(BATCH, LENGTH) < 3)
    assert list(rec) == NAMES
    assert rec[NAMES[0]].counted.sum() == 3 * BATCH, "it was a root call again"


def test_an_error_while_recording_is_the_blocks_error_and_restores_everything(model: Stack, x: Tensor) -> None:
    with pytest.raises(ArgumentError, match="heads"), clearhead.record(model, heads=[7]):
        model(x)
    assert not hooks(model)
    assert not state.observers


def test_two_threads_do_not_see_each_other() -> None:
    """Both are inside their blocks when both models run, one through PyTorch's function and one through Clearhead's."""

    class Theirs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = clearhead.split_heads(x, HEADS)
            return scaled_dot_product_attention(heads, heads, heads)

    models = (Stack(2), Theirs())
    together = threading.Barrier(2, timeout=60)
    records: dict[int, Any] = {}

    def work(number: int) -> None:
        x = torch.randn(number + 1, LENGTH, WIDTH)
        with clearhead.record(models[number]) as rec:
            together.wait()
            for _ in range(5):
                models[number](x)
                models[1 - number](x)  # another thread's model, in this thread: not in this record
            together.wait()
        records[number] = rec

    in_threads(work, 2)
    assert list(records[0]) == NAMES[:2]
    assert list(records[1]) == [""]
    for number, rec in records.items():
        assert all(len(calls) == 5 for calls in rec.values())
        assert all(found.batch_size == number + 1 for calls in rec.values() for found in calls)


def test_one_model_in_two_threads(model: Stack) -> None:
    together = threading.Barrier(2, timeout=60)
    records: dict[int, Any] = {}

    def work(number: int) -> None:
        with clearhead.record(model) as rec:
            together.wait()
            model(torch.randn(number + 1, LENGTH, WIDTH))
            together.wait()
        records[number] = rec

    in_threads(work, 2)
    assert [rec[NAMES[0]].batch_size for _, rec in sorted(records.items())] == [1, 2]
    assert not hooks(model)


def test_overlapping_threads_leave_the_compiler_on(model: Stack, x: Tensor) -> None:
    """The first to enter leaves first: what it restores must not be restored over by the second."""
    entered, left, second = threading.Event(), threading.Event(), Stack(1)
    torch.compile(lambda y: y * 2, backend="eager")(x)  # the compiler is loaded

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
def test_recomputation_is_not_a_second_call(use_reentrant: bool, model: Stack, x: Tensor) -> None:
    """Activation checkpointing runs modules again while gradients are computed."""

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
