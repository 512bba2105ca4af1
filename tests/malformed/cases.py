"""Valid calls of all that is public."""

from __future__ import annotations

from tests.malformed import (
    cases_attention,
    cases_caches,
    cases_checkpoints,
    cases_inspection,
    cases_masks,
    cases_modules,
    cases_plot,
)

__all__ = [
    "cases_attention",
    "cases_caches",
    "cases_checkpoints",
    "cases_inspection",
    "cases_masks",
    "cases_modules",
    "cases_plot",
]
