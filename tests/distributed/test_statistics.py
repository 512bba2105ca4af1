"""Records of modules that are split over processes: gathered, those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import clearhead
from clearhead import masks
from clearhead._statistics.definitions import STATISTICS
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel
from clearhead.distributed._layout import LAYOUTS, Layout, Parts

from .building import EMBED, attention, mask, require_close
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
    for name in ("entropy", "sink", "output_norm"):
        for one, other in zip(part.head_sums(name), whole.head_sums(name), strict=True):
            require_close(one.double(), other.double(), 1e-12 if one.dtype == torch.float64 else 1e-4, f"{what} {name}")
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
    method: str, layout: Layout, length: int, kv_heads: int, dtype: torch.dtype, names: tuple[str, ...], **parts: Any
) -> None:
    whole = attention(kv_heads, dtype=dtype, **parts).eval()
    split = context_parallel(copy.deepcopy(whole), line(), method=method, layout=layout)  # type: ignore[arg-type]
    for name in names:
        torch.manual_seed(1)
        x = torch.randn(2, length, EMBED, dtype=dtype)
        compare_records(whole, split, x, line(), layout, f"{method} {layout} {name}", mask(name, 2, length))


MASKS = ("none", "causal", "window", "both lengths", "bias", "documents", "heads", "nothing seen")


@pytest.mark.parametrize("method", METHODS)
def test_statistics(two: Processes, method: str) -> None:
    two.run(_context, method, "zigzag", 13, 2, torch.float64, MASKS)
