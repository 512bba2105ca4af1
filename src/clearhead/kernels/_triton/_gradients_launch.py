# pyright: basic, reportMissingImports=false
"""From tensors to launches of the kernels of `weights_gradients`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._gradients import key_gradient_kernel, query_gradient_kernel
from ._launch import Launch, arguments_of, base_2, ranges_of_keys, registers
from ._operands import Operands
from ._tiles import Tiles, tiles_for, tiles_over


def query_gradient_launch(operands: Operands, lse: Tensor, gradient: Tensor, tiles: Tiles | None = None) -> Launch:
    """A launch that writes the gradient of the query (B, H, L, D), and Σ_j p dp (B, H, L).

    `gradient` is that of the weights (B, H, L, S), or of their mean over the heads (B, 1, L, S).
    """
    query, tiles = operands.query, tiles or tiles_for("dq", operands)
    means = query.new_empty(query.shape[:3], dtype=torch.float32)
    out = query.new_empty(query.shape, dtype=torch.float32)
    arguments = {
        **arguments_of(operands, tiles), **_gradient(operands, lse, gradient, tiles),
        "means": means, "out": out, "factor": operands.scale,  # `arguments_of` may move its sign into the query
    }  # fmt: skip
    programs = tiles_over(query.shape[2], tiles.queries) * query.shape[0] * query.shape[1]
    return Launch(query_gradient_kernel, programs, arguments, (out, means))


def key_gradient_launch(
    operands: Operands, lse: Tensor, gradient: Tensor, means: Tensor, tiles: Tiles | None = None
) -> Launch:
    """A launch that writes the gradient of the key (B, Hkv, S, D). `means` is a result of the launch for the query."""
    key, tiles = operands.key, tiles or tiles_for("dk", operands)
    out = key.new_empty(key.shape, dtype=torch.float32)
    arguments = {
        **arguments_of(operands, tiles), **_gradient(operands, lse, gradient, tiles),
        **ranges_of_keys(operands), "means": means, "out": out,
    }  # fmt: skip
    programs = tiles_over(key.shape[2], tiles.keys) * key.shape[0] * key.shape[1]
    return Launch(key_gradient_kernel, programs, arguments, (out,))


def _gradient(operands: Operands, lse: Tensor, gradient: Tensor, tiles: Tiles) -> dict[str, Any]:
    """The arguments that both kernels of gradients have beside those of all kernels."""
    (batch, heads, length, dim), count = operands.query.shape, operands.key.shape[2]
    is_exact = operands.query.dtype == torch.float32 or torch.version.hip is not None
    g_b, g_h, g_l, g_s = gradient.expand(batch, heads, length, count).stride()
    return {
        "gradient": gradient.resolve_neg(), "g_b": g_b, "g_h": g_h, "g_l": g_l, "g_s": g_s,
        "share": gradient.shape[1] / heads, "lse": base_2(lse),
        # Three products of TF32 are about as exact as one of float32, and use matrix instructions.
        "PRECISION": "ieee" if is_exact else "tf32x3", **registers(tiles, 2 if dim <= 128 else 1),
    }  # fmt: skip
