"""A process that ends, is killed or raises between two exchanges: the others raise an error that names the step."""

from __future__ import annotations

import atexit
import os
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel
from clearhead.errors import ClearheadError, DistributedError

from .building import attention, encoder, sequences
from .processes import line, processes

FORWARD = "tensor_parallel: forward: all-reduce of the output of module.out_proj: the exchange failed. Another process"


def _split(method: str, kv_heads: int = 4) -> Any:
    split: Any = tensor_parallel if method == "tensor" else partial(context_parallel, method=method)
    return split(attention(kv_heads), line())


def _interrupted(method: str, place: str, killed: bool) -> str:
    """The last process is killed, or raises; what each process says.

    Args:
        place: inside an attention that all agreed on, before its first exchange (``"projections"``) or after it
            (``"mask"``); or between two calls, or before a backward pass.
    """

    def interrupt() -> None:
        if dist.get_rank() == 1:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("of the user's")

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        interrupt()
        return q >= k

    module = _split(method, 1 if place == "backward of shared heads" else 4)
    x = torch.randn(2, 8, 32, dtype=torch.float64, requires_grad=place == "backward")
    learnt = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    module(x)  # the processes are connected
    if place == "projections":
        module.v_proj.register_forward_hook(lambda *_: interrupt())
    given = {"mask": masks.mask_mod(rule), "backward of a bias": masks.bias(learnt)}.get(place)

    def calls() -> None:
        output = module(x, mask=given)
        interrupt()
        (output.sum().backward if "backward" in place else partial(module, x))()

    with pytest.raises((DistributedError, ValueError)) as caught:
        calls()
    return str(caught.value)


INTERRUPTED = {
    ("gather", "next call"): "could not agree on the call, because one of them has ended",
    ("gather", "projections"): "context_parallel: forward: all-gather: the exchange failed",
    ("gather", "backward"): "context_parallel: backward: reduce-scatter: the exchange failed",
    ("heads", "mask"): "context_parallel: forward: all-to-all: the exchange failed",
    ("heads", "backward"): "context_parallel: backward: all-to-all: the exchange failed",
    ("ring", "projections"): "context_parallel: forward: ring: the exchange failed",
    ("ring", "backward"): "context_parallel: backward: ring: the exchange failed",
    ("tensor", "mask"): FORWARD,
    ("tensor", "backward"): "tensor_parallel: backward: all-reduce of the gradient of the input of module: the exch",
    ("tensor", "backward of shared heads"): "tensor_parallel: backward: all-reduce of the gradient of module.",
    (
        "tensor",
        "backward of a bias",
    ): "tensor_parallel: backward: all-reduce of the gradient of a bias of module:",
}


@pytest.mark.parametrize(("method", "place"), INTERRUPTED)
def test_a_process_that_is_killed_ends_the_others(method: str, place: str) -> None:
    with processes(2, seconds=10) as two:
        (said,) = two.run(_interrupted, method, place, True, seconds=40, first=True)
        assert INTERRUPTED[method, place] in said
        two.started[1].join(5)
        assert two.started[1].exitcode == -signal.SIGKILL


@pytest.mark.parametrize("method", ["heads", "tensor"])
def test_a_process_that_raises_in_an_attention_ends_the_others(method: str) -> None:
    with processes(2, seconds=3) as two:
        first, second = two.run(_interrupted, method, "mask", False, seconds=20)
    assert INTERRUPTED[method, "mask"] in first
    assert "of the user's" in second


def _differs(what: str) -> str:
    """The last process records, wants weights or has another length, and compares that; what each process says."""
    module, (x,), last = _split("tensor"), sequences(9), dist.get_rank() == 1
    if what == "length":
        module(x)
    x = x[:, :7] if what == "length" and last else x
    recording = clearhead.record(module) if what == "record" and last else nullcontext()
    with pytest.raises(DistributedError) as caught, recording:
        module(x, need_weights=what == "weights" and last)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"), [("record", " recorders of module:"), ("weights", " weights of module:"), ("length", "")]
)
def test_a_process_that_compares_alone_ends_with_the_name_of_the_step(what: str, said: str) -> None:
    """Both raise when the time-out ends."""
    with processes(2, seconds=3) as two:
        first, second = two.run(_differs, what, seconds=40)
    assert FORWARD in first
    assert second.startswith(f"tensor_parallel:{said} the processes could not agree on the call, because one of them")


def _refuses_and_ends(folder: Path, in_stack: bool) -> None:
    """The first process refuses a call, and ends at once."""
    split: Any = context_parallel(encoder(1) if in_stack else attention(4), line())
    x = shard_sequence(*sequences(9), line())
    try:
        split(x[..., :5] if dist.get_rank() == 0 else x)
    except ClearheadError as error:
        (folder / str(dist.get_rank())).write_text(str(error), encoding="utf-8")
    atexit._run_exitfuncs()  # a process of multiprocessing leaves them out
    os._exit(0)


@pytest.mark.parametrize("in_stack", [False, True])
def test_a_process_that_refuses_and_ends_is_understood(in_stack: bool, tmp_path: Path) -> None:
    for _ in range(3):
        with processes(3) as three, pytest.raises(AssertionError, match="process 2: it has ended"):
            three.run(_refuses_and_ends, tmp_path, in_stack)
        said = [(tmp_path / str(rank)).read_text(encoding="utf-8") for rank in range(3)]
        assert all("got (2, 3, 5)" in text for text in said)
        assert all("process 0 of the group refused the call" in text for text in said[1:])
        for rank in range(3):
            (tmp_path / str(rank)).unlink()
