"""The facts of a split module, which are equal in every process."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from .._multihead import MultiHeadAttention
from ..transformer import FeedForward
from ._agreement import fingerprint
from ._finding import Named

# An object without a text of its own shows its address; devices have the number of the process.
_OF_THIS_PROCESS = re.compile(r" at 0x[0-9a-fA-F]+|(?<=[a-z]):\d+")


def aspects_of(
    module: nn.Module, attentions: Sequence[tuple[str, MultiHeadAttention]], others: Named
) -> dict[str, int]:
    """Fingerprints by the names that messages use. They are equal for equal modules, for any values of parameters."""
    each = [attention for _, attention in attentions]
    words: dict[str, object] = {
        "softcap of the module": [part.softcap for part in each],
        "scale of the module": [part.scale for part in each],
        "dropout of the module": [part.dropout for part in each],
        "mask of the module": [None if part.mask is None else _plain(part.mask.describe()) for part in each],
        "position of the module": [_described(part.position) for part in each],
        "q_norm of the module": [_described(part.q_norm) for part in each],
        "k_norm of the module": [_described(part.k_norm) for part in each],
        "parts beside attention": [(name, *_described_part(part)) for name, part in others],
        "module": (  # what the others do not cover
            [(name, part.num_heads, part.num_kv_heads, part.head_dim, part.sinks is None) for name, part in attentions],
            [(name, getattr(part, "norm_first", None)) for name, part in module.named_modules()],
            [(name, *_sizes(parameter)) for name, parameter in module.named_parameters()],
        ),
    }
    # The number of attention modules is sent as it is, so that messages show it.
    return {"attention modules": len(each)} | {name: fingerprint(word) for name, word in words.items()}


def _described_part(part: nn.Module) -> tuple[str, ...]:
    # A function is no submodule, which the text of a module would show.
    return _described(part), _described(part.activation) if isinstance(part, FeedForward) else ""


def _described(part: object) -> str:
    text = repr(part)
    # The text of a tensor shows its values, which may differ in their last digits.
    return type(part).__qualname__ if "tensor(" in text else _plain(text)


def _plain(text: str) -> str:
    return _OF_THIS_PROCESS.sub("", text)


def _sizes(parameter: nn.Parameter) -> tuple[object, ...]:
    shape = "lazy" if is_lazy(parameter) else tuple(parameter.shape)
    return shape, str(parameter.dtype), parameter.requires_grad
