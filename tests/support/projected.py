"""What a module's call gives by the formulas of attention, from the outputs of its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import clearhead

from .exact import Exact, exact_attention

B, L, E, H, KV, D = 2, 7, 24, 6, 3, 4


@dataclass(frozen=True)
class Option:
    """An option of a module or of its call.

    Args:
        parts: of the module.
        given: with the call.
        visible, bias: what the mask shows and adds, (1 or B, 1 or H, L, S).
        by_position: whether it means the same where tokens come one after another, or as documents.
    """

    parts: dict[str, Any]
    given: dict[str, Any]
    visible: Tensor | None = None
    bias: Tensor | None = None
    by_position: bool = True


@dataclass(frozen=True)
class Whole:
    """Results of a call: (B, L, E), and those of attention inside."""

    output: Tensor
    inside: Exact


def option(module: Any, width: int, item: Option) -> Any:
    """A module with an option, whose parameters are drawn."""
    made = module(width, H, num_kv_heads=KV, head_dim=D, dtype=torch.float64, **item.parts).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made.requires_grad_(False)


def operands(module: clearhead.MultiHeadAttention, x: Tensor, item: Option) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of self-attention, (B, H, L, D) and (B, Hkv, L, D)."""
    q = clearhead.split_heads(module.q_proj(x), H)
    k, v = (clearhead.split_heads(projection(x), KV) for projection in (module.k_proj, module.v_proj))
    q, k = (x if norm is None else norm(x) for x, norm in ((q, module.q_norm), (k, module.k_norm)))
    if module.position is not None:
        q, k = module.position(q, k, item.given.get("positions", 0))
    return q, k, v


def solved(module: clearhead.MultiHeadAttention, x: Tensor, item: Option) -> Whole:
    """The module's call of self-attention in float64."""
    options = {"scale": module.scale, "softcap": module.softcap, "sinks": module.sinks}
    inside = exact_attention(*operands(module, x, item), item.visible, bias=item.bias, **options)
    return Whole(module.out_proj(clearhead.merge_heads(inside.output)), inside)
