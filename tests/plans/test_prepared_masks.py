"""One prepared mask in two calls that differ in one thing, in both orders: right, or refused as in a first call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import clearhead
from clearhead import masks
from clearhead.errors import ClearheadError, KernelError
from clearhead.masks import Mask, PreparedMask
from clearhead.positions import ALiBi
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.exact import exact_attention
from tests.support.forgetting import GRID_FIELDS, forget

L, S, D = 5, 7, 11
Setting = dict[str, Any]
_DEFAULT: Setting = {
    "B": 2, "H": 6, "Hkv": 3, "L": L, "S": S, "dtype": torch.float32, "learns": True, "kernel": None,
    "query_positions": None, "key_positions": None, "device": "cpu", "softcap": None, "seed": 1,
}  # fmt: skip
_BIAS = torch.linspace(-3, 3, L * S).cos().reshape(L, S)
_MARKS = torch.arange(L * S).reshape(L, S) % 3 > 0
_MARKS[2] = False
_PER_HEAD = torch.arange(2 * 6 * L * S).reshape(2, 6, L, S) % 7 > 2
MASKS: dict[str, Callable[[], Mask]] = {
    "causal": masks.causal,
    "window": lambda: masks.sliding_window(2, 1),
    "marks": lambda: masks.keep(_MARKS),
    "keys": lambda: masks.keep(keys=torch.tensor([[True, False, True, True, True, False, False]])),
    "bias": lambda: masks.bias(_BIAS) & masks.causal(),
    "computed": lambda: masks.mask_mod(lambda b, h, q, k: (q + k) % 3 > 0),
    "lengths": lambda: masks.lengths(torch.tensor([7, 0])),
    "query lengths": lambda: masks.causal() & masks.lengths(torch.tensor([7, 4]), torch.tensor([5, 2])),
    "per head": lambda: masks.keep(_PER_HEAD),
    "two biases": lambda: masks.bias((_BIAS * 16).round() / 16) & ALiBi(6),  # whose sums are exact
    "bias per head": lambda: masks.bias((_BIAS * torch.arange(1, 7)[:, None, None])[None]),
    "computed per head": lambda: masks.mask_mod(lambda b, h, q, k: (q + k + h) % 3 != b),
    "blocks": lambda: masks.block_causal(3),
    "tree": lambda: masks.tree(torch.tensor([-1, 0, 0, 1])),
    "or": lambda: masks.causal() | masks.prefix(torch.tensor([1, 3])),
    "not": lambda: ~masks.sliding_window(1, 1),
}
#: For each field of a grid, and of what holds a prepared mask, the settings of calls that change it alone.
FIELDS: dict[str, list[Setting]] = {
    "batch_size": [{"B": size} for size in (1, 2, 3)],
    "num_heads": [{"H": size} for size in (3, 6, 12)],
    "query_length": [{"L": size} for size in (L, 4, 6)],
    "key_length": [{"S": size} for size in (S, 6, 8)],
    "device": [{"device": device} for device in ("cpu", "meta")],
    "query_positions": [{"query_positions": places} for places in (None, 0, 2, torch.arange(L), torch.arange(L) + 1)],
    "key_positions": [{"key_positions": places} for places in (None, 0, 1, torch.arange(S), torch.arange(S) + 2)],
    "dtype": [{"dtype": dtype} for dtype in (torch.float32, torch.float64)],
    "group": [{"Hkv": size} for size in (1, 3, 6)],
    "gradients": [{"learns": learns} for learns in (False, True)],
    "kernel": [{"kernel": name} for name in (None, "native", "sdpa", "chunked", "reference")],
    "softcap": [{"softcap": softcap} for softcap in (None, 2.0)],
    "values": [{"seed": seed} for seed in (2, 3)],
}
REFUSED = "refused"


def test_every_field_of_a_grid_has_a_case() -> None:
    assert {*GRID_FIELDS} <= {*FIELDS}


def outcome(fixed: Mask, setting: Setting) -> Any:
    """Output and gradients, or that the mask or the kernel refuses the call."""
    s = {**_DEFAULT, **setting}
    leaves = _drawn(s)
    try:
        with torch.enable_grad() if s["kernel"] is None else clearhead.use_kernel(s["kernel"]):
            output = clearhead.attention(
                *leaves, fixed, softcap=s["softcap"],
                query_positions=s["query_positions"], key_positions=s["key_positions"],
            )  # fmt: skip
    except (ClearheadError, KernelError):
        return REFUSED
    if s["device"] == "meta":
        return [output]
    return [output, *(torch.autograd.grad(output.square().sum(), leaves) if s["learns"] else ())]


def _drawn(s: Setting) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(s["seed"])
    sizes = ((s["H"], s["L"]), (s["Hkv"], s["S"]), (s["Hkv"], s["S"]))
    drawn = [torch.randn(s["B"], *size, D, generator=random, dtype=torch.float64) for size in sizes]
    return [x.to(s["device"], s["dtype"]).requires_grad_(s["learns"]) for x in drawn]


def expected(mask: Mask, setting: Setting) -> list[torch.Tensor]:
    s = {**_DEFAULT, **setting}
    places = {"query_positions": s["query_positions"], "key_positions": s["key_positions"]}
    shown = mask.dense(s["L"], s["S"], batch_size=s["B"], num_heads=s["H"], **places)
    visible, bias = (shown, None) if shown.dtype == torch.bool else (None, shown)
    leaves = [x.detach().double().requires_grad_(s["learns"]) for x in _drawn(s)]
    output = exact_attention(*leaves, visible, bias=bias, softcap=s["softcap"]).output
    return [output, *(torch.autograd.grad(output.square().sum(), leaves) if s["learns"] else ())]


#: Kernels that hold what they make of a mask by more than its grid.
_OF_KERNELS = ("batch_size", "num_heads", "dtype", "group")


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("field", FIELDS)
def test_calls_that_differ_in_one_field(field: str, name: str) -> None:
    _require_each_in_turn(name, FIELDS[field])


@in_turn({"field": _OF_KERNELS, "name": MASKS}, {"kernel": ("sdpa", "chunked")})
def test_calls_of_one_kernel_that_differ_in_one_field(field: str, name: str, kernel: str) -> None:
    _require_each_in_turn(name, [{"kernel": kernel, **item} for item in FIELDS[field]])


def _require_each_in_turn(name: str, alternatives: list[Setting]) -> None:
    calls = [(item, functools.cache(functools.partial(expected, MASKS[name](), item))) for item in alternatives]
    for first, second in zip(calls, [*calls[1:], calls[0]], strict=True):
        for order in ((first, second), (second, first)):
            # Prepared for the first of the two, so that the second has to fit or to be refused.
            fixed = prepared(name, order[0][0])
            alone = [outcome(prepared(name, order[0][0]), setting) for setting, _ in order]
            forget()
            for number in (0, 1, 0, 1):
                setting, exact = order[number]
                _require(outcome(fixed, setting), alone[number], setting, exact)


def prepared(name: str, setting: Setting) -> PreparedMask:
    s = {**_DEFAULT, **setting}
    places = {"query_positions": s["query_positions"], "key_positions": s["key_positions"]}
    # Marks and biases have sizes of their own, and fit no other call.
    sizes = (s["L"], s["S"]) if name in ("causal", "window", "computed", "computed per head") else (L, S)
    counts = {"batch_size": s["B"], "num_heads": s["H"]} if name == "computed per head" else {}
    result = MASKS[name]().prepare(*sizes, **counts, **places)
    assert isinstance(result, PreparedMask)
    return result


def _require(found: Any, alone: Any, setting: Setting, exact: Callable[[], list[torch.Tensor]]) -> None:
    if found is REFUSED or alone is REFUSED:
        assert found is alone, setting
        return
    if found[0].is_meta:
        assert found[0].shape == alone[0].shape
        return
    require_near(found, exact())


@pytest.mark.parametrize("name", MASKS)
def test_a_prepared_mask_after_refused_calls(name: str) -> None:
    fixed = prepared(name, {})
    before = repr(fixed)
    for wrong in ({"L": 4}, {"S": 8}, {"query_positions": 3}, {"kernel": "sdpa", "softcap": 2.0}):
        assert outcome(fixed, wrong) is REFUSED, wrong
        _require(outcome(fixed, {}), None, {}, functools.partial(expected, MASKS[name](), {}))
        assert repr(fixed) == before
    dense = MASKS[name]().dense(L, S, batch_size=2, num_heads=6)
    assert torch.equal(fixed.dense().expand_as(dense), dense)
