"""Two calls that differ in one thing, in both orders: each gives what it gives alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.comparing import require_close, require_half_as_good
from tests.support.forgetting import SPEC_FIELDS, forget
from tests.support.request_masks import MASKS
from tests.support.requests import LEAVES, REFUSED, Request, exact, fit, run

Changes = dict[str, Any]
KERNELS = (None, "native", "sdpa", "chunked", "reference")
SEEDED = ("native", "chunked", "reference")

_LAYOUTS = ("contiguous", "heads inside", "features first", "every other row", "expanded")
_OPERANDS = frozenset(LEAVES[:3])
_PACKED = (((3, 4), (0, 2), (4, 5)), ((3, 4), (4, 7)), ((7, 11),), ((2, 0), (5, 11)), ((0, 3), (7, 8)))

#: For each field of a spec the settings that are changed, alone, from one call to the next; and for "values", what no
#: field of a spec holds.
FIELDS: dict[str, list[Changes]] = {
    "query": [
        *({"layouts": (layout, "contiguous", "contiguous")} for layout in _LAYOUTS),
        *({"length": length} for length in (1, 2, 13)),
        *({"batch": batch} for batch in (1, 3)),
        {"heads": 3},
        {"heads": 12},
    ],
    "key": [
        *({"layouts": ("contiguous", layout, "contiguous")} for layout in _LAYOUTS),
        *({"keys": keys} for keys in (1, 6, 17)),
        *({"kv_heads": heads} for heads in (1, 6)),
        *({"dim": dim, "value_dim": 11} for dim in (3, 13)),
    ],
    "value": [
        *({"layouts": ("contiguous", "contiguous", layout)} for layout in _LAYOUTS),
        *({"value_dim": dim} for dim in (3, 13)),
    ],
    "dtype": [{"dtype": dtype} for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)],
    "negative": [{"layouts": (layout,) * 3} for layout in ("imaginary", "negated")],
    "mask": [{"mask": name} for name in MASKS],
    "masked": [{"mask": None}, {"mask": "causal"}, {"mask": "computed"}, {"mask": "drop"}],
    "query_positions": [{"query_positions": places} for places in (None, 0, 2, 5, "(L,)", "(B, L)")],
    "key_positions": [{"key_positions": places} for places in (None, 0, 1, 3, "(L,)", "(B, L)")],
    "scale": [{"scale": scale} for scale in (None, 0.3, 1.0, -0.5)],
    "softcap": [{"softcap": softcap} for softcap in (None, 0.7, 3.0)],
    "sinks": [{"sinks": sinks} for sinks in (False, True)],
    "dropout_p": [{"dropout_p": p} for p in (0.0, 0.3, 0.6, 1.0)],
    "gradients": [
        {"learns": frozenset()},
        {"learns": frozenset(["query"])},
        {"learns": frozenset(["key", "value"])},
        {"learns": frozenset(LEAVES)},
        {"learns": frozenset(["bias", "sinks"])},
        {"learns": _OPERANDS, "around": "no_grad"},
    ],
    "lse": [{"lse": lse} for lse in (False, True)],
    "weights": [{"weights": weights} for weights in ("heads", "average")],
    "documents": [{"packed": packed} for packed in _PACKED],
    "transformed": [{"around": around} for around in ("nothing", "vmap")],
    "dispatching": [{"around": around} for around in ("nothing", "dispatch mode")],
    "tracing": [{"around": around} for around in ("nothing", "trace")],
    "subclass": [{"around": around} for around in ("nothing", "subclass")],
    "values": [
        *({"seed": seed} for seed in (2, 3)),
        *({"mask_seed": seed} for seed in (2, 3, 4)),
        *({"loss": loss} for loss in ("output", "lse")),
        *({"poison": poison} for poison in (False, True)),
    ],
}
#: Fields whose pairs of calls are made elsewhere in this folder.
ELSEWHERE = {"device": "test_devices", "in_larger": "test_places"}


def test_every_field_of_a_spec_has_a_case() -> None:
    assert {*FIELDS, *ELSEWHERE} - {"values"} == set(SPEC_FIELDS)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Any call, most settings being the default."""

    def seldom(*values: Any) -> Any:
        return draw(st.sampled_from([*values[:1] * 3, *values]))

    learns = draw(st.sampled_from([frozenset(LEAVES), frozenset(LEAVES), _OPERANDS, frozenset()]))
    return Request(
        heads=seldom(6, 3, 12),
        kv_heads=3,
        keys=seldom(7, 6, 11),
        dtype=seldom(torch.float32, torch.float64, torch.bfloat16),
        layouts=(seldom(*_LAYOUTS), seldom(*_LAYOUTS), seldom(*_LAYOUTS)),
        mask=draw(st.sampled_from([None, None, "causal", "causal", "keys", *MASKS])),
        poison=draw(st.booleans()),
        query_positions=seldom(None, None, 2, "(B, L)"),
        key_positions=seldom(None, None, 1, "(L,)"),
        scale=seldom(None, 0.3),
        softcap=seldom(None, 2.0),
        sinks=draw(st.booleans()),
        dropout_p=seldom(0.0, 0.0, 0.3),
        learns=learns,
        lse=draw(st.booleans()),
        weights=seldom(None, None, None, "heads"),
        packed=seldom(None, None, None, _PACKED[0]),
        loss=seldom("all", "output", "lse"),
    )


def _pair(base: Request, first: Changes, second: Changes) -> tuple[Request, Request]:
    """Two requests that differ in these settings alone."""
    both = {**first, **second}
    if both.get("kv_heads") == 6 or both.get("heads") == 3:
        base = fit(Request(**{**_settings(base), "kv_heads": 3, "heads": 6}))
    if {"batch", "length", "keys", "weights", "query_positions", "key_positions"} & both.keys():
        base = Request(**{**_settings(base), "packed": None})
    if {"layouts", "value_dim", "dim", "dropout_p", "lse", "around", "packed"} & both.keys():
        base = Request(**{**_settings(base), "weights": None})
    if "around" in both:
        base = Request(**{**_settings(base), "dropout_p": 0.0, "packed": None, "poison": False})
    if both.get("around") == "vmap":
        base = Request(**{**_settings(base), "mask": base.mask if base.mask in (None, "causal", "window") else None})
    one, other = (fit(Request(**{**_settings(base), **changes})) for changes in (first, second))
    return one, other


def _settings(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in Request.__dataclass_fields__}


#: Calls that each take another path, of which one setting is changed.
BASES: dict[str, Request] = {
    "bare": Request(),
    "causal": Request(mask="causal", learns=frozenset(LEAVES)),
    "double": Request(dtype=torch.float64, learns=_OPERANDS),
    "bare, double": Request(dtype=torch.float64),
    "everything": Request(
        dtype=torch.float64, mask="causal and keys", poison=True, softcap=2.0, sinks=True, lse=True, learns=_OPERANDS
    ),
    "bias": Request(mask="window and bias", learns=frozenset(LEAVES), lse=True),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("field", FIELDS)
def test_calls_that_differ_in_one_field(field: str, base: str) -> None:
    alternatives = FIELDS[field]
    following = [*alternatives[1:], alternatives[0]] if len(alternatives) > 2 else alternatives[1:]
    for number, (first, second) in enumerate(zip(alternatives, following, strict=False)):
        pair = _pair(BASES[base], first, second)
        kernels = SEEDED if _drops(*pair) else KERNELS
        # Of many pairs each is computed by another kernel with every base.
        several = len(alternatives) > 2
        place = number + [*BASES].index(base)
        for kernel in (kernels[place % len(kernels)],) if several else kernels:
            require_right_in_turn(pair, kernel)


@pytest.mark.parametrize("field", FIELDS)
@settings(max_examples=settings.default.max_examples // 10)  # type: ignore[union-attr]
@given(data=st.data())
def test_any_calls_that_differ_in_one_field(field: str, data: st.DataObject) -> None:
    base = data.draw(requests())
    first, second = data.draw(st.permutations(FIELDS[field]))[:2]
    pair = _pair(base, first, second)
    require_right_in_turn(pair, data.draw(st.sampled_from(SEEDED if _drops(*pair) else KERNELS)))


@pytest.mark.parametrize("learns", [frozenset(), _OPERANDS], ids=["eval", "training"])
@pytest.mark.parametrize("order", [(None, "sdpa"), ("sdpa", None)], ids=str)
@pytest.mark.parametrize(
    "extras", [{"softcap": 2.0}, {"sinks": True}, {"lse": True}, {"dtype": torch.bfloat16}], ids=str
)
def test_a_kernel_that_is_forced_for_one_of_two_calls(learns: Any, order: Any, extras: Changes) -> None:
    """The one that refuses does so before and after the one that is chosen has computed the call."""
    request = Request(learns=learns, **extras)
    forget()
    for kernel in (*order, *order):
        found = run(request, kernel)
        assert (found is REFUSED) == (kernel == "sdpa")
        if not isinstance(found, str):
            _require_right(request, found, exact(request))


def _drops(*pair: Request) -> bool:
    """Whether some weights are dropped, which PyTorch's kernel draws otherwise than ours."""
    return any(request.dropout_p not in (0.0, 1.0) for request in pair)


def require_right_in_turn(pair: tuple[Request, Request], kernel: str | None) -> None:
    """Each is right in both orders, twice in a row, and refused exactly where it is refused alone."""
    forget()
    alone = [_alone(request, kernel) for request in pair]
    for order in ((0, 1), (1, 0)):
        forget()
        for number in (*order, *order):
            found, expected = run(pair[number], kernel), alone[number]
            if isinstance(found, str) or isinstance(expected, str):
                assert found is expected is REFUSED, f"{found} and alone {expected}: {pair[number]}"
            else:
                _require_right(pair[number], found, expected)
    forget()


def _alone(request: Request, kernel: str | None) -> dict[str, torch.Tensor] | str:
    forget()
    found = run(request, kernel)
    forget()
    return found if isinstance(found, str) else exact(request)


def _require_right(request: Request, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    if request.dtype in (torch.float32, torch.float64):
        return require_close(found, expected)
    # Not `forget`: what the pair has left is what is tested.
    reference = run(request, "reference")
    assert not isinstance(reference, str)
    return require_half_as_good(found, reference, expected, request.dtype)


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0, "sinks": True, "scale": 0.3}], ids=["plain", "extras"])
def test_reference_in_float64_is_the_formula(mask: str | None, extras: Changes) -> None:
    learns: Any = frozenset(LEAVES)
    for weights in (None, "heads"):
        request = fit(Request(dtype=torch.float64, mask=mask, learns=learns, lse=True, weights=weights, **extras))
        found = run(request, "reference")
        assert not isinstance(found, str)
        require_close(found, exact(request))


def test_the_pairs_differ() -> None:
    """Every field has a pair of which the results differ, so that one could be taken for the other."""
    for field, alternatives in FIELDS.items():
        base = Request(mask="causal and keys", learns=frozenset(LEAVES), lse=True, keys=6, poison=True)
        base = base if field != "mask" else Request(keys=6)
        found = []
        for changes in alternatives:
            request = _pair(base, changes, changes)[0]
            found.append(run(request))
        pairs = itertools.combinations(found, 2)
        assert field in _SAME_NUMBERS or any(not _same(*pair) for pair in pairs), field


#: What surrounds a call, and strides, change no number.
_SAME_NUMBERS = {"transformed", "dispatching", "tracing", "subclass", "negative"}


def _same(one: Any, other: Any) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        one[name].shape == other[name].shape and one[name].dtype == other[name].dtype
        and torch.equal(one[name], other[name]) for name in one
    )  # fmt: skip
