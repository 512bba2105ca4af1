"""Records of modules that are split over processes: gathered, those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import clearhead
from clearhead import masks
from clearhead._statistics.definitions import STATISTICS
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel
from clearhead.distributed._layout import LAYOUTS, Layout, Parts

from .building import EMBED, attention, full, mask, require_close
from .comparing import TOLERANCES
from .meshes import line, square
from .processes import Processes

METHODS = ("heads", "gather", "ring")
EVERY = (*STATISTICS, "rows")
#: Results with a number for each query, along this dimension, and for each key.
OF_QUERIES = {"head_average": 1} | dict.fromkeys(
    (
        "entropy",
        "normalized_entropy",
        "confidence",
        "sink",
        "distance",
        "output",
        "output_norm",
        "sees",
        "top_k.weights",
        "top_k.indices",
    ),
    2,
)
OF_KEYS = ("received", "received_mean")
OPTIONS: dict[str, Any] = {"statistics": EVERY, "top_k": 5, "map_size": 7, "sink_keys": 2, "offsets": (-1, 2, 0)}


def flat(found: Any) -> dict[str, Tensor]:
    results: dict[str, Tensor] = {}
    for name, tensor in found.results.items():
        parts = tensor._asdict() if isinstance(tensor, tuple) else {"": tensor}  # type: ignore[union-attr]
        results |= {f"{name}.{part}".rstrip("."): each for part, each in parts.items()}
    return results | {"counted": found.counted}


def compare(part: Any, whole: Any, layout: Layout, mesh: DeviceMesh | None, chosen: Tensor, what: str) -> None:
    """Raise unless the statistics of a part are those of one process, of what the part has."""
    found, expected = flat(part), flat(whole)
    assert found.keys() == expected.keys()
    for name, number in expected.items():
        right = number
        if mesh is not None:
            world, rank = mesh.size(), mesh.get_local_rank()
            if name in OF_QUERIES or name == "counted":
                right = shard_sequence(number, mesh, dim=OF_QUERIES.get(name, 1), layout=layout)
            elif name in OF_KEYS:
                right = shard_sequence(number, mesh, dim=2, layout=layout)
            elif name == "hidden_queries":
                right = (~shard_sequence(whole.sees, mesh, dim=2, layout=layout)).sum(-1)
            elif name == "rows":
                own = Parts(whole.query_length, world, layout).positions(rank, torch.device("cpu"))
                right = number[:, :, torch.isin(chosen, own)]
        assert found[name].dtype == right.dtype, name
        tolerance = TOLERANCES.get(right.dtype, 0)
        if tolerance:
            same = torch.isneginf(found[name]) & torch.isneginf(right)
            require_close(found[name].masked_fill(same, 0), right.masked_fill(same, 0), tolerance, f"{what} {name}")
        else:
            assert torch.equal(found[name], right), (what, name)
    for name in {"entropy", "sink", "output_norm"} & expected.keys():
        for one, other in zip(part.head_sums(name), whole.head_sums(name), strict=True):
            require_close(one.double(), other.double(), TOLERANCES[part.results[name].dtype], f"{what} {name}")
    assert (part.num_heads, part.num_kv_heads, part.key_length) == (
        whole.num_heads,
        whole.num_kv_heads,
        whole.key_length,
    )


def recorded(module: nn.Module, x: Tensor, options: dict[str, Any], call: dict[str, Any]) -> Any:
    with torch.no_grad(), clearhead.record(module, **options) as rec:
        output = module(x, **call)
    with torch.no_grad():
        assert torch.equal(output, module(x, **call)), "recording changes the output"
    return rec[""][0]


def compare_records(
    whole: nn.Module, split: Any, x: Tensor, mesh: DeviceMesh | None, layout: Layout, what: str, mask: Any = None
) -> None:
    chosen = torch.tensor([x.shape[1] - 1, 0, x.shape[1] // 2])
    counted = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) % 4 != 1
    part = x if mesh is None else shard_sequence(x, mesh, layout=layout)
    for options in (
        OPTIONS | {"queries": chosen},
        OPTIONS | {"queries": chosen, "query_mask": counted, "map_pooling": "max", "heads": (5, 2)},
    ):
        found, expected = (recorded(*each, options, {"mask": mask}) for each in ((split, part), (whole, x)))
        compare(found, expected, layout, mesh, chosen, what)
    options = OPTIONS | {
        "per": "kv_head",
        "statistics": ("entropy", "received", "max_logit", "offset", "map", "sink", "output_norm"),
    }
    found, expected = (recorded(*each, options, {"mask": mask}) for each in ((split, part), (whole, x)))
    compare(found, expected, layout, mesh, chosen, what)


def _context(
    method: str,
    layout: Layout,
    length: int,
    kv_heads: int,
    dtype: torch.dtype,
    names: tuple[str, ...],
    parts: Any = None,
) -> None:
    whole = attention(kv_heads, dtype=dtype, **(parts or {})).eval()
    split = context_parallel(copy.deepcopy(whole), line(), method=method, layout=layout)  # type: ignore[arg-type]
    for name in names:
        torch.manual_seed(1)
        x = torch.randn(2, length, EMBED, dtype=dtype)
        compare_records(whole, split, x, line(), layout, f"{method} {layout} {name}", mask(name, 2, length))


MASKS = ("causal", "both lengths", "bias", "heads", "nothing seen")


@pytest.mark.parametrize("method", METHODS)
def test_parts_of_a_sequence(two: Processes, method: str) -> None:
    two.run(_context, method, "zigzag", 13, 2, torch.float64, MASKS)


@pytest.mark.parametrize(("method", "kv_heads", "length"), [("heads", 1, 11), ("gather", 8, 3), ("ring", 1, 3)])
def test_four_processes(four: Processes, method: str, kv_heads: int, length: int) -> None:
    four.run(_context, method, "contiguous", length, kv_heads, torch.float32, ("window", "none"))


PARTS: list[dict[str, Any]] = [
    {"position": "rotary", "sinks": True},
    {"q_norm": "norm", "mask": "alibi"},
    {"mask": "relative", "softcap": 5.0},
]


def _parts_of_modules(method: str, dtype: torch.dtype) -> None:
    for parts in PARTS:
        _context(method, "zigzag", 17, 4, dtype, ("causal",), parts)


@pytest.mark.parametrize("method", METHODS)
def test_sinks_soft_cap_and_biases_of_modules(two: Processes, method: str) -> None:
    two.run(_parts_of_modules, method, torch.float32)


def _heads(kv_heads: int, dtype: torch.dtype, names: tuple[str, ...], parts: Any = None) -> None:
    whole = attention(kv_heads, dtype=dtype, **(parts or {})).eval()
    split = tensor_parallel(copy.deepcopy(whole), line())
    for name in names:
        torch.manual_seed(1)
        x = torch.randn(2, 13, EMBED, dtype=dtype)
        compare_records(whole, split, x, None, "contiguous", f"{name} {parts}", mask(name, 2, 13))


@pytest.mark.parametrize("kv_heads", [8, 1])
def test_parts_of_the_heads(two: Processes, kv_heads: int) -> None:
    two.run(_heads, kv_heads, torch.float64, ("causal", "heads"), {"sinks": True})


def _both(method: str, kv_heads: int, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    """Heads over one dimension of a mesh, the sequence over the other."""
    whole, mesh = attention(kv_heads, dtype=dtype, sinks=True, mask="alibi").eval(), square()
    split = tensor_parallel(copy.deepcopy(whole), mesh["tp"])
    split = context_parallel(split, mesh["cp"], method=method, layout="zigzag")  # type: ignore[arg-type]
    for name in names:
        x = torch.randn(2, 13, EMBED, dtype=dtype)
        compare_records(whole, split, x, mesh["cp"], "zigzag", f"{method} {name}", mask(name, 2, 13))


@pytest.mark.parametrize(("method", "kv_heads"), [("heads", 8), ("gather", 2), ("ring", 1)])
def test_parts_of_the_heads_and_of_the_sequence(four: Processes, method: str, kv_heads: int) -> None:
    four.run(_both, method, kv_heads, torch.float64, ("heads",))


def _otherwise(method: str) -> None:
    """Positions, cross-attention, no keys, half precision, several recorders and steps, training with dropout."""
    mesh = line()
    for dtype in (torch.float64, torch.bfloat16):
        whole = attention(4, dtype=dtype, dropout=0.3)
        split = context_parallel(copy.deepcopy(whole), mesh, method=method)  # type: ignore[arg-type]
        x, memory = torch.randn(2, 11, EMBED, dtype=dtype), torch.randn(2, 7, EMBED, dtype=dtype)
        places = torch.arange(11).expand(2, 11).clone() * 2
        places[1, 9:] = -1
        calls: list[tuple[Tensor, dict[str, Any]]] = [
            (x, {"positions": 5}),
            (x, {"positions": places, "mask": masks.causal()}),
            (x, {"key": memory, "mask": mask("lengths", 2, 11, 7)}),
            (x, {"key": memory[:, :0]}),
        ]
        names = ("entropy", "received", "top_k", "distance", "output_norm", "offset")
        for number, (query, options) in enumerate(calls):
            parts = {k: shard_sequence(v, mesh) if k == "key" else v for k, v in options.items()}
            with clearhead.record(whole, names) as expected:
                whole(query, **options)
            with clearhead.record(split, names) as found, clearhead.record(split, ("max_logit",)) as second:
                split(shard_sequence(query, mesh), **parts)
            if dtype == torch.float64:
                compare_summaries(found, expected, f"{method} {number}")
                compare(found[""][0], expected[""][0], "contiguous", mesh, torch.empty(0), f"{method} {number}")
            else:  # rounded projections, whose last bits depend on how many rows they have
                judge, exact = (
                    copy.deepcopy(whole).double(),
                    {k: v.double() if k == "key" else v for k, v in options.items()},
                )
                with clearhead.record(judge, names) as rec:
                    judge(query.double(), **exact)
                for name in ("entropy", "received", "output_norm"):
                    right, one = rec[""].results[name], expected[""].results[name]
                    most = 2 * (one - right).abs().max() + right.abs().max() * 2**-8 if right.numel() else 0
                    require_within(found[""].results[name], shard_sequence(right, mesh, dim=2), float(most), name)
            assert second[""].max_logit.shape == (2, 8)
        one = shard_sequence(x[:, :1], mesh)  # nothing at all in one of the processes
        with clearhead.record(split, ("entropy",)) as rec:
            split(one)
        assert rec[""].entropy.shape == (2, 8, one.shape[1])


def require_within(found: Tensor, right: Tensor, most: float, what: str) -> None:
    assert found.shape == right.shape
    assert not right.numel() or float((found - right).abs().max()) <= most, what


def compare_summaries(found: Any, expected: Any, what: str) -> None:
    for statistic, layers in expected.summary().values.items():
        for name, heads in layers.items():
            require_close(found.summary()[statistic][name].double(), heads.double(), 1e-12, f"{what} {statistic}")


@pytest.mark.parametrize("method", METHODS)
def test_other_calls(two: Processes, method: str) -> None:
    two.run(_otherwise, method)


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


EVERY_MASK = ("none", "causal", "bottom right", "window", "lengths", "both lengths", "lengths of queries", "documents",
    "scattered documents", "keys", "bool", "heads", "bias", "function of heads", "alibi", "nothing seen")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_every_mask(
    two: Processes, four: Processes, method: str, layout: Layout, kv_heads: int, dtype: torch.dtype
) -> None:
    for length in (67, 64, 3):
        for group in (two, four):
            group.run(
                _context, method, layout, length, kv_heads, dtype, EVERY_MASK, {"sinks": length == 64}, seconds=300
            )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_every_mask_and_parts_of_the_heads(two: Processes, four: Processes, kv_heads: int, dtype: torch.dtype) -> None:
    for group in (two, four):
        group.run(_heads, kv_heads, dtype, EVERY_MASK, seconds=300)
    for method in METHODS:
        four.run(_both, method, kv_heads, dtype, EVERY_MASK, seconds=300)
