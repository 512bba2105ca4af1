"""One piece of attention to be computed, its operands, and the error for what a peer does not support."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

__all__ = ["AttentionWork", "Operands", "Outputs", "Unsupported", "Way", "draw", "with_backward"]

Outputs = tuple[Tensor, ...]
#: One call of what is timed; it returns what is compared.
Way = Callable[[], Outputs]


class Unsupported(Exception):
    """A peer does not support a piece of work and is skipped; the text is the reason."""

    @classmethod
    def because_of(cls, error: Exception) -> Unsupported:
        """For any error, in one short line."""
        if isinstance(error, cls):
            return error
        if isinstance(error, ModuleNotFoundError):
            return cls(f"not installed: {error.name}")
        return cls(f"{type(error).__name__}: {' '.join(str(error).split())[:140]}")


@final
@dataclass(frozen=True)
class AttentionWork:
    """Attention over (batch, heads, length, head_dim).

    Args:
        length: L, and S unless `key_length` is given.
        key_length: S. Default L.
        batch, heads: B, H. Default 1 and 8.
        head_dim: D. Default 64.
        value_dim: Dv. Default D.
        dtype: of query, key and value.
        causal: query i sees keys j ≤ i.
        mask: a dense (L, S) tensor: random bool, or a random float bias. Default: none.
        dropout_p: probability that a weight is dropped.
        backward: forward and the gradients of query, key and value.
    """

    length: int
    key_length: int | None = None
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    causal: bool = False
    mask: Literal["bool", "float"] | None = None
    dropout_p: float = 0.0
    backward: bool = False

    @property
    def keys(self) -> int:
        return self.length if self.key_length is None else self.key_length

    @property
    def value_features(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def flops(self) -> float:
        """Multiplications and additions of the products: two forward, five more backward; a causal call needs half."""
        one_product = 2.0 * self.batch * self.heads * self.length * self.keys
        forward = one_product * (self.head_dim + self.value_features)
        # Backward recomputes q·k and needs dq and dk (each over D), and p and dv (each over Dv).
        backward = one_product * (3 * self.head_dim + 2 * self.value_features) if self.backward else 0.0
        return (forward + backward) * (0.5 if self.causal else 1.0)

    @property
    def score_bytes(self) -> float:
        """Bytes of one (B, H, L, S) tensor."""
        return float(self.batch * self.heads * self.length * self.keys * self.dtype.itemsize)


@final
@dataclass(frozen=True)
class Operands:
    """The tensors of one `AttentionWork`; every peer computes on these."""

    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, H, S, D)
    value: Tensor  # (B, H, S, Dv)
    mask: Tensor | None  # (L, S); True = may attend, or added to the scores
    output_gradient: Tensor  # (B, H, L, Dv)


def draw(work: AttentionWork) -> Operands:
    """Random operands, the same for the same work."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(work.dtype)

    mask = None
    if work.mask is not None:
        mask = torch.randn(work.length, work.keys, generator=generator)
        mask = mask.to(work.dtype) if work.mask == "float" else mask > 0
    lead = (work.batch, work.heads)
    return Operands(
        normal(*lead, work.length, work.head_dim).requires_grad_(work.backward),
        normal(*lead, work.keys, work.head_dim).requires_grad_(work.backward),
        normal(*lead, work.keys, work.value_features).requires_grad_(work.backward),
        mask,
        normal(*lead, work.length, work.value_features),
    )


def with_backward(forward: Callable[[], Tensor], work: AttentionWork, operands: Operands) -> Way:
    """The forward pass alone, or with the gradients of query, key and value after it."""
    inputs = (operands.query, operands.key, operands.value)

    def both() -> Outputs:
        output = forward()
        return output, *torch.autograd.grad(output, inputs, operands.output_gradient)

    def alone() -> Outputs:
        with torch.no_grad():
            return (forward(),)

    return both if work.backward else alone
