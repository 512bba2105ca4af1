"""The two forms of latent attention: every head's own keys and values, or one latent that all heads share."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ._call.heads import split_heads
from ._checks import PLAIN
from ._environment import Environment, is_tracing
from ._layer.layer import Form
from ._layer.unmodified import apply_linear, is_unmodified
from .errors import ArgumentError


class UpWeights(NamedTuple):
    """The two halves of the projection from the latent, (H, Dn, R) for keys and (H, Dv, R) for values."""

    key: Tensor
    value: Tensor


def expanded(kv_up: nn.Module, q_nope: Tensor, q_rope: Tensor, kept: Tensor, environment: Environment) -> Form:
    """Every head's keys and values, Hkv = H.

    Args:
        kv_up: (…, R) → (…, H · (Dn + Dv)).
        q_nope: (B, H, L, Dn).
        q_rope: (B, H, L, Dr), rotated.
        kept: (B, 1, S, R + Dr), latents and rotated keys.
        environment: of the call.
    """
    heads, rotary = q_rope.shape[1], q_rope.shape[3]
    latent, k_rope = kept.split((kept.shape[3] - rotary, rotary), -1)
    up = split_heads(apply_linear(kv_up, latent.squeeze(1), environment), heads)  # (B, H, S, Dn + Dv)
    k_nope, value = up.split((q_nope.shape[3], up.shape[3] - q_nope.shape[3]), -1)
    key = torch.cat((k_nope, k_rope.expand(-1, heads, -1, -1)), -1)  # (B, H, S, Dn + Dr)
    return Form(torch.cat((q_nope, q_rope), -1), key, value)


def absorbed(weights: UpWeights, q_nope: Tensor, q_rope: Tensor, kept: Tensor) -> Form:
    """Queries against the latents themselves, Hkv = 1; the values are a view of them."""
    q_latent = torch.einsum("bhld,hdr->bhlr", q_nope, weights.key)  # (B, H, L, R)

    def finish(mixed: Tensor) -> Tensor:
        """Every head's values from its mixture of latents, (B, H, L, R) → (B, H, L, Dv)."""
        return torch.einsum("bhlr,hvr->bhlv", mixed, weights.value)

    return Form(torch.cat((q_latent, q_rope), -1), kept, kept[..., : q_latent.shape[3]], finish)


def absorbing_is_less(rows: int, rank: int, nope: int, value: int) -> bool:
    """Whether the absorbed form multiplies less per key than the expanded one, for so many query rows.

    Per key and head the absorbed form multiplies rank − nope and rank − value numbers more in each row, the expanded
    one rank · (nope + value) once.
    """
    return rows * (2 * rank - nope - value) <= rank * (nope + value)


def up_weights(kv_up: nn.Module, num_heads: int, rank: int, nope: int, like: Tensor) -> UpWeights:
    """The matrix that `kv_up` applies: its weight, or what it makes of the identity.

    Args:
        kv_up: (…, R) → (…, H · (Dn + Dv)), linear.
        num_heads, rank, nope: H, R and Dn.
        like: what it is called on has this dtype and device.

    Raises:
        ArgumentError: if it has a bias.
    """
    # Tensors of other types, such as quantised ones, only support what `F.linear` calls.
    if is_unmodified(kv_up) and type(kv_up.weight) in PLAIN:
        if kv_up.bias is not None:
            raise _has_bias(kv_up)
        weight = cast(Tensor, kv_up.weight)
    else:
        rows = torch.eye(rank + 1, rank, dtype=like.dtype, device=like.device)  # the last one zero
        moved = kv_up(rows)  # (R + 1, H · (Dn + Dv))
        if not is_tracing() and bool(moved[-1].any()):
            raise _has_bias(kv_up)
        weight = moved[:-1].T
    both = weight.unflatten(0, (num_heads, -1))  # (H, Dn + Dv, R)
    return UpWeights(both[:, :nope], both[:, nope:])


def _has_bias(module: nn.Module) -> ArgumentError:
    return ArgumentError(
        "kv_up",
        expected="a projection without a bias",
        got=f"a {type(module).__name__} with one",
        fix="With a cache, only its matrix is used. Set bias=False.",
    )
