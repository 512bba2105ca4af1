"""Records of modules that are split over processes: other calls than those of test_every_case.py, and weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel

from .building import EMBED, attention, full, mask, require_close
from .comparing import EVERY_STATISTIC, TOLERANCES, compare_records, compare_statistics
from .meshes import line, square
from .processes import Processes

METHODS = ("heads", "gather", "ring")


def _together(way: str) -> None:
    """Every statistic of one call, which leaves its output as it is."""
    whole, x = attention(4, sinks=True, mask="alibi").eval(), torch.randn(2, 13, EMBED, dtype=torch.float64)
    if way == "tensor":
        mesh, split, part = None, tensor_parallel(copy.deepcopy(whole), line()), x
    else:
        mesh, part = line(), shard_sequence(x, line(), layout="zigzag")
        split = context_parallel(copy.deepcopy(whole), mesh, method=way, layout="zigzag")  # type: ignore[arg-type]
    compare_records(whole, split, x, mesh, EVERY_STATISTIC, layout="zigzag", what=way, mask=masks.causal())
    with torch.no_grad():
        output = split(part, mask=masks.causal())
        with clearhead.record(split, **EVERY_STATISTIC):
            assert torch.equal(split(part, mask=masks.causal()), output)


@pytest.mark.parametrize("way", ["tensor", *METHODS])
def test_every_statistic_of_one_call(two: Processes, way: str) -> None:
    two.run(_together, way)


def _otherwise(method: str, dtype: torch.dtype) -> None:
    """Positions, cross-attention, no keys, several recorders and steps, training with dropout."""
    mesh, whole = line(), attention(4, dtype=dtype, dropout=0.3)
    split = context_parallel(copy.deepcopy(whole), mesh, method=method)  # type: ignore[arg-type]
    judge = copy.deepcopy(whole).double()
    x, memory = torch.randn(2, 11, EMBED, dtype=dtype), torch.randn(2, 7, EMBED, dtype=dtype)
    places = torch.arange(11).expand(2, 11).clone() * 2
    places[1, 9:] = -1
    calls: list[tuple[Tensor, dict[str, Any]]] = [
        (x, {"positions": 5}),
        (x, {"positions": places, "mask": masks.causal()}),
        (x, {"key": memory, "mask": mask("lengths", 2, 11, 7)}),
        (x, {"key": memory[:, :0]}),
    ]
    names = ("entropy", "received", "top_k", "rows", "distance", "output_norm", "offset")
    for number, (query, options) in enumerate(calls):
        doubled = {name: x.double() if name == "key" else x for name, x in options.items()}
        parts = {name: shard_sequence(x, mesh) if name == "key" else x for name, x in options.items()}
        with clearhead.record(whole, names) as expected:
            whole(query, **options)
        with clearhead.record(judge, names) as exact:
            judge(query.double(), **doubled)
        with clearhead.record(split, names) as found, clearhead.record(split, ("max_logit",)) as second:
            split(shard_sequence(query, mesh), **parts)
        (own,), (one,), (right,) = (each[""] for each in (found, expected, exact))
        compare_statistics(dtype, own, one, right, mesh, "contiguous", f"{method} {number}", weights=right.rows)
        if dtype in TOLERANCES:
            compare_summaries(found, expected, TOLERANCES[dtype], f"{method} {number}")
        assert second[""].max_logit.shape == (2, 8)
    one = shard_sequence(x[:, :1], mesh)  # nothing at all in one of the processes
    with clearhead.record(split, ("entropy",)) as rec:
        split(one)
    assert rec[""].entropy.shape == (2, 8, one.shape[1])


def compare_summaries(found: Any, expected: Any, tolerance: float, what: str) -> None:
    for statistic, layers in expected.summary().values.items():
        for name, heads in layers.items():
            require_close(found.summary()[statistic][name].double(), heads.double(), tolerance, f"{what} {statistic}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_other_calls(two: Processes, method: str, dtype: torch.dtype) -> None:
    two.run(_otherwise, method, dtype)


def _weights() -> None:
    """Of all heads, with gradients, where heads are split; of this process's queries, where the sequence is too."""
    whole, mesh, x = attention(2, sinks=True), square(), torch.randn(2, 13, EMBED, dtype=torch.float64)
    split: Any = tensor_parallel(copy.deepcopy(whole), mesh["tp"])
    for average in (True, False):
        options: Any = {"mask": mask("heads", 2, 13), "need_weights": True, "average_attn_weights": average}
        found = [module(x, **options)[1] for module in (whole, split)]
        require_close(found[1], found[0], 1e-12, "weights")
        own = [module(x[0], **(options | {"mask": None}))[1] for module in (whole, split)]
        require_close(own[1], own[0], 1e-12, "weights without a batch")
        for weights in found:
            weights.square().sum().backward()
        for name in ("q_proj.weight", "k_proj.bias", "sinks"):
            one, other = (full(module.get_parameter(name).grad) for module in (whole, split))
            require_close(other, one, 1e-12, name)
        whole.zero_grad()
        split.zero_grad()
    both = context_parallel(split, mesh["cp"])
    weights = both(shard_sequence(x, mesh["cp"]), **options)[1]
    require_close(weights, shard_sequence(found[0], mesh["cp"], dim=2), 1e-12, "weights of parts")


def test_weights_of_all_heads(four: Processes) -> None:
    four.run(_weights)
