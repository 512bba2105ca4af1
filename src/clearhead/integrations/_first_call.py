"""The check of `upgrade` in calls: a layer that passes what its source does not spell out keeps eager attention."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import nn

from ..inspection._attention_calls import attention_keywords, calls_attention

_UPGRADED = "_set_by_clearhead_upgrade"
_EAGER = "eager_attention_forward"
#: Code that does something else under the name ``"eager"``, such as building a mask.
_COMPARES = re.compile(r"_attn_implementation\s*(?:==|!=|in\b|not in\b)")


def mark(model: nn.Module) -> None:
    """Let the layers that call the attention function fall back in calls that would raise."""
    kinds = attention_keywords(model)
    for layer in model.modules():
        if type(layer) in kinds:
            setattr(layer, _UPGRADED, True)


def unmark(model: nn.Module) -> None:
    """Undo `mark`."""
    for layer in model.modules():
        layer.__dict__.pop(_UPGRADED, None)


def eager_instead(layer: nn.Module, keyword: str) -> Callable[..., Any] | None:
    """The eager attention of a layer that `upgrade` set, with a warning; ``None`` if another attention was its choice.

    It is also ``None`` where the layer compares the name of the implementation: under ours it may have left out what
    eager attention needs.
    """
    eager = _eager_of(type(layer)) if getattr(layer, _UPGRADED, False) else None
    if eager is not None:
        what = f"{type(layer).__name__} passes {keyword!r}, which Clearhead's attention does not take"
        warnings.warn(f"{what}. It keeps the eager attention of transformers.", stacklevel=3)
    return eager


@lru_cache(256)
def _eager_of(kind: type) -> Callable[..., Any] | None:
    calling = [base for base in kind.__mro__ if calls_attention(base)]
    if not calling or any(_COMPARES.search(inspect.getsource(base)) for base in calling):
        return None
    return getattr(sys.modules[calling[0].__module__], _EAGER, None)
