"""What is left for the slow tests of a product whose other cases run the same code."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["slow"]


def slow(*values: object) -> list[Any]:
    """Values of a parametrization that only ``pytest -m slow`` runs."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
