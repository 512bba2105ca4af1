"""Statistics of parts: records of other calls than those of test_every_case.py, weights, and functions of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import clearhead
from clearhead import masks
from clearhead.distributed import (
    attention_statistics,
    context_parallel,
    gather_sequence,
    shard_sequence,
    tensor_parallel,
)
from clearhead.errors import ArgumentError, ClearheadError, DistributedError, RecordError

from .building import attention, collectives, encoder, full, layouts, mask, methods, refuses, require_close, sequences
from .comparing import EVERY_STATISTIC, compare_statistics, halve_heads, sequence_mesh
from .processes import in_processes, line, square


@in_processes(2)
@methods
def test_other_calls(method: Any) -> None:
    """Positions, cross-attention, no keys, several recorders and steps, training with dropout."""
    mesh, whole = line(), attention(4, dropout=0.3)
    split: Any = context_parallel(copy.deepcopy(whole), mesh, method=method)
    x, memory = sequences(11, 7)
    places = torch.arange(11).expand(2, 11).clone() * 2
    places[1, 9:] = -1
    calls: list[dict[str, Any]] = [
        {"positions": 5},
        {"positions": places, "mask": masks.causal()},
        {"key": memory, "mask": mask("lengths", 2, 11, 7)},
        {"key": memory[:, :0]},
    ]
    names = ("entropy", "received", "top_k", "rows", "distance", "output_norm", "offset")
    for number, options in enumerate(calls):
        parts = {name: shard_sequence(x, mesh) if name == "key" else x for name, x in options.items()}
        with clearhead.record(whole, names) as expected:
            whole(x, **options)
        with clearhead.record(split, names) as found, clearhead.record(split, ("max_logit",)) as second:
            split(shard_sequence(x, mesh), **parts)
        (own,), (one,) = (each[""] for each in (found, expected))
        compare_statistics(own, one, mesh, f"{method} {number}", weights=one.rows)
        for statistic, layers in expected.summary().values.items():
            for name, heads in layers.items():
                require_close(found.summary()[statistic][name].double(), heads.double(), 1e-12, statistic)
        assert second[""].max_logit.shape == (2, 8)
    part, one = (shard_sequence(each, mesh) for each in (x, x[:, :1]))  # nothing in one of the processes
    output = split.eval()(part)
    with clearhead.record(split, names):
        assert torch.equal(split(part), output)
    with clearhead.record(split, ("entropy",)) as rec:
        split(one)
    assert rec[""].entropy.shape == (2, 8, one.shape[1])


@in_processes(4)
@layouts
def test_weights_of_all_heads(layout: Any) -> None:
    """Of all heads, with gradients, where heads are split; of this process's queries, where the sequence is too."""
    whole, mesh, x = attention(2, sinks=True), square(), sequences(13)[0]
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
    both = context_parallel(split, mesh["cp"], layout=layout)
    weights = both(shard_sequence(x, mesh["cp"], layout=layout), **options)[1]
    require_close(weights, shard_sequence(found[0], mesh["cp"], dim=2, layout=layout), 1e-12, "weights of parts")


#: A call of tensors: its mask, H and Hkv, lengths of queries and keys, and options.
CALLS: dict[str, tuple[str, tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "no mask": ("none", (8, 8), (13, 13), {}),
    "causal": ("causal", (8, 2), (13, 13), {"softcap": 5.0, "sink_keys": 2}),
    "bottom right": ("bottom right", (8, 1), (7, 13), {"scale": 0.3}),
    "window": ("window", (8, 4), (13, 13), {"query_positions": 4, "map_pooling": "max"}),
    "lengths": ("lengths", (8, 2), (13, 11), {"sinks": True, "query_mask": True}),
    "documents": ("documents", (8, 2), (13, 13), {"positions": True}),
    "bias": ("bias", (8, 8), (13, 5), {"sinks": True}),
    "heads": ("heads", (8, 4), (13, 13), {"queries": torch.tensor([12, 0, 6])}),
    "bool": ("bool", (8, 2), (5, 13), {"queries": slice(1, None, 2)}),
    "alibi": ("alibi", (8, 2), (13, 13), {"query_mask": True, "offsets": (-1, 2, 0)}),
    "nothing seen": ("nothing seen", (8, 2), (13, 13), {"sinks": True}),
    "fewer than processes": ("causal", (8, 2), (1, 1), {}),
    "fewer queries": ("lengths", (8, 2), (1, 13), {}),
    "fewer keys": ("none", (8, 2), (13, 1), {"sinks": True}),
    "no keys": ("none", (8, 2), (13, 0), {}),
}


def _tensors(name: str, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Any, dict[str, Any]]:
    """Query, key and value of a call, its mask, and its options, with every statistic."""
    kind, (heads, kv_heads), (length, keys), chosen = CALLS[name]
    torch.manual_seed(3)
    query, key, value = (
        torch.randn(2, h, n, d, dtype=dtype)
        for h, n, d in ((heads, length, 4), (kv_heads, keys, 4), (kv_heads, keys, 3))
    )
    options = EVERY_STATISTIC | chosen
    if options.pop("positions", False):
        options["query_positions"] = torch.randint(0, 13, (2, length))
        options["key_positions"] = torch.randint(0, 13, (2, heads, keys))
    if "sinks" in options:
        options["sinks"] = torch.randn(heads)
    if "query_mask" in options:
        options["query_mask"] = torch.arange(2 * length).view(2, length) % 4 != 1
    return (query, key, value), mask(kind, 2, length, keys), options


#: Options that weights have too.
ARGUMENTS = ("scale", "softcap", "sinks", "query_positions", "key_positions")


@in_processes(2, 4)
@pytest.mark.parametrize(
    ("layout", "dtype"), [("contiguous", torch.float64), ("zigzag", torch.float64), ("zigzag", torch.float32)]
)
@torch.no_grad()
def test_statistics_of_tensors(layout: Any, dtype: torch.dtype) -> None:
    for name in CALLS:
        (query, key, value), given, options = _tensors(name, dtype)
        one = clearhead.attention_statistics(query, key, given, value=value, **options)
        chosen = {argument: options[argument] for argument in ARGUMENTS if argument in options}
        weights = clearhead.attention_weights(query, key, given, **chosen).to(dtype)
        own = [shard_sequence(x, line(), dim=2, layout=layout) for x in (query, key, value)]
        found = attention_statistics(*own[:2], line(), given, value=own[2], layout=layout, **options)
        queries = options.get("queries")
        queries = torch.arange(query.shape[2])[queries] if isinstance(queries, slice) else queries
        compare_statistics(found, one, line(), f"{name} {layout}", layout, dtype, None, queries, weights)
        assert found.is_part
        if dtype == torch.float64:
            for part, whole in ((found.entropy, one.entropy), (found.received, one.received)):
                require_close(gather_sequence(part, line(), dim=2, layout=layout), whole, 1e-12, name)


@in_processes(2)
def test_other_statistics_of_tensors() -> None:
    """Without a batch, under autocast, of the heads of grouped keys, NaN in padding, and what is exchanged."""
    x = torch.randn(8, 13, 4)
    part = shard_sequence(x, line(), dim=1)
    options: dict[str, Any] = {"statistics": ("received", "rows", "top_k"), "queries": [12, 3]}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one = clearhead.attention_statistics(x, x, **options)
        found = attention_statistics(part, part, line(), **options)
    assert found.batch_size == 1
    own = 1 - dist.get_rank()  # query 12 is the second process's, and 3 the first one's
    require_close(found.rows, one.rows[:, :, own : own + 1], 1e-5, "autocast")
    x = x[None].repeat(2, 1, 1, 1)
    padded = x[:, :2].clone()
    padded[1, :, 5:] = float("nan")
    lengths = masks.lengths(torch.tensor([13, 5]))
    grouped: dict[str, Any] = {"statistics": ("entropy", "received"), "per": "kv_head"}
    one = clearhead.attention_statistics(x, padded, lengths, **grouped)
    part, keys = (shard_sequence(each, line(), dim=2) for each in (x, padded))
    found = attention_statistics(part, keys, line(), lengths, **grouped)
    for name in grouped["statistics"]:
        expected = shard_sequence(getattr(one, name), line(), dim=2)
        assert expected.shape[1] == 2
        require_close(getattr(found, name), expected, 1e-5, name)
    counts = collectives(lambda: attention_statistics(part, part, line(), statistics=("top_k", "received")))
    assert counts == {"allgather_base": 2, "alltoall_base": 1, "reduce_scatter": 1}


@in_processes(2)
def test_a_mesh_of_one_process_exchanges_nothing() -> None:
    mesh, x = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))["cp"], torch.randn(2, 4, 5, 8)
    one = clearhead.attention_statistics(x, x, masks.causal(), top_k=2)
    found = attention_statistics(x, x, mesh, masks.causal(), top_k=2)
    for name in ("entropy", "received", "max_logit"):
        assert torch.equal(getattr(found, name), getattr(one, name))
    assert not collectives(lambda: attention_statistics(x, x, mesh))
    with pytest.raises(ArgumentError, match="layout: expected 'contiguous' or 'zigzag'"):
        attention_statistics(x, x, mesh, layout="spiral")  # type: ignore[arg-type]


SAME = "expected the same in every process"
ALIKE = "what one is told"
#: What is wrong with a call of (2, 8, 9, 4) and (2, 2, 9, 4), and what is said if it is in one process, or in all.
WRONG: dict[str, tuple[Callable[[Tensor, Tensor], dict[str, Any]], str, str]] = {
    "mesh": (lambda q, k: {"mesh": None}, "mesh: expected a DeviceMesh, got NoneType", ""),
    "layout": (lambda q, k: {"layout": "spiral"}, "layout: expected 'contiguous' or 'zigzag', got 'spiral'", ALIKE),
    "another layout": (lambda q, k: {"layout": "zigzag"}, f"layout: {SAME}", ""),
    "dtype": (lambda q, k: {"query": q.float(), "key": k.float()}, f"attention_statistics: dtype: {SAME}", ""),
    "batch": (lambda q, k: {"query": q[:1], "key": k[:1]}, f"batch size: {SAME}, got [2, 1]", ""),
    "heads": (lambda q, k: {"query": q[:, :4]}, f"query heads: {SAME}, got [8, 4]", ""),
    "key heads": (lambda q, k: {"key": k[:, :1]}, f"key/value heads: {SAME}, got [2, 1]", ""),
    "length": (lambda q, k: {"key": k.repeat(1, 1, 2, 1)}, "as shard_sequence cuts them", ""),
    "mask of another kind": (lambda q, k: {"mask": "causal"}, "mask: ", ALIKE),
    "another mask": (lambda q, k: {"mask": masks.causal()}, f"mask: {SAME}", ""),
    "mask of a part": (lambda q, k: {"mask": torch.ones(len(q[0, 0]), 9).bool()}, f"mask: {SAME}", "mask"),
    "mask of values": (lambda q, k: {"mask": masks.lengths(torch.tensor([99, 9]))}, "mask", "99"),
    "scale": (lambda q, k: {"scale": 2.0}, f"scale: {SAME}", ""),
    "sinks of queries": (
        lambda q, k: {"sinks": torch.zeros(q.shape[:3])},
        "sinks: expected (H,) for a split sequence, got sinks of single queries",
        ALIKE,
    ),
    "sinks alone": (lambda q, k: {"sinks": torch.zeros(8)}, f"sinks: {SAME}", ""),
    "positions": (
        lambda q, k: {"query_positions": torch.arange(q.shape[2]), "key_positions": 0},
        f"query_positions: {SAME}",
        "query_positions: expected shape (9,) or (2, 9), got",
    ),
    "a first position": (lambda q, k: {"key_positions": 3}, f"key_positions: {SAME}", ""),
    "statistic": (lambda q, k: {"statistics": ("best",)}, "statistics: expected names among entropy", ALIKE),
    "another statistic": (lambda q, k: {"statistics": ("sink",)}, f"statistics: {SAME}", ""),
    "per": (lambda q, k: {"per": "kv_head"}, f"statistics: {SAME}", ""),
    "another option": (lambda q, k: {"top_k": 3}, f"options: {SAME}", ""),
    "query mask": (
        lambda q, k: {"query_mask": torch.ones(q.shape[0], q.shape[2])[..., :4].bool()},
        f"query_mask: {SAME}",
        "query_mask: expected (B, L) = (2, 9), got (2, 4)",
    ),
    "queries": (lambda q, k: {"queries": [9]}, f"queries: {SAME}", "queries: expected row numbers below L = 9"),
    "other queries": (lambda q, k: {"queries": torch.tensor([2, 1])}, f"queries: {SAME}", ""),
}


@in_processes(2)
def test_statistics_of_tensors_that_one_process_cannot_give_are_refused_by_all() -> None:
    """Each of them in the last process alone, and in all."""
    q, k = (shard_sequence(torch.randn(2, h, 9, 4, dtype=torch.float64), line(), dim=2) for h in (8, 2))
    last = dist.get_rank() == dist.get_world_size() - 1
    good: dict[str, Any] = {"query": q, "key": k, "mesh": line(), "statistics": ("entropy",)}
    for make, alone, everywhere in WRONG.values():
        for together in (False, True)[: 1 + bool(everywhere)]:
            with refuses(everywhere if together and everywhere != ALIKE else alone):
                attention_statistics(**(good | make(q, k) if last or together else good))
        assert attention_statistics(**good).entropy.shape == q.shape[:3]


@in_processes(2)
def test_statistics_of_tensors_inside_vmap_are_refused() -> None:
    x = shard_sequence(torch.randn(3, 2, 4, 9, 8), line(), dim=3)
    with refuses("attention_statistics: torch.func and forward-mode derivatives do not follow exchanges"):
        torch.func.vmap(lambda x: attention_statistics(x, x, line()).entropy)(x)


class Padded(nn.Module):
    """A model that is given the padding of its tokens, as those of transformers are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.model(x)


def _with_padding(model: nn.Module, x: Tensor, attention_mask: Tensor | None) -> Any:
    """What is recorded of its last layer."""
    with torch.no_grad(), clearhead.record(model, ("received", "max_logit", "entropy", "offset")) as rec:
        model(x, attention_mask=attention_mask)
    return [*rec.values()][-1][0]


@in_processes(2, 4)
@pytest.mark.parametrize(("method", "layout"), [("heads", "contiguous"), ("gather", "zigzag"), ("ring", "contiguous")])
def test_padding_that_is_found_may_be_cut_as_the_tokens(method: Any, layout: Any) -> None:
    """Padding that all processes are given whole, that they are given as their tokens, and some of them so."""
    whole, mesh = Padded(encoder()), sequence_mesh()
    split = Padded(context_parallel(halve_heads(encoder()), mesh, method=method, layout=layout))
    for length in (1, 13):
        x, marks = sequences(length)[0], torch.ones(2, length, dtype=torch.int64)
        marks[1, length // 3 :] = 0
        part, own = (shard_sequence(each, mesh, layout=layout) for each in (x, marks))
        one = _with_padding(whole, x, marks)
        assert bool((~one.counted).any())
        for given in (marks, own, own if mesh.get_local_rank() else marks):
            found = _with_padding(split, part, given)
            compare_statistics(found, one, mesh, f"{method} {length}", layout)
    assert bool(_with_padding(split, part, None).counted.all())
    assert bool(_with_padding(split, part, torch.zeros(2, 99)).counted.all())  # of no call of this model
    first = mesh.get_local_rank() == 0
    with refuses("expected (2, 13), or the part of it", RecordError if dist.get_world_size() == 2 else ClearheadError):
        _with_padding(split, part, own[:, 1:] if first else own)
    with refuses("recorders: expected the same in every process", DistributedError):
        _with_padding(split, part, own if first else None)
    assert _with_padding(split, part, own).entropy.shape == (2, 8, part.shape[1])
