"""Outputs, every gradient and statistics as on one process: ways to split, masks, parts and lengths, pair by pair."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from clearhead import masks
from clearhead.distributed import tensor_parallel
from clearhead.masks._tensors import as_mask
from tests.support.covering import covering, pairs

from .building import MASKS, attention, mask, sequences
from .comparing import EVERY_STATISTIC, compare_in_parts, compare_records
from .processes import Groups, grid

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
    "norms": {"q_norm": "layer norm", "k_norm": "norm", "mask": "alibi"},
    "relative": {"mask": "relative", "softcap": 5.0},
    "window": {"mask": "relative window", "bias": False, "scale": 0.3, "position": "rotary"},
}
LENGTHS = ("64", "67", "less than W")
#: What is recorded.
RECORDS: dict[str, dict[str, Any]] = {
    "entropy": {"statistics": ("entropy", "received")},
    "largest": {"statistics": ("max_logit", "raw_max_logit", "confidence")},
    "keys": {"statistics": ("top_k", "rows", "sink"), "top_k": 5, "sink_keys": 2},
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
CASES = covering(FACTORS, [*pairs(FACTORS), ("world", "way", "name")])


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
    return hides if given is None else hides & as_mask(given)


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
        torch.manual_seed(1)
        x, whole = sequences(size, dtype=dtype)[0], attention(case["kv_heads"], dtype=dtype, **PARTS[case["parts"]])
        over = None if method == "fully_shard" else mesh["cp"]
        given = _mask(case["name"], size, case["rows_without_key"])
        split = compare_in_parts(whole, over, x, mask=given, **options)
        record = _record(case["record"], size, case["every_query_counts"])
        compare_records(whole, split, x, over, record, layout=layout, what=options["what"], mask=given)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
def test_case_by_case(groups: Groups, world: int, way: str) -> None:
    groups(world).run(_run, [case for case in CASES if (case["world"], case["way"]) == (world, way)], seconds=60)


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
        assert {(case[one], case[other]) for case in CASES} == set(product(FACTORS[one], FACTORS[other]))
    assert 250 < len(CASES) < 400
