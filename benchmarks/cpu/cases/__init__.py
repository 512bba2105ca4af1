"""What `benchmarks.cpu` measures, one file per kind of work."""

from __future__ import annotations

from benchmarks.command import Effort
from benchmarks.comparing import Case

from .attention import attention_cases
from .decoding import decoding_cases
from .inspecting import inspecting_cases
from .memory import memory_cases
from .modules import module_cases
from .text import text_cases
from .tiny import tiny_cases

__all__ = ["all_cases"]


def all_cases(effort: Effort) -> list[Case]:
    """Every line of the table, in its order."""
    return [
        *attention_cases(effort),
        *memory_cases(effort),
        *module_cases(effort),
        *tiny_cases(effort),
        *decoding_cases(effort),
        *inspecting_cases(effort),
        *text_cases(effort),
    ]
