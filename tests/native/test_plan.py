"""What the compiled module refuses, the instruction set it runs on, and the calls that share a plan."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import clearhead
import clearhead._native
from clearhead import masks
from clearhead.errors import ArgumentError
from tests import conftest
from tests.support.native import NativeArguments, best_first, extension, needs_native, plan_of
from tests.support.requests import Grid, bind

pytestmark = needs_native


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match="rows, keys or heads are too many"):
        plan_of(NativeArguments(*[torch.zeros(1).expand(1, 1, 1 << 31, 1)] * 3))
    arguments = NativeArguments(*[torch.randn(2, 3, 5, 4)] * 3)
    with pytest.raises(TypeError, match="unknown argument 'entorpy'"):
        plan_of(arguments).statistics(arguments, entorpy=torch.empty(2, 3, 5))


OF_OTHER_SOURCES = (
    "It was built from other sources: run python setup.py build_ext --inplace --force, or install Clearhead again."
)


DECLARED = ("arguments", "coverage_arguments", "types")  #: in Python and C++


@pytest.mark.parametrize("constant", DECLARED)
def test_an_extension_of_other_sources_is_refused(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = SimpleNamespace(__name__="clearhead._native._attention", **{constant: "key, query"})
    monkeypatch.setattr(clearhead._native, "extension", stale)
    declared = constant.replace("_", " ")
    text = f"{declared} of clearhead._native._attention: expected query, key, got key, query. {OF_OTHER_SOURCES}"
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$"):
        clearhead._native.require_declared(constant, "query", "key")


@pytest.mark.parametrize("constant", DECLARED)
def test_it_is_refused_when_it_is_loaded(constant: str) -> None:
    others = {name: getattr(extension, name) for name in DECLARED if name != constant}
    program = (
        f"import sys, types; stale = types.ModuleType('clearhead._native._attention'); vars(stale).update({others!r});"
        "sys.modules[stale.__name__] = stale; import clearhead"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    expected = f"expected {getattr(extension, constant)}, got none. {OF_OTHER_SOURCES}"
    assert f"ImportError: {constant.replace('_', ' ')} of clearhead._native._attention: {expected}" in run.stderr


def test_the_environment_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    read = clearhead._native.instruction_sets.__wrapped__
    monkeypatch.delenv("CLEARHEAD_ISA", raising=False)
    names = list(read())
    for name in names:
        monkeypatch.setenv("CLEARHEAD_ISA", name)
        assert list(read()) == [name, *(other for other in names if other != name)]
    monkeypatch.setenv("CLEARHEAD_ISA", "mmx")
    text = f"CLEARHEAD_ISA: expected an instruction set of this processor ({', '.join(names)}), got 'mmx'"
    with pytest.raises(ArgumentError, match=re.escape(text)):
        read()


def test_a_processor_with_fewer_instruction_sets_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``CLEARHEAD_TEST_ISA=generic pytest`` does."""
    numbers = dict(clearhead._native.instruction_sets())
    monkeypatch.setattr(clearhead._native, "instruction_sets", lambda: numbers)
    monkeypatch.setenv("CLEARHEAD_TEST_ISA", "generic")
    monkeypatch.delenv("CLEARHEAD_TEST_VENDOR", raising=False)
    conftest._emulate_machine()
    assert list(numbers) == ["generic"]


ALL = ["amx", "avx512_bf16", "avx512", "avx2", "generic"]


@pytest.mark.parametrize(
    ("names", "where_pairs_are_slow"),
    [
        (ALL, ["amx", "avx512", "avx512_bf16", "avx2", "generic"]),
        (ALL[1:], ["avx512", "avx512_bf16", "avx2", "generic"]),
        (ALL[2:], ALL[2:]),
        (ALL[:2], ALL[:2]),
        (["generic"], ["generic"]),
    ],
)
def test_pairs_of_bfloat16_come_first_unless_they_are_slow(names: list[str], where_pairs_are_slow: list[str]) -> None:
    assert best_first(names, pairs_are_slow=False) == names
    assert best_first(names, pairs_are_slow=True) == where_pairs_are_slow


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_one_query_row_stays_here_whether_heads_share_keys_or_not(kv_heads: int) -> None:
    query, key = torch.randn(1, 6, 1, 8), torch.randn(1, kv_heads, 31, 8)
    assert clearhead.explain(query, key, key).kernel == "native"
    with clearhead.use_kernel("native"):
        expected = clearhead.attention(query, key, key)
    assert torch.equal(clearhead.attention(query, key, key), expected)
    with clearhead.use_kernel("sdpa"):
        assert clearhead.explain(query, key, key).kernel == "sdpa"
        torch.testing.assert_close(clearhead.attention(query, key, key), expected)


IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2])
#: Two masks of one key, the first of which hides nothing.
ALIKE: dict[str, tuple[masks.Mask, masks.Mask]] = {
    "lengths": (masks.lengths(torch.tensor([7, 7])), masks.lengths(torch.tensor([7, 3]))),
    "query lengths": (
        masks.lengths(torch.tensor([7, 7]), torch.tensor([7, 7])),
        masks.lengths(torch.tensor([7, 3]), torch.tensor([2, 7])),
    ),
    "prefix": (masks.prefix(torch.tensor([7, 9])), masks.prefix(torch.tensor([0, 4]))),
    "keys": (masks.keep(keys=torch.ones(2, 7)), masks.keep(keys=torch.ones(2, 7).tril(3))),
    "keep": (masks.keep(torch.ones(7, 7)), masks.keep(torch.ones(7, 7).tril())),
    "bias": (masks.bias(torch.zeros(7, 7)), masks.bias(torch.randn(7, 7))),
    "documents": (masks.documents(torch.zeros_like(IDS)), masks.documents(IDS)),
}


@pytest.mark.parametrize("also", [None, masks.causal()], ids=["alone", "causal"])
@pytest.mark.parametrize("name", ALIKE)
def test_a_plan_keeps_nothing_of_a_mask_that_its_key_does_not_tell(name: str, also: masks.Mask | None) -> None:
    hides_nothing, hides = ((mask if also is None else mask & also) for mask in ALIKE[name])
    query, grid = torch.randn(2, 3, 7, 5), Grid(2, 3, 7, 7, torch.device("cpu"))
    assert bind(hides_nothing, grid).key(False) == bind(hides, grid).key(False)
    for mask in (hides_nothing, hides, hides_nothing):
        with clearhead.use_kernel("reference"):
            expected = clearhead.attention(*(query.double(),) * 3, mask)
        with clearhead.use_kernel("native"):
            output = clearhead.attention(query, query, query, mask)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", [{}, {"query_positions": 2}, {"query_positions": 2, "key_positions": 1}], ids=str)
def test_bands_in_turn(positions: dict[str, int]) -> None:
    """Rules are told apart by their settings, whatever plan came before."""
    rules = [masks.causal(), masks.causal("bottom_right"), masks.sliding_window(2, 1), masks.sliding_window(1, 2)]
    rules += [masks.prefix(2), masks.prefix(5), masks.causal() & masks.prefix(2), masks.causal() & masks.prefix(5)]
    query, key = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 7, 3)
    for rule in (*rules, *rules):
        with clearhead.use_kernel("reference"):
            expected = clearhead.attention(query.double(), key.double(), key.double(), rule, **positions)
        with clearhead.use_kernel("native"):
            output = clearhead.attention(query, key, key, rule, **positions)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
