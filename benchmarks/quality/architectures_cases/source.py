"""Whether a model can call transformers' attention function at all, read from the source of its classes."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .types import Architecture, models_of

__all__ = ["calls_attention_function"]

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_MODELS = "transformers.models."


def calls_attention_function(architecture: Architecture) -> bool:
    """Whether the class of a model, one that it names or one of its parts by their configurations calls it."""
    try:
        pending: list[Any] = [architecture.model_class, *_parts(CONFIG_MAPPING[architecture.model_type]())]
    except Exception:  # without a default configuration, its parts are unknown
        return True
    seen: set[Any] = set()
    while pending:
        item = pending.pop()
        if item in seen:
            continue
        seen.add(item)
        names = _names(item.__module__).get(item.__name__, frozenset())
        if _INTERFACE in names:
            return True
        pending += _defined(sys.modules[item.__module__], names)
    return False


def _defined(module: Any, names: Iterable[str]) -> list[Any]:
    """The classes and functions of models that these names stand for."""
    values = [getattr(module, name, None) for name in names]
    return [v for v in values if (inspect.isclass(v) or inspect.isfunction(v)) and v.__module__.startswith(_MODELS)]


@cache
def _names(module: str) -> dict[str, frozenset[str]]:
    """By class and function of a Python module: the names that its source has."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    return {
        statement.name: frozenset(node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
        for statement in tree.body
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef))
    }


def _parts(config: PreTrainedConfig) -> list[type]:
    """The models of the configurations inside a configuration, which are built by their type."""
    pending, found = [config], []
    while pending:
        parts = [value for value in vars(pending.pop()).values() if isinstance(value, PreTrainedConfig)]
        pending += parts
        found += [model for part in parts for model in models_of(type(part))]
    return found
