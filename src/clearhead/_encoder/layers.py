"""`LeanLayers`: the layers of an encoder as matrix products, norms and attention, and the loop over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._call.call import Call
from .._call.sequences import PackedSequences
from .._environment import Environment
from .._layer.plan import attend
from ..masks._base import Mask
from ..masks._prepared import shared
from .products import Product
from .steps import Norm, normalize, rotate


@dataclass(frozen=True)
class LeanLayer:
    """One layer of an encoder.

    Args:
        inputs: query, key and value of the heads.
        output: after attention.
        up: the first product of the feed-forward part, with its activation, and another that multiplies it if it is
            gated (Shazeer, "GLU variants", 2020).
        down: its last product.
        norms: of attention and of the feed-forward part. They follow the sum with the residual, or precede the part.
            ``None`` is no norm.
        heads: H and Hkv.
        mask: of the layer. The same object in layers that have the same. Default: none.
        angles: which rotary positions it has. Default: none.
        scores: scale, soft-cap and sinks of its attention, by the names of `Call`.
    """

    inputs: Product
    output: Product
    up: tuple[Product, ...]
    down: Product
    norms: tuple[Norm | None, Norm | None]
    heads: tuple[int, int]
    mask: Mask | None = None
    angles: str | None = None
    scores: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def products(self) -> tuple[Product, ...]:
        return self.inputs, self.output, *self.up, self.down

    def project(self, x: Tensor, angles: dict[str, Angles] | None) -> tuple[Tensor, ...]:
        """Query, key and value (B, L, H·D), which are views of one tensor."""
        merged, (heads, kv_heads) = self.inputs(x), self.heads
        if angles is not None and self.angles is not None:
            rotate(merged, heads + kv_heads, *angles[self.angles])
        dim = merged.shape[-1] // (heads + 2 * kv_heads)
        return merged.split((heads * dim, kv_heads * dim, kv_heads * dim), -1)

    def feed_forward(self, x: Tensor) -> Tensor:
        first, *others = self.up
        hidden = first(x)
        for gate in others:
            hidden = hidden.mul_(gate(x))
        return self.down(hidden)


class Angles(NamedTuple):
    """Cosine and sine of the rotary positions of each token, float32 (positions, D)."""

    cosine: Tensor
    sine: Tensor


class LeanLayers:
    """The layers of an encoder, run without their modules' own code.

    ::

        post-norm:  x ← norm1(x + W_o attention(W_qkv x));   x ← norm2(x + W_2 f(W_1 x))
        pre-norm:   x ← x + W_o attention(W_qkv norm1(x));   x ← x + W_2 f(W_1 norm2(x))

    Each product is one pass with its bias and activation, on a copy of its weights that is laid out for the processor,
    and each sum is one pass with the norm that follows. There are no gradients.

    Args:
        layers: in their order.
        norm_first: pre-norm.
        last_norm: of a pre-norm encoder's output. Default: none.
    """

    def __init__(self, layers: list[LeanLayer], norm_first: bool, last_norm: Norm | None = None) -> None:
        self.layers, self._norm_first = layers, norm_first
        output = layers[0].output
        self.dtype, self.parameters_dtype = output.dtype, output.weights[0].dtype
        self.features = output.weights[0].shape[0]
        norms = [norm for layer in layers for norm in layer.norms]
        self._entry, *norms = [*norms, last_norm] if norm_first else [None, *norms]
        #: Those that follow the two sums of each layer.
        self._norms = list(zip(norms[::2], norms[1::2], strict=True))

    @property
    def names_of_angles(self) -> set[str]:
        """The rotary positions that layers have."""
        return {layer.angles for layer in self.layers if layer.angles is not None}

    def run(
        self,
        x: Tensor,
        environment: Environment,
        *,
        mask: Mask | None = None,
        sequences: PackedSequences | None = None,
        angles: dict[str, Angles] | None = None,
    ) -> Tensor:
        """The output of the last layer, or of the last norm.

        Args:
            x: (B, L, E), or packed (1, T, E), with E = `features`.
            environment: of the call, without tracing, observers, transforms and gradients.
            mask: of all layers, beside their own. Default: none.
            sequences: of packed tokens.
            angles: rotary positions by the names that layers have for them.

        Returns:
            A new tensor of the shape of `x`, in the dtype of the products.
        """
        masks = {id(own): shared(_both(mask, own)) for own in (layer.mask for layer in self.layers)}
        residual = x.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        normed = residual if self._entry is None else normalize(residual.clone(), self._entry)
        for layer, (first, second) in zip(self.layers, self._norms, strict=True):
            query, key, value = layer.project(normed, angles)
            options: Any = {"mask": masks[id(layer.mask)], "sequences": sequences, "heads": layer.heads}
            call = Call(query, key, value, **options, **layer.scores)
            attended = attend(call, environment).output  # (B, L, H·D)
            normed, residual = self._joined(layer.output(attended), residual, first)
            normed, residual = self._joined(layer.feed_forward(normed), residual, second)
        return normed

    def _joined(self, x: Tensor, residual: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """What the next product reads, and what is added to its result."""
        if norm is None:
            residual = x.add_(residual)
            return residual, residual
        normalize(x, norm, residual, total=residual if self._norm_first else None)
        return x, residual if self._norm_first else x


def _both(mask: Mask | None, own: Mask | None) -> Mask | None:
    if mask is None or own is None:
        return own if mask is None else mask
    return mask & own
