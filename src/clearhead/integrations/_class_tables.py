"""Models of transformers that look up the class of their attention in a table, by the name of the implementation.

The classes of such a table have code of their own, and no name of ours is in it. Loading with ``"clearhead"`` gets the
class for ``"eager"``, which reads our mask as its own.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def class_tables(module: str) -> list[dict[str, type[nn.Module]]]:
    """The tables from names of implementations to classes that a Python module has."""
    values = list(vars(sys.modules[module]).values())
    return [value for value in values if isinstance(value, dict) and _is_class(value.get("eager"))]


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def accept_in_tables(name: str) -> None:
    """Let models be built with this name although their tables of classes do not have it.

    transformers checks the name of an implementation for each model that it builds, before the layers look it up.
    """
    check: Any = PreTrainedModel.get_correct_attn_implementation
    if getattr(check, "accepts_in_tables", False):
        return

    @wraps(check)
    def checked(self: PreTrainedModel, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention == name:
            for table in class_tables(type(self).__module__):
                table.setdefault(name, table["eager"])
        return check(self, requested_attention, *args, **options)

    setattr(checked, "accepts_in_tables", True)  # noqa: B010
    PreTrainedModel.get_correct_attn_implementation = checked


def kept_classes(model: nn.Module) -> dict[str, str]:
    """The first module of each class from such a table, with the reason why it keeps its attention."""
    found: dict[type, list[str]] = {}
    for name, part in model.named_modules():
        kind = type(part)
        if kind.__module__ in sys.modules and any(kind in table.values() for table in class_tables(kind.__module__)):
            found.setdefault(kind, []).append(name)
    return {
        names[0]: f"{kind.__name__}, of {len(names)} module(s), is from a table of classes and has code of its own"
        for kind, names in found.items()
    }
