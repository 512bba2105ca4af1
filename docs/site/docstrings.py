"""Makes docstrings Markdown, as mkdocstrings reads them.

Examples become code blocks, the ``::`` before an indented block goes, and arguments that are described together get a
row each.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

#: A section of arguments, and one entry of it that describes several: ``query, key: their vectors``.
ARGUMENTS = re.compile(r"^( *)Args:\n(?:\1 +.*\n?|\n)+", re.MULTILINE)
GROUP = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+)(:.*(?:\n\1 +.*)*)$", re.MULTILINE)


def _one_by_one(group: re.Match[str]) -> str:
    indent, names, description = group.groups()
    return "\n".join(f"{indent}{name}{description}" for name in names.split(", "))


def as_markdown(text: str) -> str:
    """The text of a docstring in the form that mkdocstrings reads."""
    text = ARGUMENTS.sub(lambda found: GROUP.sub(_one_by_one, found[0]), text)
    text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    text = re.sub(r"^ *::\n\n", "", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def constructor(named_tuple: griffe.Class) -> griffe.Function:
    """The constructor that a `NamedTuple` gets from its fields."""
    parameter, keyword = griffe.Parameter, griffe.ParameterKind.positional_or_keyword
    fields = [
        parameter(each.name, annotation=each.annotation, kind=keyword, default=each.value)
        for each in named_tuple.attributes.values()
    ]
    return griffe.Function("__init__", parameters=griffe.Parameters(parameter("self", kind=keyword), *fields))


class Docstrings(griffe.Extension):
    """Rewrites the docstring of every object before it is read, and gives named tuples their signature."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Add the constructor of a named tuple, and drop one that nobody calls: ``__init__(*_)``."""
        own = cls.members.get("__init__")
        if isinstance(own, griffe.Function) and any(each.name == "_" for each in own.parameters):
            cls.del_member("__init__")
        if any(str(base) == "NamedTuple" for base in cls.bases):
            cls.set_member("__init__", constructor(cls))

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
