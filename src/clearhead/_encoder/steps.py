"""What an encoder computes between its matrix products, in C++: residual and norm, rotary positions, digests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._native import extension, instruction_set_number, require_declared

#: The types of the C++ functions, by their numbers.
TYPES = {torch.float32: 0, torch.bfloat16: 1}

_NORM = "type threads rows features x residual total weight bias epsilon centers"
_ROTATION = "type threads rows heads dim row head positions x cosine sine"
require_declared("norm_arguments", *_NORM.split())
require_declared("rotation_arguments", *_ROTATION.split())


class Norm(NamedTuple):
    """A LayerNorm or RMSNorm over the features.

    Args:
        weight, bias: (features,), or ``None``.
        epsilon: added to the variance.
        centers: whether the mean is subtracted, as LayerNorm does.
    """

    weight: Tensor | None
    bias: Tensor | None
    epsilon: float
    centers: bool

    def float(self) -> Norm:
        """The same with float32 parameters, as `normalize` reads them."""
        weight, bias = (None if each is None else each.float().contiguous() for each in (self.weight, self.bias))
        return self._replace(weight=weight, bias=bias)


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


def digest(tensors: Sequence[Tensor]) -> int:
    """A number that depends on 32 words of each contiguous tensor, spread over all of it.

    Version counters do not count what is written through ``tensor.data``. A merged adapter changes every number of a
    weight, and so the digest.
    """
    addresses = array("q", [tensor.data_ptr() for tensor in tensors])
    sizes = array("q", [tensor.nbytes for tensor in tensors])
    return _extension.digest(addresses.tobytes(), sizes.tobytes())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_extension = cast(Any, extension)
