"""What both kinds of layer share: residuals and norms around parts, and how an attention is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .._checks import FLOATS, is_probability, number, shown, strided_or_jagged
from ..errors import DTypeError, ShapeError, shape_text
from ..masks._base import Mask

#: Makes a norm for E features: `nn.LayerNorm`, `nn.RMSNorm`, or a `functools.partial` of them.
Norm = Callable[[int], nn.Module]


class ResidualLayer(nn.Module):
    """What both kinds of layer do around their parts."""

    dropout: nn.Module
    norm_first: bool

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x) if self.norm_first else x

    def _add(self, x: Tensor, part: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(part)
        return x if self.norm_first else norm(x)


def call_part(
    part: nn.Module,
    inputs: tuple[Tensor | None, ...],
    masks: Mapping[str, Mask | Tensor | None],
    need_weights: bool,
    average_attn_weights: bool,
    **options: object,
) -> tuple[Tensor, Any]:
    """The output of an attention or a layer, and its weights if they are wanted.

    Options that are ``None``, and those about weights where none are wanted, are left out: a part of the user's own,
    which has no place for them, need not take them.
    """
    given: dict[str, Any] = {name: option for name, option in options.items() if option is not None}
    if not need_weights:
        return part(*inputs, **masks, **given), None
    return part(*inputs, **masks, need_weights=True, average_attn_weights=average_attn_weights, **given)


def make_part_cache(name: str, kind: str, part: nn.Module, batch_size: int, max_length: int) -> Any:
    """What a part of this kind, ``an attention`` or ``a layer``, makes itself.

    Raises:
        DTypeError: if it makes none.
    """
    make = getattr(part, "make_cache", None)
    if make is None:
        raise DTypeError(
            name,
            expected=f"{kind} with make_cache(batch_size, max_length)",
            got=type(part).__name__,
            fix="Make a cache that fits it and pass it as cache=; of a stack, a list of them, one per layer.",
        )
    return make(batch_size, max_length)


def made_norm(norm: Norm, embed_dim: int) -> nn.Module:
    """What `norm` makes.

    Raises:
        DTypeError: if it cannot be called with E, or makes something else than a module.
    """
    expected = "what makes a norm for E features, such as nn.LayerNorm"
    if isinstance(norm, nn.Module) or not callable(norm):
        raise DTypeError("norm", expected=expected, got=type(norm).__name__)
    # What cannot be called with one int raises a TypeError; other errors are the norm's own.
    try:
        made = norm(embed_dim)
    except TypeError as error:
        raise DTypeError("norm", expected=expected, got=shown(norm), fix=str(error)) from error
    if not isinstance(made, nn.Module):
        got = f"one that makes a {type(made).__name__}"
        raise DTypeError("norm", expected=expected, got=got)
    return made


def made_dropout(dropout: float) -> nn.Dropout:
    """A dropout of that probability."""
    return nn.Dropout(number("dropout", dropout, "a probability in [0, 1]", is_probability))


def require_features(name: str, x: object, embed_dim: int) -> None:
    """Raise unless x is (B, L, E) or (L, E)."""
    x = strided_or_jagged(name, x)
    if x.dtype not in FLOATS:
        fix = "Embed token ids first."
        raise DTypeError(name, expected="a floating point tensor", got=str(x.dtype), fix=fix)
    if x.dim() not in (2, 3) or x.shape[-1] != embed_dim:
        raise ShapeError(
            name, expected=f"(B, L, E) with E = {embed_dim}, or (L, E) without a batch", got=shape_text(x.shape)
        )
