"""Packed calls in a row: equal boundaries beside other operands, other boundaries beside equal operands.

Each call is right, or refused as in a first call, whatever came before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import ClearheadError, KernelError
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.exact import exact_attention
from tests.support.forgetting import forget
from tests.support.randomised import randomised

Call = dict[str, Any]
REFUSED = "refused"
KERNELS = (None, "native", "sdpa", "chunked", "reference")


def bounds(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


#: Boundaries that calls share as objects, and others that are equal to them.
SHARED = bounds(3, 4)
LONGER, TWICE, INT32 = bounds(7, 4), bounds(3, 0, 4), bounds(3, 4).int()
DEFAULT: Call = {
    **{"q_bounds": SHARED, "k_bounds": SHARED, "H": 6, "Hkv": 3, "D": 5, "Dv": 5, "dtype": torch.float64},
    **{"mask": "causal", "learns": True, "lse": False, "layout": "contiguous", "more": (0, 0), "longest": (None, None)},
    **{"scale": None, "softcap": None, "sinks": False, "seed": 0, "around": "nothing"},
}


def visible(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.7


MASKS: dict[str, Callable[[int, int], Any]] = {
    "none": lambda rows, columns: None,
    "causal": lambda rows, columns: masks.causal(),
    "window": lambda rows, columns: masks.sliding_window(2, 1),
    "prefix": lambda rows, columns: masks.causal() | masks.prefix(2),
    "marks": lambda rows, columns: masks.keep(visible(rows, columns)),
    "other marks": lambda rows, columns: masks.keep(visible(rows, columns, 3)) & masks.causal(),
    "keys": lambda rows, columns: masks.keep(keys=visible(1, columns)),
    "bias": lambda rows, columns: masks.bias(visible(rows, columns, 5).double()) & masks.sliding_window(9, 9),
}
WITHIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": lambda q, k: k <= q,
    "window": lambda q, k: (k - q <= 1) & (q - k <= 2),
    "prefix": lambda q, k: (k <= q) | (k < 2),
    "other marks": lambda q, k: k <= q,
    "bias": lambda q, k: (q - k).abs() <= 9,
}
#: Settings of calls, of which each pair of neighbours runs in both orders.
ALTERNATIVES: dict[str, Sequence[Call]] = {
    "boundaries of keys": [
        {"k_bounds": each}
        for each in (SHARED, SHARED.clone(), LONGER, bounds(4, 3), bounds(0, 7), bounds(0, 11), INT32)
    ],
    "boundaries of queries": [
        {"q_bounds": each} for each in (SHARED, bounds(2, 5), bounds(7, 0), bounds(1, 1), LONGER)
    ],
    "boundaries of both": [
        {"q_bounds": each, "k_bounds": each}
        for each in (SHARED, SHARED.clone(), bounds(4, 3), TWICE, bounds(7), bounds(1, 2, 4), INT32, bounds(0, 7, 0))
    ],
    # Operands that are longer or shorter than their boundaries.
    "tokens": [{"more": more} for more in ((0, 0), (0, 4), (0, 0), (4, 0), (4, 4), (-1, 0), (0, -1), (0, 0))],
    "tokens beside equal boundaries": [
        {"k_bounds": LONGER, "more": more} for more in ((0, 0), (0, -4), (0, 0), (4, 0), (0, 4))
    ],
    "heads": [{"H": heads, "Hkv": of_keys} for heads, of_keys in ((6, 3), (6, 6), (3, 3), (6, 1), (2, 2))],
    "features": [{"D": dim, "Dv": of_values} for dim, of_values in ((5, 5), (7, 5), (5, 7), (8, 8))],
    "dtype": [{"dtype": dtype} for dtype in (torch.float64, torch.float32)],
    "layout": [{"layout": layout} for layout in ("contiguous", "heads first", "every other token", "one row")],
    "mask": [{"mask": name} for name in MASKS],
    "longest": [{"longest": longest} for longest in ((None, None), (4, 4), (4, None), (7, 7), (3, 4), (4, 3), (9, 99))],
    "scores": [{"scale": 0.4}, {}, {"softcap": 1.5}, {"sinks": True}, {"scale": -1.0}],
    "gradients": [{"learns": True}, {"learns": False}, {"learns": True, "lse": True}, {"lse": True, "learns": False}],
    "values": [{"seed": seed} for seed in (1, 2, 3)],
    "around": [{"around": around} for around in ("nothing", "autocast", "no_grad")],
}
BASES: dict[str, Call] = {
    "one sequence of boundaries": {},
    "two": {"k_bounds": LONGER, "mask": "window"},
    "marks": {"mask": "marks", "lse": True},
}


def drawn(call: Call) -> list[Tensor]:
    random = torch.Generator().manual_seed(call["seed"])
    tokens = [int(call[name][-1]) + more for name, more in zip(("q_bounds", "k_bounds"), call["more"], strict=True)]
    shapes = (
        (tokens[0], call["H"], call["D"]),
        (tokens[1], call["Hkv"], call["D"]),
        (tokens[1], call["Hkv"], call["Dv"]),
    )
    operands = [torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes]
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "contiguous": lambda x: x,
        "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "every other token": lambda x: x.repeat_interleave(2, 0)[::2],
        "one row": lambda x: x[:1].expand(x.shape),
    }
    sinks = [torch.linspace(-1, 1, call["H"], dtype=torch.float64)] if call["sinks"] else []
    return [layouts[call["layout"]](x).to(call["dtype"]) for x in operands] + sinks


def outcome(call: Call, kernel: str | None) -> list[Tensor] | str:
    leaves: list[Any] = [x.detach().requires_grad_(call["learns"]) for x in drawn(call)]
    sinks = leaves[3] if call["sinks"] else None
    rows, columns = leaves[0].shape[0], leaves[1].shape[0]
    options: dict[str, Any] = {
        "scale": call["scale"],
        "softcap": call["softcap"],
        "sinks": sinks,
        "return_lse": call["lse"],
    }
    options |= {"max_seqlen_q": call["longest"][0], "max_seqlen_k": call["longest"][1]}
    around: dict[str, Callable[[], Any]] = {
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "no_grad": torch.no_grad
    }  # fmt: skip
    try:
        forced = nullcontext() if kernel is None else clearhead.use_kernel(kernel)
        with forced, around.get(call["around"], nullcontext)():
            results: Any = clearhead.attention_varlen(
                leaves[0],
                leaves[1],
                leaves[2],
                call["q_bounds"],
                call["k_bounds"],
                MASKS[call["mask"]](rows, columns),
                **options,
            )
    except (ClearheadError, KernelError):
        return REFUSED
    results = list(results) if isinstance(results, tuple) else [results]
    if not call["learns"] or call["around"] == "no_grad":
        return results
    loss = torch.stack([(x[x.isfinite()].double() ** 2).sum() for x in results]).sum()
    return [*results, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]


def expected(call: Call) -> list[Tensor]:
    """Every sequence alone, in float64."""
    leaves = [x.detach().double().requires_grad_(call["learns"]) for x in drawn(call)]
    ends = [call[name].tolist() for name in ("q_bounds", "k_bounds")]
    name, (rows, columns) = call["mask"], (leaves[0].shape[0], leaves[1].shape[0])
    marks = {"marks": visible(rows, columns), "other marks": visible(rows, columns, 3)}
    marks["keys"] = visible(1, columns).expand(rows, -1)
    outputs: list[Tensor] = []
    lses: list[Tensor] = []
    for (start, stop), (first, last) in zip(*map(itertools.pairwise, ends), strict=True):
        q, k = torch.arange(stop - start)[:, None], torch.arange(last - first)
        seen = WITHIN[name](q, k) if name in WITHIN else torch.ones(len(q), len(k), dtype=torch.bool)
        if name in marks:
            seen = seen & marks[name][start:stop, first:last]
        bias = visible(rows, columns, 5).double()[start:stop, first:last] if name == "bias" else None
        places = slice(start, stop), slice(first, last), slice(first, last)
        parts = (x[part].transpose(0, 1)[None] for x, part in zip(leaves[:3], places, strict=True))
        found = exact_attention(
            *parts, seen[None, None], bias=None if bias is None else bias[None, None].masked_fill(~seen, -torch.inf),
            scale=call["scale"], softcap=call["softcap"], sinks=leaves[3] if call["sinks"] else None,
        )  # fmt: skip
        outputs.append(found.output[0].transpose(0, 1))
        lses.append(found.lse[0].transpose(0, 1))
    results = [torch.cat(outputs), *([torch.cat(lses)] if call["lse"] else [])]
    if not call["learns"] or call["around"] == "no_grad":
        return results
    loss = torch.stack([(x[x.isfinite()] ** 2).sum() for x in results]).sum()
    return [*results, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]


def require(found: list[Tensor] | str, call: Call) -> None:
    if found is REFUSED:
        return
    for ours, theirs in zip(found, expected(call), strict=True):
        assert isinstance(ours, Tensor)
        if call["around"] == "autocast" and call["dtype"] != torch.float64:
            assert (ours.double() - theirs).norm() <= 0.05 * theirs.norm() + 1e-2
            continue
        assert torch.equal(ours.isinf(), theirs.isinf())
        if ours.numel():
            require_near(ours.masked_fill(ours.isinf(), 0), theirs.masked_fill(theirs.isinf(), 0))


@in_turn({"field": ALTERNATIVES}, {"base": BASES, "kernel": KERNELS}, always=1)
def test_calls_that_differ_in_one_thing(field: str, base: str, kernel: str | None) -> None:
    alternatives = [DEFAULT | BASES[base] | item for item in ALTERNATIVES[field]]
    alone: list[list[Tensor] | str] = []
    for call in alternatives:
        forget()
        alone.append(outcome(call, kernel))
        require(alone[-1], call)
    forget()
    for number in (*range(len(alternatives)), *reversed(range(len(alternatives)))):
        found = outcome(alternatives[number], kernel)
        assert (found is REFUSED) == (alone[number] is REFUSED), alternatives[number]
        if found is not REFUSED:
            require_near(_finite(found), _finite(alone[number]))


def _finite(results: list[Tensor] | str) -> list[Tensor]:
    assert not isinstance(results, str)
    return [x.masked_fill(x.isinf(), 0) for x in results if x.numel()]


@pytest.mark.parametrize("more", [(0, 4), (4, 0), (0, -1), (-1, 0), (4, 4)])
def test_boundaries_of_other_operands_are_refused_by_name(more: tuple[int, int]) -> None:
    """One tensor of boundaries for queries and keys of different numbers."""
    name = "cu_seqlens_q" if more[0] else "cu_seqlens_k"
    for _ in range(2):
        right, wrong = (tuple[Any, Any, Any](drawn(call)) for call in (DEFAULT, DEFAULT | {"more": more}))
        clearhead.attention_varlen(*right, SHARED, SHARED)
        with pytest.raises(ClearheadError, match=f"^{name}: expected a last boundary of {7 + (more[0] or more[1])}"):
            clearhead.attention_varlen(*wrong, SHARED, SHARED)


def test_boundaries_that_are_written_to_between_calls() -> None:
    of_queries, of_keys = bounds(3, 4), bounds(3, 4)
    for change in ((3, 4), (5, 2), (0, 7), (7, 0)):
        of_queries[1] = change[0]
        for keys in (of_queries, of_keys):
            call = DEFAULT | {"q_bounds": of_queries, "k_bounds": keys}
            require(outcome(call, None), call)


# Jagged inputs: their offsets are boundaries, which several tensors can share.


def jagged(rows: Sequence[int], features: int, seed: int = 0, offsets: Tensor | None = None) -> Tensor:
    values = torch.randn(sum(rows), features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nested.nested_tensor_from_jagged(values, bounds(*rows) if offsets is None else offsets)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(2, 0)], ids=["none", "causal", "window"])
@pytest.mark.parametrize("share", [True, False])
def test_jagged_inputs_in_turn(mask: Any, share: bool) -> None:
    module = randomised(clearhead.MultiHeadAttention(12, 4, kdim=8, vdim=6, num_kv_heads=2, dtype=torch.float64), 0.5)
    offsets = SHARED if share else None
    for queries, keys in (((3, 4), (3, 4)), ((3, 4), (7, 4)), ((3, 4), (4, 3)), ((5, 2), (3, 4)), ((3, 4), (3, 4))):
        of_queries = offsets if queries == (3, 4) else None
        of_keys = offsets if keys == (3, 4) else None
        inputs = jagged(queries, 12, 1, of_queries), jagged(keys, 8, 2, of_keys), jagged(keys, 6, 3, of_keys)
        found = module(*inputs, mask=mask).unbind()
        for n, output in enumerate(found):
            alone = module(*(x.unbind()[n][None] for x in inputs), mask=mask)
            require_near(output, alone[0])


@pytest.mark.parametrize(("keys", "values"), [((3, 4), (7, 4)), ((7, 4), (3, 4)), ((3, 4), (3, 5)), ((3, 4), (2, 4))])
def test_jagged_values_of_other_lengths_than_the_keys(keys: tuple[int, ...], values: tuple[int, ...]) -> None:
    module = clearhead.MultiHeadAttention(12, 4, dtype=torch.float64)
    query = jagged((3, 4), 12)
    module(query, jagged(keys, 12), jagged(keys, 12))
    with pytest.raises(ClearheadError, match=r"^value: expected the key's lengths"):
        module(query, jagged(keys, 12), jagged(values, 12))
