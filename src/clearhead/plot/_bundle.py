"""The ES modules of a page as one script, in the order of their imports; a page has no room for requests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ArgumentError

IMPORT = re.compile(r'^import \{\s*(\w+(?:,\s*\w+)*),?\s*\} from "\./(\w+\.js)";\n', re.MULTILINE)
DECLARATION = re.compile(r"^(export )?(?:(?:async )?function (\w+)\(|(?:const|let) (\w+)(?: =|;))", re.MULTILINE)
#: What begins an import, an export or a declaration of a whole module, or loads a module while the page runs.
KEYWORD = re.compile(
    r"^ *(?:import|export)\b.*|^(?:async|function|const|let|var|class)\b.*|\bimport[(.].*", re.MULTILINE
)


@dataclass(frozen=True)
class Module:
    """One file.

    Args:
        imports: file → the names that are imported from it.
        declared: the names of the whole module, as often as they are declared.
        exported: those that other modules may import.
        code: what is left without imports and the keyword ``export``.
    """

    imports: dict[str, list[str]]
    declared: list[str]
    exported: set[str]
    code: str


def bundle(entry: str, read: Callable[[str], str]) -> str:
    r"""One script that declares and runs what a module and its imports do, each module after those it imports.

    The modules share one scope, so no two may declare one name. They are written in a few forms of the language only:
    ``import { a, b } from "./file.js";``, and ``export`` before a function, a ``const`` or a ``let`` of one name.

    Args:
        entry: the file to begin with.
        read: the text of a file.

    Raises:
        ArgumentError: for another form, a name that a file does not export, a name that is declared twice, and imports
            in a circle.

    Example:
        >>> files = {
        ...     "main.js": 'import { one } from "./numbers.js";\nalert(one);\n',
        ...     "numbers.js": "export const one = 1;\n",
        ... }
        >>> bundle("main.js", files.__getitem__)
        'const one = 1;\nalert(one);\n'
    """
    modules: dict[str, Module] = {}
    _load((entry,), read, modules)
    owners: dict[str, str] = {}
    for file, module in modules.items():
        for name, times in Counter(module.declared).items():
            if times > 1 or name in owners:
                expected = "names that no module of the page declares before"
                raise ArgumentError(file, expected=expected, got=f"{name}, which is in {owners.get(name, file)}")
            owners[name] = file
    return "".join(module.code for module in modules.values())


def _load(path: tuple[str, ...], read: Callable[[str], str], modules: dict[str, Module]) -> None:
    """Append the last file of a path of imports to the modules, after what it imports."""
    file = path[-1]
    if file in path[:-1]:
        circle = " → ".join(path[path.index(file) :])
        raise ArgumentError(
            path[-2], expected="imports without a circle", got=circle, fix="Move what both need to a module of its own."
        )
    if file in modules:
        return
    module = parsed(file, read(file))
    for source, names in module.imports.items():
        _load((*path, source), read, modules)
        if missing := [name for name in names if name not in modules[source].exported]:
            expected = f"imports of names that {source} exports"
            raise ArgumentError(file, expected=expected, got=", ".join(missing))
    modules[file] = module


def parsed(file: str, text: str) -> Module:
    """Read a file of a page; `file` is its name in errors."""
    imports: dict[str, list[str]] = {}
    for names, source in IMPORT.findall(text):
        imports.setdefault(source, []).extend(re.findall(r"\w+", names))
    code = IMPORT.sub("", text)
    declarations = list(DECLARATION.finditer(code))
    starts = {found.start() for found in declarations}
    for found in KEYWORD.finditer(code):
        if found.start() not in starts:
            expected = 'import { … } from "./file.js"; and (export) function, const or let of one name'
            raise ArgumentError(file, expected=expected, got=found[0].strip())
    declared = [found[2] or found[3] for found in declarations]
    exported = {name for name, found in zip(declared, declarations, strict=True) if found[1]}
    return Module(imports, declared, exported, re.sub(r"^export ", "", code, flags=re.MULTILINE))
