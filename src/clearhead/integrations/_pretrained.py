"""The models of transformers inside a module, and the attention implementation of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..inspection._attention_calls import attention_keywords
from ._first_call import mark, unmark

NAME = "clearhead"
_BEFORE = "_clearhead_attention_before"

_DEBERTA = ("transformers.models.deberta.", "transformers.models.deberta_v2.")

#: Implementations that `upgrade` replaces. A user chose any other one on purpose.
_COMMON = ("eager", "sdpa", "clearhead_flash")


def models_of_transformers(model: nn.Module) -> dict[str, Any]:
    """Every model of transformers in a module by its qualified name, including nested ones."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:  # then none of its models exists
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, library.PreTrainedModel)}


def outermost(models: dict[str, Any]) -> dict[str, Any]:
    """The models that are not inside another model."""
    return {name: model for name, model in models.items() if head_of(models, name) is None}


def head_of(models: dict[str, Any], name: str) -> Any:
    """The model that directly contains a model, or ``None``."""
    outer = [other for other in models if other != name and (not other or name.startswith(f"{other}."))]
    return models[max(outer, key=len)] if outer else None


def runs_on_clearhead(model: Any) -> bool:
    """Whether a model computes with Clearhead's attention."""
    if model.config._attn_implementation != NAME:
        return False
    if is_deberta(model):
        return _is_patched(model)
    # Loading sets the name also where no attention is swapped, and where no layer calls the attention function.
    if not attention_keywords(model):
        return False
    if model._can_set_attn_implementation():
        return True
    from ._own_attention import has_own_attention

    return not has_own_attention(model)


def _is_patched(model: Any) -> bool:
    from ._deberta import is_patched

    return is_patched(model)


def is_deberta(model: Any) -> bool:
    """Whether a model is a DeBERTa, whose attention calls no function of transformers. See `_deberta`."""
    return type(model).__module__.startswith(_DEBERTA)


def why_not_set(model: Any) -> str | None:
    """The reason why a model keeps its attention, or ``None`` if Clearhead's can be set."""
    if runs_on_clearhead(model):
        return f"it runs on {NAME!r} already"
    if model.config._attn_implementation not in (*_COMMON, NAME):
        return f"it was set to attention {model.config._attn_implementation!r}"
    if is_deberta(model):
        from ._deberta import why_not_patched

        return why_not_patched(model)
    if not model._can_set_attn_implementation():
        return _why_not_swapped(model)
    from .transformers import KEYWORDS

    calling = attention_keywords(model)
    if not calling:
        return "none of its layers calls the attention function of transformers"
    for kind, keywords in calling.items():
        unknown = sorted(keywords - KEYWORDS)
        if unknown:
            return f"Clearhead's attention does not take {', '.join(unknown)}, which {kind.__name__} passes"
    return None


def _why_not_swapped(model: Any) -> str | None:
    """The reason why the attention classes of a model that calls no attention function are not swapped."""
    from ._own_attention import has_own_attention

    if not has_own_attention(model):
        return f"{type(model).__name__} computes attention with code of its own"
    if model.config.output_attentions:
        return "its configuration has output_attentions, which transformers has for 'eager' only"
    return None


def set_attention(model: Any) -> str | None:
    """Set Clearhead's attention on a model for which `why_not_set` returns ``None``.

    If transformers refuses it, the model stays unchanged and the result is the reason.
    """
    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        _register()
        why = None
        if is_deberta(model):
            from ._deberta import patch

            why = patch(model)
            if why is None:
                model.config._attn_implementation_internal = NAME
        elif model._can_set_attn_implementation():
            model.set_attn_implementation(NAME)
        else:
            why = _swap(model)
        if why is not None:
            return why
    except BaseException as error:
        _restore(before)
        if isinstance(error, (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)):
            return str(error).partition("\n")[0]
        raise
    mark(model)
    setattr(model, _BEFORE, _Before((config, name) for config, name in before if config._attn_implementation != name))
    return None


def parts_left(model: nn.Module, root: str) -> dict[str, str]:
    """What keeps its attention in the part of a model that `set_attention` was called on, with the reason."""
    from ._class_tables import kept_classes

    prefix = f"{root}." if root else ""
    return {prefix + name: why for name, why in kept_classes(model.get_submodule(root)).items()}


def _swap(model: Any) -> str | None:
    """Swap the attention classes of a model, whose masks are then Clearhead's. Returns the reason if one cannot be."""
    from ._own_attention import swap_own_attention

    why = swap_own_attention(model)
    if why is None:
        model.config._attn_implementation_internal = NAME
    return why


class _Before(list[tuple[Any, str]]):
    """Configs and their previous attention. Reading a pickle of it registers Clearhead's attention."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_before, (list(self),)


def _read_before(pairs: list[tuple[Any, str]]) -> _Before:
    _register()
    return _Before(pairs)


def _register() -> None:
    from . import transformers  # noqa: F401  # pyright: ignore[reportUnusedImport]


def restore_attention(model: Any) -> bool:
    """Undo `set_attention`. Returns whether it was called."""
    before = model.__dict__.pop(_BEFORE, None)
    unmark(model)
    if before is not None and is_deberta(model):
        from ._deberta import restore

        restore(model)
    elif before is not None and not model._can_set_attn_implementation():
        from ._own_attention import swap_own_attention_back

        swap_own_attention_back(model)
    _restore([(config, name) for config, name in before or () if config._attn_implementation == NAME])
    return before is not None


def _restore(before: list[tuple[Any, str]]) -> None:
    for config, name in before:
        config._attn_implementation_internal = name  # the public property would change the parts of `config` too


def _configs(model: Any) -> Iterator[Any]:
    """Every config that sets the attention of a part of a model, each once."""
    yielded: set[int] = set()
    pending = [module.config for module in models_of_transformers(model).values()]
    while pending:
        config = pending.pop()
        if config is not None and id(config) not in yielded:
            yielded.add(id(config))
            yield config
            pending.extend(getattr(config, name, None) for name in config.sub_configs)
