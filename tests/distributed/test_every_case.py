"""Outputs, every gradient and statistics as on one process: ways to split, masks, parts and lengths, pair by pair."""

from __future__ import annotations

import functools
import time
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from clearhead import masks
from clearhead.distributed import tensor_parallel
from tests.support.budgets import slow
from tests.support.covering import Case, covering, pairs

from .building import EMBED, HEADS, MASKS, attention, mask, sequences
from .comparing import EVERY_STATISTIC, compare_in_parts, compare_records
from .processes import Groups, grid, in_processes, line, processes, square

WORLDS = (1, 2, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
#: What is done over the first dimension of the mesh, and whether heads of the module are split over the second.
WAYS = {
    "tensor": (None, True),
    "heads": ("heads", False),
    "gather": ("gather", False),
    "ring": ("ring", False),
    "tensor and sequence": ("auto", True),
    "tensor and fully_shard": ("fully_shard", True),
}
PARTS: dict[str, dict[str, Any]] = {
    "none": {},
    "sinks": {"position": "rotary", "sinks": True},
    "gate": {"position": "temperature", "gate": "elementwise"},
    "gate of heads": {"gate": "head"},
    "norms": {"q_norm": "layer norm", "k_norm": "norm", "mask": "alibi"},
    "relative": {"mask": "relative", "softcap": 5.0},
    "window": {"mask": "relative window", "bias": False, "scale": 0.3, "position": "axes"},
}
LENGTHS = ("64", "67", "less than W")
#: What is recorded.
RECORDS: dict[str, dict[str, Any]] = {
    "entropy": {"statistics": ("entropy", "received")},
    "largest": {"statistics": ("max_logit", "raw_max_logit", "confidence")},
    "keys": {"statistics": ("top_k", "extremes", "rows", "sink"), "top_k": 5, "sink_keys": 2},
    "positions": {"statistics": ("distance", "offset", "map"), "offsets": (-1, 2, 0), "map_size": 7},
    "outputs": {"statistics": ("head_average", "output", "output_norm")},
    "some heads": {"statistics": ("received", "top_k", "map"), "heads": (5, 2), "map_pooling": "max"},
    "key/value heads": {"statistics": ("entropy", "max_logit", "sink", "output_norm"), "per": "kv_head"},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "world": WORLDS,
    "way": tuple(WAYS),
    "kv_heads": (8, 2, 1),
    "name": tuple(MASKS),
    "parts": tuple(PARTS),
    "length": LENGTHS,
    "rows_without_key": (False, True),
    "dtype": DTYPES,
    "layout": ("contiguous", "zigzag"),
    "record": tuple(RECORDS),
    "every_query_counts": (False, True),
}
_WITH_WORLD = [("world", name) for name in FACTORS if name != "world"]


@functools.cache
def _cases(every: bool) -> list[Case]:
    """Of every way with every mask in each world, or fewer, with every pair on two processes.

    Four take longest: there every way is split by each layout, at each length.
    """
    if every:
        return covering(FACTORS, [*pairs(FACTORS), ("world", "way", "name")])
    of_four = [*_WITH_WORLD, ("way", "layout", "kv_heads"), ("way", "length", "dtype")]
    worlds = {2: pairs(FACTORS), 4: of_four, 1: _WITH_WORLD}
    return [case for world, together in worlds.items() for case in covering(FACTORS | {"world": (world,)}, together)]


def _rows(world: int, way: str, layout: str) -> int:
    """The size of the mesh's first dimension."""
    first, second = WAYS[way]
    if first is None or not second:
        return 1 if first is None else world
    return 2 if world == 4 or (world == 2 and layout == "zigzag") else 1  # of two processes each dimension in turn


def _mask(name: str, size: int, rows_without_key: bool) -> Any:
    given = mask(name, 2, size)
    if not rows_without_key:
        return given
    hides = masks.keep((torch.arange(size) % 5 != 3)[:, None].expand(size, size))
    return hides if given is None else hides & given


def _record(name: str, size: int, every_query_counts: bool) -> dict[str, Any]:
    """Options of `clearhead.record`."""
    counts = torch.arange(2 * size).view(2, size) % 4 != 1
    chosen = torch.tensor([size - 1, 0, size // 2])
    options = RECORDS.get(name, EVERY_STATISTIC)
    return options | {"queries": chosen, "query_mask": None if every_query_counts else counts}


def _run(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        world, way, layout, dtype = (case[name] for name in ("world", "way", "layout", "dtype"))
        method, heads = WAYS[way]
        mesh = grid(_rows(world, way, layout))
        size = {"64": 64, "67": 67, "less than W": max(1, world - 1)}[case["length"]]

        def prepare(module: Any, mesh: Any = mesh, heads: bool = heads, method: str | None = method) -> Any:
            module = tensor_parallel(module, mesh["tp"]) if heads else module
            return fully_shard(module, mesh=mesh["cp"]) if method == "fully_shard" else module

        options: dict[str, Any] = {"prepare": prepare, "what": str(case)}
        if method == "fully_shard":
            options["averaged"] = mesh["cp"]
        elif method is not None:
            options |= {"method": method, "layout": layout}
        torch.manual_seed(case.get("draw", 1))
        x, whole = sequences(size, dtype=dtype)[0], attention(case["kv_heads"], dtype=dtype, **PARTS[case["parts"]])
        over = None if method == "fully_shard" else mesh["cp"]
        given = _mask(case["name"], size, case["rows_without_key"])
        split = compare_in_parts(whole, over, x, mask=given, **options)
        record = _record(case["record"], size, case["every_query_counts"])
        compare_records(whole, split, x, over, record, layout=layout, what=options["what"], mask=given)


@pytest.mark.parametrize("every", [False, *slow(True)], ids=["fewer", "all"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
def test_case_by_case(groups: Groups, world: int, way: str, every: bool) -> None:
    cases = [case for case in _cases(every) if (case["world"], case["way"]) == (world, way)]
    groups(world).run(_run, cases, seconds=60)


#: Cases of two processes, in which one process has nearly the right gradient of a norm for some draws of the input.
NORMS: dict[str, Any] = {
    **{"world": 2, "parts": "norms", "dtype": torch.bfloat16, "length": "67"},
    **{"rows_without_key": True, "record": "entropy", "every_query_counts": True},
}
HEADS_AND_SEQUENCE = {"way": "tensor and sequence", "layout": "zigzag", "kv_heads": 1, "name": "bottom right"}
RING = {"way": "ring", "layout": "contiguous", "kv_heads": 8, "name": "function of heads", "rows_without_key": False}


@pytest.mark.parametrize(("case", "draw"), [(HEADS_AND_SEQUENCE, 2), (HEADS_AND_SEQUENCE, 4), (RING, 23)])
def test_norms_of_draws_that_one_process_rounds_well(groups: Groups, case: dict[str, Any], draw: int) -> None:
    groups(2).run(_run, [NORMS | case | {"draw": draw}])


#: The masks of which every combination with everything else is run.
PRODUCT = FACTORS | {
    "name": ("none", "causal", "window", "lengths", "documents", "bias", "alibi"),
    "parts": ("none", "sinks"),
    "record": ("every statistic",),
    "every_query_counts": (False,),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_whole_product(groups: Groups, world: int, way: str, dtype: torch.dtype) -> None:
    chosen = PRODUCT | {"world": (world,), "way": (way,), "dtype": (dtype,)}
    cases = [dict(zip(chosen, values, strict=True)) for values in product(*chosen.values())]
    groups(world).run(_run, cases, seconds=600)


def test_cases_cover_every_pair() -> None:
    for one, other in pairs(FACTORS):
        assert {(case[one], case[other]) for case in _cases(False)} == set(product(FACTORS[one], FACTORS[other]))
    assert len(_cases(False)) < 250 < len(_cases(True)) < 400


# Parts without a position, whole sequences of none, and batches of every size near those of a module's features: E is
# 32, and projections of 32 and 8 features have 16 and 4 of them on a process.

BATCHES = (*range(1, 18), 32, 33)


def _attention(batch: int) -> Any:
    parts: dict[str, Any] = {"sinks": True} if batch % 2 else {}
    if batch % 5 == 3:
        parts |= {"q_norm": "norm", "k_norm": "per head"}
    return attention(2 if batch % 2 else HEADS, **parts)


def _compare(cases: tuple[tuple[int, int], ...]) -> None:
    """Outputs, gradients and statistics of these batch sizes and lengths."""
    heads, mesh = (square()["tp"], square()["cp"]) if torch.distributed.get_world_size() == 4 else (line(), None)
    for batch, length in cases:
        whole, x = _attention(batch), torch.randn(batch, length, EMBED, dtype=torch.float64)
        options: Any = {"layout": "zigzag" if batch % 3 else "contiguous", "what": f"{batch, length}"}
        options["mask"] = masks.causal()
        prepare = lambda module: tensor_parallel(module, heads)  # noqa: E731
        split = compare_in_parts(whole, mesh, x, method="gather" if batch % 2 else "ring", prepare=prepare, **options)
        compare_records(whole, split, x, mesh, EVERY_STATISTIC, **options)


@in_processes(2, 4, seconds=90)
def test_heads_of_no_position() -> None:
    """B is a number of features of a projection, or divides none. Once such calls never returned."""
    _compare((*product((1, 4, 5, 16, 17, 32), (0,)), (3, 1), (8, 3), (16, 1)))


@pytest.mark.slow
@in_processes(2, 4, seconds=300)
def test_every_size_of_a_batch() -> None:
    _compare(tuple(product(BATCHES, (0, 1, 3))))


def _loop() -> None:
    while torch.distributed.get_rank() == 1:
        pass


def test_a_process_that_never_answers_is_killed() -> None:
    began = time.monotonic()
    with processes(2) as own, pytest.raises(AssertionError, match="process 1: no answer in time"):
        own.run(_loop, seconds=1)
    assert time.monotonic() - began < 30
    assert not any(process.is_alive() for process in own.started)
