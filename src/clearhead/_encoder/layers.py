"""`LeanLayers`: the layers of an encoder as matrix products, norms and attention, and the loop over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._call.call import Call
from .._call.sequences import PackedSequences
from .._environment import Environment
from .._layer.plan import attend
from ..masks._base import Mask
from ..masks._prepared import shared
from .products import Activation, Affine, Gated, Product
from .steps import Norm, digest, normalize, rotate, samples_of


@dataclass(frozen=True)
class LayerParts:
    """One layer of an encoder.

    Args:
        inputs: query, key and value of the heads, or all three one after the other.
        output: after attention.
        up: the first map of the feed-forward part: one, or two that are multiplied if it is gated.
        activation: of the feed-forward part.
        down: its last map.
        first_norm, second_norm: of attention and of the feed-forward part. They follow the sum with the residual, or
            precede the part. ``None`` is no norm.
        heads: H and Hkv.
        mask: of the layer. The same object in layers that have the same. Default: none.
        angles: which rotary positions it has. Default: none.
        scores: scale, soft-cap and sinks of its attention, by the names of `Call`.
    """

    inputs: tuple[Affine, ...]
    output: Affine
    up: tuple[Affine, ...]
    activation: Activation
    down: Affine
    first_norm: Norm | None
    second_norm: Norm | None
    heads: tuple[int, int]
    mask: Mask | None = None
    angles: str | None = None
    scores: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def maps(self) -> tuple[Affine, ...]:
        return (*self.inputs, self.output, *self.up, self.down)


class Angles(NamedTuple):
    """Cosine and sine of the rotary positions of each token, float32 (positions, D)."""

    cosine: Tensor
    sine: Tensor


class _Layer:
    """A layer as it is computed. `norms` follow its two sums."""

    def __init__(self, parts: LayerParts, dtype: torch.dtype, norms: tuple[Norm | None, Norm | None]) -> None:
        self.parts = parts
        self.norms = [None if norm is None else norm.float() for norm in norms]
        self.inputs, self.output, self.down = (
            Product(maps, dtype) for maps in (parts.inputs, (parts.output,), (parts.down,))
        )
        first, *others = parts.up
        self.up: Product | Gated = Product((first,), dtype, parts.activation)
        if others:
            self.up = Gated(self.up, Product(others, dtype))
        width = parts.output.weight.shape[1]
        of_keys = width // parts.heads[0] * parts.heads[1]
        self._widths = width, of_keys, of_keys

    def project(self, x: Tensor, angles: dict[str, Angles] | None) -> tuple[Tensor, ...]:
        """Query, key and value (B, L, H·D), which are views of one tensor."""
        merged = self.inputs(x)
        if angles is not None and self.parts.angles is not None:
            rotate(merged, sum(self.parts.heads), *angles[self.parts.angles])
        return merged.split(self._widths, -1)


class LeanLayers:
    """The layers of an encoder, run without their modules' own code.

    ::

        post-norm:  x ← norm1(x + W_o attention(W_qkv x));   x ← norm2(x + W_2 f(W_1 x))
        pre-norm:   x ← x + W_o attention(W_qkv norm1(x));   x ← x + W_2 f(W_1 norm2(x))

    Each product is one pass with its bias and activation, on a copy of its weights that is laid out for the processor,
    and each sum is one pass with the norm that follows. There are no gradients.

    Args:
        layers: in their order.
        parameters: of which they were read, and whose changes `are_current` sees.
        dtype: of the copies, and of what the layers compute with: float32 or bfloat16. Norms, and the softmax, are
            computed in float32.
        norm_first: pre-norm.
        last_norm: of a pre-norm encoder's output. Default: none.
    """

    def __init__(
        self,
        layers: list[LayerParts],
        parameters: list[nn.Parameter],
        dtype: torch.dtype,
        norm_first: bool,
        last_norm: Norm | None = None,
    ) -> None:
        self.dtype, self._norm_first = dtype, norm_first
        entry = layers[0].first_norm if norm_first else None
        self._entry = None if entry is None else entry.float()
        following = [*(parts.first_norm for parts in layers[1:]), last_norm]
        norms = [
            (parts.second_norm, after) if norm_first else (parts.first_norm, parts.second_norm)
            for parts, after in zip(layers, following, strict=True)
        ]
        self._layers = [_Layer(parts, dtype, each) for parts, each in zip(layers, norms, strict=True)]
        self.features, self.parameters_dtype = layers[0].output.weight.shape[0], layers[0].output.weight.dtype
        self._parameters = parameters
        self._counted = [each for each in parameters if not each.is_inference()]
        self._places, self._samples = self._read_places(), samples_of(parameters)
        self._digest = digest(self._samples)

    @property
    def names_of_angles(self) -> set[str]:
        """The rotary positions that layers have."""
        return {layer.parts.angles for layer in self._layers if layer.parts.angles is not None}

    def are_current(self) -> bool:
        """Whether the copies hold what the parameters hold now."""
        # PyTorch does not count what is written through ``parameter.data``.
        return self._read_places() == self._places and digest(self._samples) == self._digest

    def _read_places(self) -> tuple[list[int], list[int], bool]:
        """Where the parameters lie, and how often they were written. Another tensor may have been put into one."""
        addresses = [each.data_ptr() for each in self._parameters]
        in_order = all(map(Tensor.is_contiguous, self._parameters))
        return addresses, [each._version for each in self._counted], in_order

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
            A new tensor of the shape of `x`, in the dtype of the copies.
        """
        masks = {id(own): shared(_both(mask, own)) for own in (layer.parts.mask for layer in self._layers)}
        residual = x.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        normed = residual if self._entry is None else normalize(residual.clone(), self._entry)
        for layer in self._layers:
            first, second = layer.norms
            query, key, value = layer.project(normed, angles)
            options: Any = {"mask": masks[id(layer.parts.mask)], "sequences": sequences, "heads": layer.parts.heads}
            call = Call(query, key, value, **options, **layer.parts.scores)
            attended = attend(call, environment).output  # (B, L, H·D)
            normed, residual = self._joined(layer.output(attended), residual, first)
            normed, residual = self._joined(layer.down(layer.up(normed)), residual, second)
        return normed

    def _joined(self, x: Tensor, residual: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """What the next product reads, and what is added to its result."""
        if norm is None:
            residual = x.add_(residual)
            return residual, residual
        if self._norm_first:
            return normalize(x, norm, residual, total=residual), residual
        normalize(x, norm, residual)
        return x, x


def _both(mask: Mask | None, own: Mask | None) -> Mask | None:
    if mask is None or own is None:
        return own if mask is None else mask
    return mask & own
