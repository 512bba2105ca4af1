"""What libraries of Transformers compute with: x-transformers, and transformers' eager attention."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from .work import AttentionWork, Operands, Unsupported, Way, with_backward

__all__ = ["eager", "x_transformers"]

#: Eager attention holds several (B, H, L, S) tensors at a time; beyond this it is skipped.
MOST_SCORE_BYTES = 1.2e9


def x_transformers(work: AttentionWork, operands: Operands) -> Way:
    """The attention inside x-transformers, with ``flash=True``, its fast path, wherever that takes the call."""
    from x_transformers.attend import Attend

    attend = Attend(causal=work.causal, heads=work.heads, dropout=work.dropout_p, flash=work.mask != "float")
    attend.train(work.dropout_p > 0)
    if work.mask == "float":
        _require_memory(work)
    mask = operands.mask[None, None] if work.mask == "bool" and operands.mask is not None else None  # (1, 1, L, S)
    bias = operands.mask if work.mask == "float" else None

    def forward() -> Tensor:
        return attend(operands.query, operands.key, operands.value, mask=mask, attn_bias=bias)[0]

    return with_backward(forward, work, operands)


def eager(work: AttentionWork, operands: Operands) -> Way:
    """Transformers' ``attn_implementation="eager"``, with the additive masks that it builds."""
    from transformers.models.bert.modeling_bert import eager_attention_forward

    _require_memory(work)
    mask = operands.mask
    if work.causal:
        mask = torch.ones(work.length, work.keys, dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        hidden = torch.finfo(work.dtype).min
        mask = torch.zeros(mask.shape, dtype=work.dtype).masked_fill(~mask, hidden)
    module = SimpleNamespace(training=work.dropout_p > 0)

    def forward() -> Tensor:
        output, _ = eager_attention_forward(
            module, operands.query, operands.key, operands.value, mask, dropout=work.dropout_p
        )
        return output.transpose(1, 2)  # (B, H, L, Dv)

    return with_backward(forward, work, operands)


def _require_memory(work: AttentionWork) -> None:
    if work.score_bytes > MOST_SCORE_BYTES:
        raise Unsupported(f"it would hold several tensors of {work.score_bytes / 1e9:.1f} GB")
