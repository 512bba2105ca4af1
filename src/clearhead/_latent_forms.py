"""The two forms of latent attention: keys and values of every head, or one latent that all heads share."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ._call.caching import Cache
from ._call.heads import split_heads
from ._checks import PLAIN
from ._environment import Environment
from ._layer.layer import Operands
from ._layer.unmodified import apply_linear, is_unmodified
from .errors import ArgumentError


class LatentSizes(NamedTuple):
    """R, Dn, Dr and Dv: features of a latent, of a head's query without and with positions, and of a head's value."""

    rank: int
    nope: int
    rope: int
    value: int


def latent_form(
    kv_up: nn.Module, sizes: LatentSizes, environment: Environment, query: Tensor, keys: Tensor, cache: Cache | None
) -> Operands:
    """The form that multiplies less.

    Args:
        kv_up: (…, R) → (…, H · (Dn + Dv)), linear.
        sizes: R, Dn, Dr and Dv.
        environment: of the call.
        query: (B, H, L, Dn + Dr), the last Dr rotated.
        keys: (B, 1, S, R + Dr), latents and rotated keys.
        cache: holds the keys, or is ``None``.
    """
    # Observers receive the values of the heads, not mixtures of latents.
    if cache is None or environment.observed or not _absorbing_is_less(query.shape[2], sizes):
        form = _expanded(kv_up, sizes, query, keys, environment)
        # An evicting cache holds latents, and compares queries with them.
        if cache is not None and type(cache).observe is not Cache.observe:
            form.observed = _absorbed(kv_up, sizes, query, keys, environment).query
        return form
    form = _absorbed(kv_up, sizes, query, keys, environment)
    form.observed = form.query
    return form


def _expanded(kv_up: nn.Module, sizes: LatentSizes, query: Tensor, keys: Tensor, environment: Environment) -> Operands:
    """Every head's keys and values, Hkv = H."""
    heads = query.shape[1]
    latent, k_rope = keys.split((sizes.rank, sizes.rope), -1)
    up = split_heads(apply_linear(kv_up, latent.squeeze(1), environment), heads)  # (B, H, S, Dn + Dv)
    k_nope, value = up[..., : sizes.nope], up[..., sizes.nope :]
    return Operands(query, torch.cat((k_nope, k_rope.expand(-1, heads, -1, -1)), -1), value)  # key (B, H, S, Dn + Dr)


def _absorbed(kv_up: nn.Module, sizes: LatentSizes, query: Tensor, keys: Tensor, environment: Environment) -> Operands:
    """Queries that attend to the latents themselves, Hkv = 1. The values are a view of the latents."""
    q_nope, q_rope = query.split((sizes.nope, sizes.rope), -1)
    key_weight, value_weight = _up_weights(kv_up, sizes, q_nope, environment)
    q_latent = torch.einsum("bhld,hdr->bhlr", q_nope, key_weight)  # (B, H, L, R)

    def finish(mixed: Tensor) -> Tensor:
        """Every head's values from its mixture of latents, (B, H, L, R) → (B, H, L, Dv)."""
        return torch.einsum("bhlr,hvr->bhlv", mixed, value_weight)

    return Operands(torch.cat((q_latent, q_rope), -1), keys, keys[..., : sizes.rank], finish)


def _absorbing_is_less(rows: int, sizes: LatentSizes) -> bool:
    """Whether the absorbed form multiplies less per key than the expanded one, for this number of query rows.

    Per key and head, the absorbed form needs (R − Dn) + (R − Dv) more multiplications in each row. The expanded form
    needs R · (Dn + Dv) more once.
    """
    return rows * (2 * sizes.rank - sizes.nope - sizes.value) <= sizes.rank * (sizes.nope + sizes.value)


def _up_weights(kv_up: nn.Module, sizes: LatentSizes, query: Tensor, environment: Environment) -> tuple[Tensor, Tensor]:
    """The matrix of `kv_up` for the heads of a query (B, H, …): its weight, or its output for the identity.

    Returns:
        (H, Dn, R) for keys and (H, Dv, R) for values.

    Raises:
        ArgumentError: if it has a bias.
    """
    # Tensors of other types, such as quantised ones, only support the operators of `F.linear`.
    if is_unmodified(kv_up) and type(kv_up.weight) in PLAIN:
        weight, has_bias = cast(Tensor, kv_up.weight), kv_up.bias is not None
    else:
        rows = torch.eye(sizes.rank + 1, sizes.rank, dtype=query.dtype, device=query.device)  # the last one zero
        moved = kv_up(rows)  # (R + 1, H · (Dn + Dv))
        weight, has_bias = moved[:-1].T, not environment.tracing and bool(moved[-1].any())
    if has_bias:
        expected, got = "a projection without a bias", f"a {type(kv_up).__name__} with one"
        fix = "With a cache, only its matrix is used. Set bias=False."
        raise ArgumentError("kv_up", expected=expected, got=got, fix=fix)
    both = weight.unflatten(0, (query.shape[1], -1))  # (H, Dn + Dv, R)
    return both[:, : sizes.nope], both[:, sizes.nope :]
