"""What is equal in every process of a module that is split, as facts for an agreement."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from .._multihead import MultiHeadAttention
from ..transformer import FeedForward
from ._agreement import fingerprint
from ._finding import Named

#: Aspects of a module, by the names that messages use; the last one is of what the others leave out.
ASPECTS: tuple[str, ...] = (
    "attention modules",
    "softcap of the module",
    "scale of the module",
    "dropout of the module",
    "mask of the module",
    "position of the module",
    "q_norm of the module",
    "k_norm of the module",
    "parts beside attention",
    "module",
)

# An object without a text of its own shows its address; devices have the number of the process.
_OF_THIS_PROCESS = re.compile(r" at 0x[0-9a-fA-F]+|(?<=[a-z]):\d+")


def aspects_of(
    module: nn.Module, attentions: Sequence[tuple[str, MultiHeadAttention]], others: Named
) -> dict[str, int]:
    """A fingerprint of each of `ASPECTS`: equal for equal modules in every process, whatever the parameters' values."""
    each = [attention for _, attention in attentions]
    words: tuple[object, ...] = (
        [part.softcap for part in each],
        [part.scale for part in each],
        [part.dropout for part in each],
        [None if part.mask is None else _plain(part.mask.describe()) for part in each],
        [_described(part.position) for part in each],
        [_described(part.q_norm) for part in each],
        [_described(part.k_norm) for part in each],
        [(name, *_described_part(part)) for name, part in others],
        (
            [(name, part.num_heads, part.num_kv_heads, part.head_dim, part.sinks is None) for name, part in attentions],
            [(name, getattr(part, "norm_first", None)) for name, part in module.named_modules()],
            [(name, *_sizes(parameter)) for name, parameter in module.named_parameters()],
        ),
    )
    # Their number is sent as it is, so that messages show it.
    return {ASPECTS[0]: len(each)} | {name: fingerprint(word) for name, word in zip(ASPECTS[1:], words, strict=True)}


def _described_part(part: nn.Module) -> tuple[str, ...]:
    # A function is no submodule, which the text of a module would show.
    return _described(part), _described(part.activation) if isinstance(part, FeedForward) else ""


def _described(part: object) -> str:
    text = repr(part)
    # The text of a tensor has its values, to the last of which processes need not agree.
    return type(part).__qualname__ if "tensor(" in text else _plain(text)


def _plain(text: str) -> str:
    return _OF_THIS_PROCESS.sub("", text)


def _sizes(parameter: nn.Parameter) -> tuple[object, ...]:
    shape = "lazy" if is_lazy(parameter) else tuple(parameter.shape)
    return shape, str(parameter.dtype), parameter.requires_grad
