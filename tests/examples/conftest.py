"""The programs in examples/ find their own modules here, as they do when they are run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))


def example(name: str) -> Any:
    """A module of examples/."""
    return importlib.import_module(name)
