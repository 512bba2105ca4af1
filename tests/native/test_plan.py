"""`_attention.Problem` takes its arguments by name, checks them once, and names what is wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import clearhead._native
from clearhead.errors import ArgumentError
from tests import conftest
from tests.support.native import OPERANDS, NativeArguments, NativePlan, extension, needs_native

pytestmark = needs_native

ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "batch": 2,
    "heads": 6,
    "kv_heads": 3,
    "rows": 5,
    "keys": 7,
    "dim": 11,
    "value_dim": 13,
    **dict.fromkeys(("query", "key", "value", "output"), (1, 1, 1)),
}


def make(**changes: Any) -> Any:
    given = {name: value for name, value in (ARGUMENTS | changes).items() if value is not ...}
    return extension.Problem(**given)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"batch": ...}, TypeError, "Problem: batch is missing"),
        ({"query": ...}, TypeError, "Problem: query is missing"),
        ({"rows": -1}, ValueError, "Problem: rows is too small"),
        ({"rows": 1 << 40}, ValueError, "Problem: rows, keys or heads are too many"),
        ({"keys": "7"}, TypeError, "Problem: keys is not a whole number"),
        ({"heads": 7}, ValueError, "Problem: heads is not a multiple of kv_heads"),
        ({"kv_heads": 0}, ValueError, "Problem: heads is not a multiple of kv_heads"),
        ({"dtype": "float64"}, ValueError, "Problem: dtype is not 'float32', 'bfloat16' or 'float16'"),
        ({"query": (1, 1)}, TypeError, "Problem: query is not a tuple with a stride for each of its dimensions"),
        ({"scale": "1"}, TypeError, "Problem: scale is not a number"),
        ({"dropout_threshold": 65537}, ValueError, "Problem: dropout_threshold is above 65536"),
        ({"sequences": 1}, ValueError, "Problem: sequences lie in a batch of 1"),
        ({"softcpa": 1.0}, TypeError, "Problem: unknown argument 'softcpa'"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(**changes)


def test_calls_give_what_the_plan_was_made_for() -> None:
    x = torch.randn(2, 3, 5, 4)
    plan = NativePlan(x.dtype, (x.shape,) * 3, (x.stride(),) * 3, scale=0.5)
    with pytest.raises(ValueError, match="the plan was made without visible"):
        plan.forward(NativeArguments(x, x, x, visible=torch.ones(1, 1, 1, 5, dtype=torch.bool)))
    with pytest.raises(TypeError, match="unknown argument 'entorpy'"):
        plan.statistics(NativeArguments(x, x, x), entorpy=torch.empty(2, 3, 5))


OF_OTHER_SOURCES = (
    "It was built from other sources: run python setup.py build_ext --inplace --force, or install Clearhead again."
)


def test_an_extension_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = SimpleNamespace(__name__="clearhead._native._attention", arguments={"operands": ("key", "query")})
    monkeypatch.setattr(clearhead._native, "extension", stale)
    text = f"operands of clearhead._native._attention: expected query, key, got key, query. {OF_OTHER_SOURCES}"
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$"):
        clearhead._native.require_arguments(operands=("query", "key"))


def test_it_is_refused_when_it_is_loaded() -> None:
    program = (
        "import sys, types; name = 'clearhead._native._attention'; sys.modules[name] = types.ModuleType(name);"
        "import clearhead"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    text = f"ImportError: operands of clearhead._native._attention: expected {', '.join(OPERANDS)}, got none. "
    assert text + OF_OTHER_SOURCES in found.stderr


def test_the_environment_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    read = clearhead._native._numbers.__wrapped__
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
    numbers = dict(clearhead._native._numbers())
    monkeypatch.setattr(clearhead._native, "_numbers", lambda: numbers)
    monkeypatch.setenv("CLEARHEAD_TEST_ISA", "generic")
    monkeypatch.delenv("CLEARHEAD_TEST_VENDOR", raising=False)
    conftest._emulate_machine()
    assert list(numbers) == ["generic"]
