"""Whether modules are as they were when their parameters were read: no hooks, adapters, or other code since then."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from .._native import extension
from .._torch_private import any_compiled

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Modules whose attributes do not matter besides their parameters.
_WITHOUT_SETTINGS = (nn.Linear, nn.Dropout, nn.Identity, nn.ModuleList)
_training: Callable[[dict[str, Any]], bool] = operator.itemgetter("training")
_children: Callable[[dict[str, Any]], dict[str, Any]] = operator.itemgetter("_modules")
_parameters: Callable[[dict[str, Any]], dict[str, Any]] = operator.itemgetter("_parameters")


class Unchanged:
    """A picture of modules, compared with them before every call. It costs about a quarter of a microsecond a module.

    Args:
        modules: all modules whose code is not run.
        children: of the encoder that holds them.
        config: of the encoder, as a dictionary.
        allows: whether a hook may stay, because it does nothing now.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        children: dict[str, Any],
        config: dict[str, Any],
        allows: Callable[[Any], bool],
    ) -> None:
        self._modules, self._allows = modules, allows
        self._fields = [module.__dict__ for module in modules]
        self._hooks = [fields[name] for fields in self._fields for name in _HOOKS]
        self._kinds = [type(module) for module in modules]
        self._code = code_of(self._kinds)
        settings = [module.__dict__ for module in modules if not isinstance(module, _WITHOUT_SETTINGS)]
        self._settings = [children, config, *settings]
        self._objects = [tuple(each.values()) for each in self._dictionaries()]

    def holds(self) -> bool:
        """Whether nothing has changed, and every module is in evaluation."""
        fields = self._fields
        if any(self._hooks) and not all(self._allows(hook) for hooks in self._hooks for hook in hooks.values()):
            return False
        if any(map(_training, fields)) or any(map(operator.contains, fields, itertools.repeat("forward"))):
            return False
        if any_compiled(fields) or list(map(type, self._modules)) != self._kinds:
            return False
        code = code_of(self._kinds)
        if len(code) != len(self._code) or any(map(operator.is_not, code, self._code)):
            return False
        return cast(Any, extension).hold(self._dictionaries(), self._objects)

    def _dictionaries(self) -> list[dict[str, Any]]:
        """Of settings, and of the children and parameters of each module, which may have got other dictionaries."""
        return [*self._settings, *map(_children, self._fields), *map(_parameters, self._fields)]


def picture_of(root: nn.Module) -> int:
    """A number that changes with the modules, hooks, settings, code and parameters of a module, and holds none of them.

    An object in the place of one that is gone may have its number. A refusal that stays for that costs time only.
    """
    seen: list[object] = [*map(id, vars(getattr(root, "config", root)).values())]
    pending: list[Any] = [root]
    kinds: dict[type[nn.Module], None] = {}
    while pending:
        module = pending.pop()
        kinds[type(module)] = None
        seen.extend(map(id, (type(module), *vars(module).values())))
        for name in _HOOKS:
            seen.extend(getattr(module, name))
        for parameter in module._parameters.values():
            seen.append(id(parameter))
            # A parameter stays the same object when another tensor is put into it.
            if type(parameter) is nn.Parameter and parameter.layout is torch.strided:
                seen += parameter.data_ptr(), parameter.is_contiguous()
        pending.extend(child for child in module._modules.values() if child is not None)
    return hash((*seen, *map(id, code_of(list(kinds)))))


def code_of(kinds: list[type[nn.Module]]) -> list[object]:
    """The forwards of classes, and everything else that classes outside of PyTorch define."""
    once = dict.fromkeys(kinds)
    others = (vars(kind).values() for kind in once if not kind.__module__.startswith("torch."))
    return [*(kind.forward for kind in once), *itertools.chain.from_iterable(others)]
