"""What the code of transformers' models passes to the attention function, read from its source."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache

from torch import nn

#: How models of transformers find the attention function.
_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"


def attention_keywords(model: nn.Module) -> dict[type, frozenset[str]]:
    """The classes of a model's modules that call the attention function, with the keywords that they spell out."""
    found: dict[type, frozenset[str]] = {}
    for kind in {type(module) for module in model.modules()}:
        calls = [keywords for base in kind.__mro__ if (keywords := _of_class(base)) is not None]
        if calls:
            found[kind] = frozenset[str]().union(*calls)
    return found


def calls_attention(kind: type) -> bool:
    """Whether the source of a class calls the attention function."""
    return _of_class(kind) is not None


def _of_class(kind: type) -> frozenset[str] | None:
    """The keywords of the calls in the source of one class; ``None`` if it makes no call."""
    calls = _of_module(kind.__module__)
    return calls.get(kind.__name__, calls.get(""))


@lru_cache(256)
def _of_module(name: str) -> dict[str, frozenset[str]]:
    """The keywords of the calls in each class of a Python module; ``""`` stands for calls outside of classes."""
    try:
        source = inspect.getsource(sys.modules[name])
    except (KeyError, OSError, TypeError):
        return {}
    if _FUNCTIONS not in source:
        return {}
    parts: dict[str, list[ast.stmt]] = {}
    for statement in ast.parse(source).body:
        where = statement.name if isinstance(statement, ast.ClassDef) else ""
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            parts.setdefault(where, []).append(statement)
    calls = {where: [*_calls(statements)] for where, statements in parts.items()}
    return {
        where: frozenset(keyword.arg for call in found for keyword in call.keywords if keyword.arg is not None)
        for where, found in calls.items()
        if found
    }


def _calls(statements: Iterable[ast.stmt]) -> Iterator[ast.Call]:
    """The calls of the attention function, by the name that it was assigned to."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and _reads_functions(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Call):
            function = node.func
            by_name = isinstance(function, ast.Name) and function.id in names
            if by_name or (isinstance(function, ast.Subscript) and _reads_functions(function)):
                yield node


def _reads_functions(expression: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == _FUNCTIONS for node in ast.walk(expression))
