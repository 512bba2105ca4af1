"""`monitor` and `qk_clip_` of modules that are split over processes, what is exchanged, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import masks
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel
from clearhead.errors import ClearheadError, DistributedError, RecordError

from .building import EMBED, HEADS, attention, collectives, encoder, full, require_close
from .meshes import line, square
from .processes import Processes, processes

METHODS = ("heads", "gather", "ring")
SCALARS = ("entropy", "max_logit", "raw_max_logit", "sink", "confidence")


def _watched(model: nn.Module, x: Tensor) -> dict[int, dict[str, float]]:
    """The scalars of two steps."""
    seen: dict[int, dict[str, float]] = {}
    with clearhead.monitor(model, every=2, statistics=SCALARS, to=seen.__setitem__, logit_threshold=1e9):
        for _ in range(3):
            model(x, mask=masks.causal()).square().mean().backward()
    return seen


def _same_scalars(method: str) -> dict[int, dict[str, float]]:
    """Means of layers and their worst heads, in every process."""
    x = torch.randn(2, 13, EMBED, dtype=torch.float64)
    whole, split = encoder(), encoder()
    part = x
    mesh = line()
    if method == "both":
        mesh, split = square()["cp"], tensor_parallel(split, square()["tp"])
    if method == "heads of processes":
        split = tensor_parallel(split, mesh)
    else:
        own = "auto" if method == "both" else method
        split = context_parallel(split, mesh, method=own, layout="zigzag")  # type: ignore[arg-type]
        part = shard_sequence(x, mesh, layout="zigzag")
    expected, found = _watched(whole, x), _watched(split, part)
    assert [*found] == [*expected] == [0, 2]
    for step in found:
        assert found[step].keys() == expected[step].keys()  # and so the worst heads
        assert len(found[step]) == 2 * 2 * len(SCALARS)
        for name, value in expected[step].items():
            assert abs(found[step][name] - value) <= 1e-12 * max(1.0, abs(value)), name
    return found


@pytest.mark.parametrize("method", [*METHODS, "heads of processes"])
def test_a_monitor_gives_every_process_the_same(two: Processes, method: str) -> None:
    first, second = two.run(_same_scalars, method)
    assert first == second


def test_a_monitor_gives_the_same_where_heads_and_sequence_are_split(four: Processes) -> None:
    first, *others = four.run(_same_scalars, "both")
    assert all(found == first for found in others)


def _recomputed(method: str) -> None:
    """What activation checkpointing computes again is not recorded, in any process."""
    module = context_parallel(attention(2), line(), method=method)  # type: ignore[arg-type]
    x = shard_sequence(torch.randn(2, 13, EMBED, dtype=torch.float64), line()).requires_grad_()
    with clearhead.record(module, ("entropy", "received")) as rec:
        checkpoint(module, x, use_reentrant=False).sum().backward()
    assert len(rec[""]) == 1
    assert x.grad is not None


@pytest.mark.parametrize("method", METHODS)
def test_activation_checkpointing(two: Processes, method: str) -> None:
    two.run(_recomputed, method)


def _clipped(kind: str) -> None:
    """Query projections of every process, scaled by the logits of all queries."""
    x = torch.randn(2, 13, EMBED, dtype=torch.float64) * 9
    whole, module = attention(2), attention(2)
    split: Any = module
    part = x
    if "tensor" in kind:
        split = tensor_parallel(split, square()["tp"])
    if "context" in kind:
        split, part = context_parallel(split, square()["cp"]), shard_sequence(x, square()["cp"])
    if "fully" in kind:
        split = fully_shard(nn.Sequential(split), mesh=square()["cp"])
    options = {} if "fully" in kind else {"mask": masks.causal()}
    with clearhead.record(whole, ("raw_max_logit",)) as rec:
        whole(x, **options)
    largest = rec[""].raw_max_logit
    with clearhead.record(split, ("raw_max_logit",)) as rec:
        split(part, **options).sum().backward()
    (calls,) = rec.values()
    require_close(calls.raw_max_logit, largest, 1e-12)
    threshold = float(largest.amax(0).median())
    factors = [clearhead.qk_clip_(*each, threshold) for each in ((whole, largest), (module, calls.raw_max_logit))]
    assert 0 < int((factors[0] < 1).sum()) < HEADS
    require_close(factors[1], factors[0], 1e-12)
    for (name, one), other in zip(whole.named_parameters(), module.parameters(), strict=True):
        require_close(full(other.detach()), one.detach(), 1e-12, name)


@pytest.mark.parametrize("kind", ["tensor", "context", "tensor context", "tensor context fully"])
def test_clipping(four: Processes, kind: str) -> None:
    four.run(_clipped, kind)


def _exchanges(method: str, names: tuple[str, ...]) -> dict[str, int]:
    """What a recorded call exchanges besides."""
    module = context_parallel(attention(2), line(), method=method)  # type: ignore[arg-type]
    x = torch.randn(2, 5, EMBED, dtype=torch.float64)

    def counted(recorded: bool) -> dict[str, int]:
        with torch.no_grad():
            if not recorded:
                return collectives(lambda: module(x, mask=masks.causal()))
            with clearhead.record(module, names):
                return collectives(lambda: module(x, mask=masks.causal()))

    without, found = counted(False), counted(True)
    return {kind: count - without.get(kind, 0) for kind, count in found.items() if count != without.get(kind, 0)}


@pytest.mark.parametrize(
    ("method", "names", "more"),
    [
        ("gather", ("received",), {"reduce_scatter": 1}),
        ("gather", ("top_k", "rows", "head_average"), {}),
        ("gather", ("max_logit",), {"allreduce": 1}),
        ("gather", ("entropy", "sink", "distance"), {"allreduce": 1}),
        ("heads", ("received",), {"alltoall_base": 1}),
        ("ring", ("received",), {"reduce_scatter": 1, "send": 1, "recv": 1}),
    ],
)
def test_exchanges(two: Processes, method: str, names: tuple[str, ...], more: dict[str, int]) -> None:
    for counts in two.run(_exchanges, method, names):
        assert counts == more


X: dict[str, Any] = {"statistics": ("entropy",)}
#: How the first process records, how the other does (``None``: not at all), and what both are told.
Different = tuple[dict[str, Any] | None, dict[str, Any] | None, str]
DIFFERENT: dict[str, Different] = {
    "one alone": (X, None, "recorders: expected the same in every process"),
    "the other alone": (None, X, "recorders: expected the same in every process"),
    "another statistic": (X, {"statistics": ("received",)}, "recorders: expected the same in every process"),
    "another option": (X, X | {"top_k": 3}, "recorders: expected the same in every process"),
    "other heads": (X | {"heads": [0]}, X | {"heads": [1]}, "recorders: expected the same in every process"),
    "another query mask": (
        X,
        X | {"query_mask": torch.ones(2, 5, dtype=torch.bool)},
        "recorders: expected the same in every process",
    ),
    "a query mask of parts": (
        X | {"query_mask": torch.ones(2, 5, dtype=torch.bool)},
        X | {"query_mask": torch.ones(2, 5, dtype=torch.bool)},
        "query_mask: expected (B, L) = (2, 9), got (2, 5)",
    ),
    "queries": (
        {"statistics": ("rows",), "queries": [9]},
        {"statistics": ("rows",), "queries": [9]},
        "queries: expected row numbers below L = 9, got [9]",
    ),
    "queries and keys": (X, X | {"keep": "queries_keys"}, "keep: expected 'statistics' of a module that is split"),
    "both keep": (
        X | {"keep": "queries_keys"},
        X | {"keep": "queries_keys"},
        "keep: expected 'statistics' of a module that is split",
    ),
}


def _refused(name: str, method: str) -> str:
    *each, _ = DIFFERENT[name]
    module = context_parallel(attention(4), line(), method=method)  # type: ignore[arg-type]
    x = shard_sequence(torch.zeros(2, 9, EMBED, dtype=torch.float64), line())
    given = each[dist.get_rank()]
    recording = nullcontext() if given is None else clearhead.record(module, **given)
    with pytest.raises(ClearheadError) as caught, recording:
        module(x)
    with clearhead.record(module, **X) as rec:  # and goes on
        module(x)
    assert rec[""].entropy.shape == (2, HEADS, x.shape[1])
    return str(caught.value)


@pytest.mark.parametrize("name", DIFFERENT)
def test_processes_that_record_otherwise_are_refused(two: Processes, name: str) -> None:
    for message in two.run(_refused, name, "heads"):
        assert DIFFERENT[name][2] in message


def _refused_of_heads() -> None:
    """Processes that share heads agree when they record."""
    module, x = tensor_parallel(attention(4), line()), torch.zeros(2, 9, EMBED, dtype=torch.float64)
    rank = dist.get_rank()
    for given, error, said in (
        ({"statistics": (("entropy",), ("received",))[rank]}, DistributedError, "recorders: expected the same"),
        (X | {"keep": "queries_keys"}, RecordError, "keep: expected 'statistics'"),
        (
            X | {"query_mask": torch.ones(2, 9 - rank, dtype=torch.bool)},
            ClearheadError,
            r"expected \(B, L\) = \(2, 9\)",
        ),
    ):
        with pytest.raises(error, match=said), clearhead.record(module, **given):  # type: ignore[arg-type]
            module(x)
    said = "interventions: expected attention that one process computes"
    with pytest.raises(RecordError, match=said), clearhead.intervene(module, {("", 0): 0.0}):
        pass
    with clearhead.record(module, ("max_logit",), heads=[7]) as rec:
        module(x)
    assert rec[""].heads == (7,)


def test_what_processes_that_share_heads_refuse(two: Processes) -> None:
    two.run(_refused_of_heads)


def _other_weights() -> str:
    module, x = tensor_parallel(attention(4), line()), torch.zeros(2, 9, EMBED, dtype=torch.float64)
    with pytest.raises(DistributedError) as caught:
        module(x, need_weights=True, average_attn_weights=dist.get_rank() == 0)
    return str(caught.value)


def test_weights_of_every_head_beside_their_average_are_refused(two: Processes) -> None:
    for message in two.run(_other_weights):
        assert "tensor_parallel: weights: expected the same in every process" in message


def _alone(what: str) -> str:
    """The first process records, or wants weights; what each of them says."""
    module: Any = tensor_parallel(attention(4), line())
    x = torch.zeros(2, 9, EMBED, dtype=torch.float64)
    alone = dist.get_rank() == 0
    watching: Any = {"record": clearhead.record, "monitor": partial(clearhead.monitor, to=print)}.get(what)
    with pytest.raises(DistributedError) as caught, watching(module) if watching and alone else nullcontext():
        module(x, need_weights=watching is None and alone)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("record", "tensor_parallel: recorders of module: the processes could not agree"),
        ("monitor", "tensor_parallel: recorders of module: the processes could not agree"),
        ("weights", "tensor_parallel: weights of module: the processes could not agree"),
    ],
)
def test_one_process_that_watches_heads_alone_ends_with_the_name_of_the_step(what: str, said: str) -> None:
    with processes(2, seconds=5) as two:
        first, second = two.run(_alone, what, seconds=40)
    assert said in first
    assert "tensor_parallel: forward: all-reduce of the output of module.out_proj: the exchange failed" in second


def _others() -> None:
    """Interventions, decoding and pictures of parts; a monitor in one process alone."""
    module = context_parallel(attention(4), line())
    x = shard_sequence(torch.zeros(2, 9, EMBED, dtype=torch.float64), line())
    alone = dist.get_rank() == 0
    for watching, said in (
        (lambda: clearhead.intervene(module, {("", 0): 0.0}), "interventions: expected attention that one process"),
        (lambda: clearhead.monitor(module, to=print), "recorders: expected the same in every process"),
    ):
        with pytest.raises(ClearheadError, match=said), watching() if alone else nullcontext():
            module(x)
    cache = module.eval().make_cache(2, 9)
    said = "decoding with keys that are split"
    with torch.no_grad(), pytest.raises(RecordError, match=said), clearhead.record(module):
        module(x[:, :1], cache=cache)
    with torch.no_grad(), clearhead.record(module, ("entropy", "received", "top_k", "map")) as rec:
        module(x)
    with pytest.raises(RecordError, match="expected whole sequences"):
        rec.page()
    assert rec.plot_heads() is not None


def test_what_else_is_refused(two: Processes) -> None:
    two.run(_others)
