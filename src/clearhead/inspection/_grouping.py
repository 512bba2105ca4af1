"""Restores grouped heads, which transformers rearranges before it calls PyTorch's attention."""

from __future__ import annotations

from torch import Tensor, nn


def regroup(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    """Restore H query heads and Hkv key/value heads in a call of a transformers attention module.

    With grouped heads, transformers usually repeats keys and values for every query head. For a single query it moves
    the heads of a group into the query axis: (B, H, 1, D) → (B, Hkv, G, D).

    Args:
        module: the calling module. Modules of transformers have ``num_key_value_groups`` and a config.
        query, key, value, attn_mask: the arguments of PyTorch's attention.

    Returns:
        Query (B, H, L, D), key and value (B, Hkv, S, D), mask, and whether heads are grouped.
    """
    group = getattr(module, "num_key_value_groups", 1)
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if not isinstance(group, int) or group < 2 or heads is None or query.dim() != 4:
        return query, key, value, attn_mask, False
    batch, query_heads, rows, dim = query.shape
    if query_heads * group == heads and rows == group and key.shape[1] == query_heads:
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[2] == group:
            kv_heads = attn_mask.shape[1]
            attn_mask = attn_mask.reshape(attn_mask.shape[0], kv_heads * group, 1, -1)
            attn_mask = attn_mask[:, :1] if kv_heads == 1 else attn_mask
        return query.reshape(batch, heads, 1, dim), key, value, attn_mask, True
    if query_heads == heads and key.shape[1] == heads:
        return query, key[:, ::group], value[:, ::group], attn_mask, True
    return query, key, value, attn_mask, False
