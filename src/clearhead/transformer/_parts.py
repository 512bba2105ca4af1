"""The base of both kinds of layer: residuals and norms around their parts, and calls of an attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .._checks import flag, is_probability, module, number, shown, size
from ..errors import DTypeError
from ..masks._base import Mask

#: Masks by the name of their argument.
Masks = Mapping[str, Mask | Tensor | None]
#: Makes a norm for E features: `nn.LayerNorm`, `nn.RMSNorm`, or a `functools.partial` of them.
Norm = Callable[[int], nn.Module]


class ResidualLayer(nn.Module):
    """Parts, each with a residual and a norm: ``norm1`` of the first part, ``norm2`` of the second, and so on."""

    self_attention: nn.Module
    feed_forward: nn.Module
    norm1: nn.Module
    norm2: nn.Module

    def __init__(self, embed_dim: int, norm: Norm, norm_first: bool, dropout: float, **parts: nn.Module) -> None:
        super().__init__()
        self.embed_dim: int = size("embed_dim", embed_dim)
        for name, part in parts.items():
            self.add_module(name, module(name, part))
        for i in range(len(parts)):
            self.add_module(f"norm{i + 1}", made_norm(norm, embed_dim))
        self.dropout: nn.Dropout = made_dropout(dropout)
        self.norm_first: bool = flag("norm_first", norm_first)

    def _residual(self, x: Tensor, norm: nn.Module, part: Callable[[Tensor], tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        """X plus the output of a part, normed before or after it, and the second result of the part."""
        output, weights = part(norm(x) if self.norm_first else x)
        x = x + self.dropout(output)
        return x if self.norm_first else norm(x), weights

    def _feed_forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.feed_forward(x), None


def call_part(
    part: nn.Module,
    inputs: tuple[Tensor | None, ...],
    masks: Masks,
    need_weights: bool,
    average_attn_weights: bool,
    **options: object,
) -> tuple[Tensor, Any]:
    """The output of an attention or a layer, and its weights or ``None``.

    A part of the user's own may lack some options. Options that are ``None`` are therefore not passed, and options
    about weights only if weights are needed.
    """
    passed: dict[str, Any] = {name: option for name, option in options.items() if option is not None}
    if not need_weights:
        return part(*inputs, **masks, **passed), None
    return part(*inputs, **masks, need_weights=True, average_attn_weights=average_attn_weights, **passed)


def make_part_cache(name: str, kind: str, part: nn.Module, batch_size: int, max_length: int) -> Any:
    """The cache that a part makes for itself. Its kind is ``an attention`` or ``a layer``."""
    make = getattr(part, "make_cache", None)
    if make is None:
        expected = f"{kind} with make_cache(batch_size, max_length)"
        fix = "Make a cache that fits it and pass it as cache=; of a stack, a list of them, one per layer."
        raise DTypeError(name, expected=expected, got=type(part).__name__, fix=fix)
    return make(batch_size, max_length)


def made_norm(norm: Norm, embed_dim: int) -> nn.Module:
    """A norm for E features."""
    expected = "what makes a norm for E features, such as nn.LayerNorm"
    if isinstance(norm, nn.Module) or not callable(norm):
        raise DTypeError("norm", expected=expected, got=type(norm).__name__)
    # A callable that does not accept one int raises a TypeError. Other errors are the norm's own.
    try:
        made = norm(embed_dim)
    except TypeError as error:
        raise DTypeError("norm", expected=expected, got=shown(norm), fix=str(error)) from error
    if not isinstance(made, nn.Module):
        raise DTypeError("norm", expected=expected, got=f"one that makes a {type(made).__name__}")
    return made


def made_dropout(dropout: float) -> nn.Dropout:
    """A dropout of that probability."""
    return nn.Dropout(number("dropout", dropout, "a probability in [0, 1]", is_probability))
