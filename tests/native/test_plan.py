"""What the compiled module refuses, and which instruction set it runs on."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import clearhead._native
from clearhead.errors import ArgumentError
from tests import conftest
from tests.support.native import NativeArguments, NativePlan, needs_native

pytestmark = needs_native


def plan_of_rows(x: torch.Tensor) -> NativePlan:
    return NativePlan(x.dtype, (x.shape,) * 3, (x.stride(),) * 3, scale=0.5)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match="rows, keys or heads are too many"):
        plan_of_rows(torch.zeros(1).expand(1, 1, 1 << 31, 1))
    x = torch.randn(2, 3, 5, 4)
    with pytest.raises(TypeError, match="unknown argument 'entorpy'"):
        plan_of_rows(x).statistics(NativeArguments(x, x, x), entorpy=torch.empty(2, 3, 5))


OF_OTHER_SOURCES = (
    "It was built from other sources: run python setup.py build_ext --inplace --force, or install Clearhead again."
)


def test_an_extension_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = SimpleNamespace(__name__="clearhead._native._attention", arguments="key, query")
    monkeypatch.setattr(clearhead._native, "extension", stale)
    text = f"arguments of clearhead._native._attention: expected query, key, got key, query. {OF_OTHER_SOURCES}"
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$"):
        clearhead._native.require_arguments("query", "key")


def test_it_is_refused_when_it_is_loaded() -> None:
    program = (
        "import sys, types; name = 'clearhead._native._attention'; sys.modules[name] = types.ModuleType(name);"
        "import clearhead"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: arguments of clearhead._native._attention: expected threads, query, key, " in found.stderr
    assert f", got none. {OF_OTHER_SOURCES}" in found.stderr


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
