"""Names of modules in their models, for errors that are raised in them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

# Not on the modules: a copy of a module, or one that is loaded, has another place.
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def remember_names(model: nn.Module) -> None:
    """Remember the full name of each module of a model. A module that is used in several places has several names."""
    names_of: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names_of.setdefault(module, []).append(name)
    for module, names in names_of.items():
        remember_name(module, " or ".join(names))


def remember_name(module: nn.Module, name: str) -> None:
    """Remember a module's full name; ``""`` is the name of a whole model."""
    # The name in a larger model stays.
    if name and not f".{_names.get(module, '')}".endswith(f".{name}"):
        _names[module] = name


def add_module(error: BaseException, module: nn.Module) -> None:
    """Note on an error in which module it was raised: by its full name if that is known, by its class and sizes."""
    if not hasattr(error, "__notes__"):  # the innermost module has noted itself
        described = f"{type(module).__name__}({module.extra_repr()})"
        name = _names.get(module)
        error.add_note(f"In {described}." if name is None else f"In {name}: {described}.")
