"""What `benchmarks.cpu` measures, one file per kind of work."""

from __future__ import annotations

from benchmarks.comparing import Case

from .attention import attention_cases
from .decoding import decoding_cases
from .inspecting import inspecting_cases
from .memory import memory_cases
from .modules import module_cases
from .text import text_cases

__all__ = ["all_cases"]


def all_cases() -> list[Case]:
    """Every line of the table, in its order."""
    return [
        *attention_cases(),
        *memory_cases(),
        *module_cases(),
        *decoding_cases(),
        *inspecting_cases(),
        *text_cases(),
    ]
