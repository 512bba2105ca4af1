"""What PyTorch itself brings: SDPA, and FlexAttention compiled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .work import AttentionWork, Operands, Unsupported, Way, with_backward

__all__ = ["flex", "sdpa"]


def sdpa(work: AttentionWork, operands: Operands) -> Way:
    def forward() -> Tensor:
        return F.scaled_dot_product_attention(
            operands.query,
            operands.key,
            operands.value,
            attn_mask=operands.mask,
            dropout_p=work.dropout_p,
            is_causal=work.causal,
        )

    return with_backward(forward, work, operands)


def flex(work: AttentionWork, operands: Operands) -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if work.dropout_p > 0:
        raise Unsupported("it has no dropout")
    if work.backward:
        raise Unsupported("PyTorch has no backward pass for it on CPUs")
    # Every shape is compiled for itself, and the compiler gives up after a few shapes of one function.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    mask, score_mod, block_mask = operands.mask, None, None
    if work.causal:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, work.length, work.keys, device="cpu")
    elif work.mask == "bool":
        block_mask = create_block_mask(lambda b, h, i, j: mask[i, j], None, None, work.length, work.keys, device="cpu")
    elif work.mask == "float":

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + mask[i, j]

    def forward() -> Tensor:
        return compiled(operands.query, operands.key, operands.value, score_mod=score_mod, block_mask=block_mask)

    return with_backward(forward, work, operands)
