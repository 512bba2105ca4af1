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

import clearhead
from clearhead import masks
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel
from clearhead.errors import ClearheadError, DistributedError, RecordError

from .building import HEADS, METHODS, attention, collectives, encoder, full, refuses, require_close, sequences
from .comparing import halve_heads, sequence_mesh
from .processes import Groups, in_processes, line, square

SCALARS = ("entropy", "max_logit", "raw_max_logit", "sink", "confidence")


def _watched(model: nn.Module, x: Tensor) -> dict[int, dict[str, float]]:
    """The scalars of two steps."""
    seen: dict[int, dict[str, float]] = {}
    with clearhead.monitor(model, every=2, statistics=SCALARS, to=seen.__setitem__, logit_threshold=1e9):
        for _ in range(3):
            model(x, mask=masks.causal()).square().mean().backward()
    return seen


def _same_scalars(method: Any) -> dict[int, dict[str, float]]:
    """Means of layers and their worst heads, in every process."""
    (x,), mesh = sequences(13), sequence_mesh()
    expected = _watched(encoder(), x)
    if method == "heads of processes":
        split = tensor_parallel(encoder(), mesh)
    else:
        split = context_parallel(halve_heads(encoder()), mesh, method=method, layout="zigzag")
        x = shard_sequence(x, mesh, layout="zigzag")
    found = _watched(split, x)
    assert [*found] == [*expected] == [0, 2]
    for step in found:
        assert found[step].keys() == expected[step].keys()  # and so the worst heads
        assert len(found[step]) == 2 * 2 * len(SCALARS)
        for name, value in expected[step].items():
            assert abs(found[step][name] - value) <= 1e-12 * max(1.0, abs(value)), name
    return found


@pytest.mark.parametrize(
    ("count", "method"), [*((2, method) for method in (*METHODS, "heads of processes")), (4, "auto")]
)
def test_a_monitor_gives_every_process_the_same(groups: Groups, count: int, method: str) -> None:
    first, *others = groups(count).run(_same_scalars, method)
    assert all(found == first for found in others)


@in_processes(4)
@pytest.mark.parametrize("kind", ["tensor", "context", "tensor context", "tensor context fully"])
def test_clipping(kind: str) -> None:
    """Query projections of every process, scaled by the logits of all queries."""
    (x,), whole, module = sequences(13), attention(2), attention(2)
    split: Any = module
    x = part = 9 * x
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


@in_processes(2)
@torch.no_grad()
def test_exchanges() -> None:
    """What a recorded call exchanges besides."""
    for method, names, more in (
        ("gather", ("received",), {"reduce_scatter": 1}),
        ("gather", ("top_k", "rows", "head_average"), {}),
        ("gather", ("max_logit",), {"allreduce": 1}),
        ("gather", ("entropy", "sink", "distance"), {"allreduce": 1}),
        ("heads", ("received",), {"alltoall_base": 1}),
        ("ring", ("received",), {"reduce_scatter": 1, "send": 1, "recv": 1}),
    ):
        module = context_parallel(attention(2), line(), method=method)  # type: ignore[arg-type]
        call = partial(module, *sequences(5), mask=masks.causal())
        without = collectives(call)
        with clearhead.record(module, names):
            found = collectives(call)
        besides = {kind: count - without.get(kind, 0) for kind, count in found.items()}
        assert {kind: count for kind, count in besides.items() if count} == more, (method, names)


X: dict[str, Any] = {"statistics": ("entropy",)}
SAME, KEEP = "recorders: expected the same in every process", "keep: expected 'statistics' of a module that is split"
MARKS = X | {"query_mask": torch.ones(2, 5, dtype=torch.bool)}
ROWS: dict[str, Any] = {"statistics": ("rows",), "queries": [9]}
#: How the first process records, how the other does (``None``: not at all), and what both are told.
DIFFERENT: list[tuple[dict[str, Any] | None, dict[str, Any] | None, str]] = [
    (X, None, SAME),
    (None, X, SAME),
    (X, {"statistics": ("received",)}, SAME),
    (X, X | {"top_k": 3}, SAME),
    (X | {"heads": [0]}, X | {"heads": [1]}, SAME),
    (X, MARKS, SAME),
    (MARKS, MARKS, "query_mask: expected (B, L) = (2, 9), got (2, 5)"),
    (ROWS, ROWS, "queries: expected row numbers below L = 9, got [9]"),
    (X, X | {"keep": "queries_keys"}, KEEP),
    (X | {"keep": "queries_keys"}, X | {"keep": "queries_keys"}, KEEP),
]


@in_processes(2)
def test_processes_that_record_otherwise_are_refused() -> None:
    module: Any = context_parallel(attention(4), line(), method="heads")
    x = shard_sequence(torch.zeros(2, 9, 32, dtype=torch.float64), line())
    for *options, said in DIFFERENT:
        given = options[dist.get_rank()]
        with refuses(said), nullcontext() if given is None else clearhead.record(module, **given):  # type: ignore[arg-type]
            module(x)
        with clearhead.record(module, **X) as rec:  # and goes on
            module(x)
        assert rec[""].entropy.shape == (2, HEADS, x.shape[1])


@in_processes(2)
def test_what_processes_that_share_heads_refuse() -> None:
    """Processes that share heads agree when they record, and on weights."""
    module: Any = tensor_parallel(attention(4), line())
    x, rank = torch.zeros(2, 9, 32, dtype=torch.float64), dist.get_rank()
    marks = torch.ones(2, 9 - rank, dtype=torch.bool)
    for given, kind, said in (
        ({"statistics": (("entropy",), ("received",))[rank]}, DistributedError, "recorders: expected the same"),
        (X | {"keep": "queries_keys"}, RecordError, "keep: expected 'statistics'"),
        (X | {"query_mask": marks}, ClearheadError, "expected (B, L) = (2, 9)"),
    ):
        with refuses(said, kind), clearhead.record(module, **given):  # type: ignore[arg-type]
            module(x)
    said = "interventions: expected attention that one process computes"
    with refuses(said, RecordError), clearhead.intervene(module, {("", 0): 0.0}):
        pass
    with refuses("tensor_parallel: weights: expected the same in every process", DistributedError):
        module(x, need_weights=True, average_attn_weights=rank == 0)
    with clearhead.record(module, ("max_logit",), heads=[7]) as rec:
        module(x)
    assert rec[""].heads == (7,)


@in_processes(2)
def test_what_else_is_refused() -> None:
    """Interventions, decoding and pictures of parts; a monitor in one process alone."""
    module: Any = context_parallel(attention(4), line())
    x = shard_sequence(torch.zeros(2, 9, 32, dtype=torch.float64), line())
    alone = dist.get_rank() == 0
    for watching, said in (
        (lambda: clearhead.intervene(module, {("", 0): 0.0}), "interventions: expected attention that one process"),
        (lambda: clearhead.monitor(module, to=print), "recorders: expected the same in every process"),
    ):
        with refuses(said), watching() if alone else nullcontext():
            module(x)
    cache = module.eval().make_cache(2, 9)
    with torch.no_grad(), refuses("decoding with keys that are split", RecordError), clearhead.record(module):
        module(x[:, :1], cache=cache)
    with torch.no_grad(), clearhead.record(module, ("entropy", "received", "top_k", "map")) as rec:
        module(x)
    with refuses("expected whole sequences", RecordError):
        rec.page()
    assert rec.plot_heads() is not None
