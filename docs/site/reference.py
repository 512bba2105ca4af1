"""Writes the pages of the reference: one for each public module, every public name by mkdocstrings.

The names are read from ``__all__`` in the sources, so that the build needs neither Clearhead nor PyTorch.
"""

from __future__ import annotations

import ast
from pathlib import Path

from .staging import ROOT

SOURCES = ROOT / "src"
#: Names of `clearhead` that stand first on its page; the others follow in the order of ``__all__``.
FIRST = ("MultiHeadAttention", "attention", "upgrade", "record", "activate")
#: Methods that other parts of Clearhead call, and nobody else.
INTERNAL = (
    "start_inside|wanted|attended|kept_call|report_unseen|sides|name_of|with_totals|with_heads|like|counted|is_part"
    "|computed|head_sums|head_numbers|before|has_no_sizes|bias_tensors|with_bias_tensors|add_bias_gradients|sizes"
    "|structure|signature|parts|after|tensors|validate|of_grid|read_coverage|inner_block|require_weights|pair|extra_repr"
)
#: Modules whose names have pages, in the order of the reference.
MODULES = (
    "clearhead",
    "clearhead.masks",
    "clearhead.positions",
    "clearhead.backend",
    "clearhead.caches",
    "clearhead.transformer",
    "clearhead.nn",
    "clearhead.nn.functional",
    "clearhead.plot",
    "clearhead.checkpoints",
    "clearhead.integrations.transformers",
    "clearhead.distributed",
    "clearhead.kernels",
    "clearhead.errors",
)


def file_of(module: str) -> Path:
    """The source file of a module."""
    path = SOURCES / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public_names(module: str) -> list[str]:
    """The names of ``__all__``, modules and ``__version__`` left out."""
    tree = ast.parse(file_of(module).read_text(encoding="utf-8"))
    (listed,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    folder = file_of(module).parent
    modules = {name for name in listed if (folder / name).is_dir() or (folder / f"{name}.py").is_file()}
    names = [name for name in listed if name not in modules and name != "__version__"]
    first = [name for name in FIRST if module == "clearhead" and name in names]
    return [*first, *(name for name in names if name not in first)]


def place_of(module: str) -> str:
    """The page of a module."""
    return f"api/{module.removeprefix('clearhead.').replace('.', '-')}.md"


def page_of(module: str) -> str:
    """The page of one module: its docstring, then every name."""
    summary = (ast.get_docstring(ast.parse(file_of(module).read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    parts = [f"# {module}", summary.replace("``", "`")]
    parts += [f"::: {module}.{name}" for name in public_names(module)]
    return "\n\n".join(parts) + "\n"


def write_reference(folder: Path) -> list[tuple[str, str]]:
    """Write every page of the reference into `folder`; returns titles and places for the navigation."""
    listed = [(module, place_of(module)) for module in MODULES]
    for module, place in listed:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(page_of(module), encoding="utf-8")
    rows = "\n".join(
        f"| [`{module}`]({Path(place).name}) | "
        + " ".join(f"[`{name}`]({Path(place).name}#{module}.{name})" for name in public_names(module))
        + " |"
        for module, place in listed
    )
    start = "# Every public name\n\nA name with an underscore anywhere in its path is private."
    text = f"{start}\n\n| module | names |\n|---|---|\n{rows}\n"
    (folder / "api/index.md").write_text(text, encoding="utf-8")
    return [("Every public name", "api/index.md"), *listed]
