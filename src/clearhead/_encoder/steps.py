"""What an encoder computes in C++: products of rows, residual and norm, rotary positions."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._native import extension, instruction_set_number, require_declared

#: The types of the C++ functions, by their numbers.
TYPES = {torch.float32: 0, torch.bfloat16: 1}

_NORM = "type threads rows features x residual total weight bias epsilon centers"
_ROTATION = "type threads rows heads dim row head positions x cosine sine"
_AFFINE = "type threads rows inner outer x weight bias y activation"
#: In the order of C++.
ACTIVATIONS = ("identity", "relu", "tanh", "gelu", "gelu_tanh", "silu")
require_declared("norm_arguments", *_NORM.split())
require_declared("rotation_arguments", *_ROTATION.split())
require_declared("affine_arguments", *_AFFINE.split())
require_declared("activations", *ACTIVATIONS)


class Norm(NamedTuple):
    """A LayerNorm or RMSNorm over the features.

    Args:
        weight, bias: contiguous float32 (features,), or ``None``.
        epsilon: added to the variance.
        centers: whether the mean is subtracted, as LayerNorm does.
    """

    weight: Tensor | None
    bias: Tensor | None
    epsilon: float
    centers: bool


def normalize(x: Tensor, norm: Norm, residual: Tensor | None = None, total: Tensor | None = None) -> Tensor:
    """Replace x by norm(x + residual), rounded once.

    Args:
        x: contiguous (…, features), float32 or bfloat16.
        norm: computed in float32.
        residual: of the same shape and type. Default: none.
        total: is given x + residual. It may be `residual` itself.

    Returns:
        `x`.
    """
    features = x.shape[-1]
    sizes = TYPES[x.dtype], torch.get_num_threads(), x.numel() // features, features
    addresses = x.data_ptr(), _address(residual), _address(total), _address(norm.weight), _address(norm.bias)
    _extension.norm(instruction_set_number(), *sizes, *addresses, norm.epsilon, norm.centers)
    return x


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "identity") -> Tensor:
    """f(x Wᵀ + b), a new tensor (…, out), with sums in float32.

    Args:
        x: contiguous (…, in), float32 or bfloat16, like the others.
        weight: contiguous (out, in).
        bias: (out,), or ``None``.
        activation: one of `ACTIVATIONS`.
    """
    outer, inner = weight.shape
    y = x.new_empty(*x.shape[:-1], outer)
    sizes = TYPES[x.dtype], torch.get_num_threads(), x.numel() // inner, inner, outer
    addresses = x.data_ptr(), weight.data_ptr(), _address(bias), y.data_ptr()
    _extension.affine(instruction_set_number(), *sizes, *addresses, ACTIVATIONS.index(activation))
    return y


def rotate(x: Tensor, heads: int, cosine: Tensor, sine: Tensor) -> None:
    """Rotate the first heads of each token in place.

    Args:
        x: contiguous (…, features), whose first `heads` · D features are rotated.
        heads: how many.
        cosine, sine: float32 (positions, D). Token t has the position t modulo `positions`.
    """
    positions, dim = cosine.shape
    width = x.shape[-1]
    sizes = TYPES[x.dtype], torch.get_num_threads(), x.numel() // width, heads, dim, width, dim, positions
    _extension.rotate(instruction_set_number(), *sizes, x.data_ptr(), cosine.data_ptr(), sine.data_ptr())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_extension = cast(Any, extension)
