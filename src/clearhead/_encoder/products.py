"""Matrix products of an encoder, on weights that are laid out for the processor, and what follows in the same pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._layer.linear import processor_maker
from .._native import extension
from .._torch_private import has_bfloat16_products, has_onednn_linear, onednn_linear, onednn_weight
from .steps import affine

#: Processors on which oneDNN's products of laid-out weights were measured to be faster than PyTorch's, by their makers,
#: and up to how many rows Clearhead's own are as fast: they read weights as they are, and need no preparation for a new
#: number of rows. ``python -m benchmarks.encoders.products`` measures both.
_FEW_ROWS = {"AuthenticAMD": 32, "GenuineIntel": 0}

Activation = Callable[[Tensor], Tensor]


@functools.cache
def lays_out_weights() -> bool:
    """Whether this processor multiplies faster with weights that oneDNN laid out for it."""
    return has_onednn_linear() and processor_maker() in _FEW_ROWS


@functools.cache
def few_rows() -> int:
    """The most rows that are multiplied without laid-out weights."""
    return _FEW_ROWS[processor_maker()] if lays_out_weights() and extension is not None else 0


def gains_by_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware, and PyTorch was built to use it."""
    return lays_out_weights() and has_bfloat16_products()


class Affine(NamedTuple):
    """The parameters of x → x Wᵀ + b: weight (out, in), and bias (out,) or ``None``."""

    weight: Tensor
    bias: Tensor | None


class Product:
    """x → f(x Wᵀ + b) in one pass. Weights are copied when a call first needs them in another form than they have.

    Args:
        maps: whose results lie side by side.
        dtype: of the product. Default: that of the weights.
        activation: f. Default: none.
    """

    def __init__(
        self, maps: Sequence[Affine], dtype: torch.dtype | None = None, activation: Activation | None = None
    ) -> None:
        self.weights, self._activation = [each.weight for each in maps], activation
        self.dtype = dtype or self.weights[0].dtype
        biases = [each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias for each in maps]
        self._bias = torch.cat(biases).to(self.dtype) if any(each.bias is not None for each in maps) else None
        kind, form = type(activation), getattr(activation, "approximate", "")
        self._fused = "identity" if activation is None else _FUSED.get(f"{kind.__module__}.{kind.__name__}{form}")

    def __call__(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out), a new tensor."""
        if x.numel() <= few_rows() * x.shape[-1]:
            product = affine(x.contiguous(), self._plain, self._bias, self._fused or "identity")
            is_done = self._fused is not None
        elif lays_out_weights():
            product = onednn_linear(x, self._laid_out, self._bias, *_OF_ONEDNN.get(self._fused, ("none", "")))
            is_done = self._fused in _OF_ONEDNN
        else:
            product, is_done = F.linear(x, self._plain, self._bias), False
        return product if is_done or self._activation is None else self._activation(product)

    @functools.cached_property
    def _plain(self) -> Tensor:
        return (torch.cat(self.weights) if len(self.weights) > 1 else self.weights[0]).to(self.dtype)

    @functools.cached_property
    def _laid_out(self) -> Tensor:
        return onednn_weight(torch.cat(self.weights).to(self.dtype))


#: Activations that are computed in the pass of a product, by their classes and forms: their names in `ACTIVATIONS`.
_FUSED = {
    "torch.nn.modules.activation.GELUnone": "gelu",
    "torch.nn.modules.activation.GELUtanh": "gelu_tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Tanh": "tanh",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
}
#: The names and kinds by which oneDNN computes them too.
_OF_ONEDNN: dict[str | None, tuple[str, str]] = {
    "relu": ("relu", ""),
    "tanh": ("tanh", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}
