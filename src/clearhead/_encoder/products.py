"""Matrix products with weights that were laid out once for the processor, and what follows them in the same pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._layer.linear import processor_maker
from .._torch_private import has_bfloat16_products, has_onednn_linear, onednn_linear, onednn_weight

#: Processors on which oneDNN's products of laid-out weights were measured to be faster than PyTorch's, by their makers.
#: ``python -m benchmarks.encoders.products`` measures it.
_LAYS_OUT = frozenset({"AuthenticAMD", "GenuineIntel"})

Activation = Callable[[Tensor], Tensor]


@functools.cache
def lays_out_weights() -> bool:
    """Whether this processor multiplies faster with weights that oneDNN laid out for it."""
    return has_onednn_linear() and processor_maker() in _LAYS_OUT


def gains_by_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware, and PyTorch was built to use it."""
    return lays_out_weights() and has_bfloat16_products()


class Affine(NamedTuple):
    """The parameters of x → x Wᵀ + b: weight (out, in), and bias (out,) or ``None``."""

    weight: Tensor
    bias: Tensor | None


class Product:
    """x → f(x Wᵀ + b) in one pass, with a copy of the weights.

    Args:
        maps: whose results lie side by side.
        dtype: of the copy.
        activation: f. Default: none.
    """

    def __init__(self, maps: Sequence[Affine], dtype: torch.dtype, activation: Activation | None = None) -> None:
        weight = torch.cat([each.weight for each in maps]).to(dtype)
        has_bias = any(each.bias is not None for each in maps)
        self._bias = torch.cat([_bias(each) for each in maps]).to(dtype) if has_bias else None
        fused = fused_name(activation) if lays_out_weights() else None
        self._activation = None if fused else activation
        self._fused = fused or ("none", "")
        self._weight = onednn_weight(weight) if lays_out_weights() else weight

    def __call__(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), a new tensor."""
        if lays_out_weights():
            product = onednn_linear(x, self._weight, self._bias, *self._fused)
        else:
            product = F.linear(x, self._weight, self._bias)
        return product if self._activation is None else self._activation(product)


class Gated:
    """x → f(x W₁ᵀ + b₁) · (x W₂ᵀ + b₂), the first half of a gated feed-forward part (Shazeer, "GLU variants", 2020)."""

    def __init__(self, gate: Product, other: Product) -> None:
        self._gate, self._other = gate, other

    def __call__(self, x: Tensor) -> Tensor:
        return self._gate(x).mul_(self._other(x))


def fused_name(activation: Activation | None) -> tuple[str, str] | None:
    """The name and the kind by which oneDNN computes an activation in the pass of a product, or ``None``."""
    kind = type(activation)
    return _FUSED.get(f"{kind.__module__}.{kind.__name__}")


#: By the classes of activations.
_FUSED = {
    "torch.nn.modules.activation.ReLU": ("relu", ""),
    "torch.nn.modules.activation.Tanh": ("tanh", ""),
    "transformers.activations.GELUActivation": ("gelu", "none"),
    "transformers.activations.GELUTanh": ("gelu", "tanh"),
    "transformers.activations.NewGELUActivation": ("gelu", "tanh"),
}


def _bias(of: Affine) -> Tensor:
    return of.weight.new_zeros(of.weight.shape[0]) if of.bias is None else of.bias
