"""The programs in examples/ as modules, found as a script of theirs finds them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(name="example")
def _example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module of examples/ by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module
