"""The two functions of flash-attn, `flash_attn_func` and `flash_attn_varlen_func`, on `attention`.

Libraries look for these names and arguments. As in flash-attn since 2.1, the last query is at the last key, and a
window counts from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import masks
from .._attention import attention
from .._call.sequences import read_sequences
from .._environment import is_tracing
from .._varlen import attention_varlen
from ..errors import ArgumentError
from ..masks._base import Mask

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of a batch, with the arguments of flash-attn's function.

    Args:
        q: (B, L, H, D).
        k: (B, S, Hkv, D).
        v: (B, S, Hkv, Dv).
        dropout_p: probability that a weight is dropped. Default 0.
        softmax_scale: factor of the scores. Default 1/√D.
        causal: query i attends to keys j ≤ i + S − L. Default False.
        window_size: how many keys before and after its own position a query attends to; −1 for all. Default all.
        softcap: c of c·tanh(s/c), and 0 for none. Default 0.
        deterministic: without effect, because Clearhead's kernels are.
        s_aux: (H,) sink logits.

    Returns:
        (B, L, H, Dv).

    Raises:
        ClearheadError: for invalid arguments, as `clearhead.attention`.

    Example:
        >>> import torch
        >>> from clearhead.backend import flash_attn_func
        >>> x = torch.randn(2, 5, 4, 8)
        >>> flash_attn_func(x, x, x, causal=True).shape
        torch.Size([2, 5, 4, 8])
    """
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, L, D), (B, Hkv, S, D or Dv)
    shift, mask = k.shape[1] - q.shape[1], _mask(causal, window_size, q.shape[1] + k.shape[1])
    # Positions are at least 0, so the longer side begins at 0.
    aligned: dict[str, Any] = {"query_positions": max(0, shift), "key_positions": max(0, -shift)}
    options = aligned if mask is not None and shift else {}
    numbers: dict[str, Any] = {"scale": softmax_scale, "dropout_p": dropout_p, "softcap": softcap or None}
    output = attention(query, key, value, mask, sinks=s_aux, **numbers, **options)
    return output.transpose(1, 2)  # (B, L, H, Dv)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention within packed sequences, with the arguments of flash-attn's function.

    Args:
        q: (T, H, D), the tokens of all sequences.
        k: (Tk, Hkv, D).
        v: (Tk, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: integers (n + 1,), where sequences begin and the last ends.
        max_seqlen_q, max_seqlen_k: the most queries and keys of a sequence, which only a GPU reads.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic, s_aux: as for `flash_attn_func`, within
            each sequence.

    Returns:
        (T, H, Dv).

    Raises:
        ClearheadError: for invalid arguments, as `clearhead.attention_varlen`.

    Example:
        >>> import torch
        >>> from clearhead.backend import flash_attn_varlen_func
        >>> x, ends = torch.randn(7, 4, 8), torch.tensor([0, 3, 7])
        >>> flash_attn_varlen_func(x, x, x, ends, ends, causal=True).shape
        torch.Size([7, 4, 8])
    """
    mask = _mask(causal, window_size, q.shape[0] + k.shape[0])
    options: dict[str, Any] = {"scale": softmax_scale, "dropout_p": dropout_p, "softcap": softcap or None}
    same = cu_seqlens_k is cu_seqlens_q
    if mask is not None and not same:
        if is_tracing() or not cu_seqlens_q.is_cpu:
            fix = "Pass one tensor as both, if queries and keys have the same boundaries."
            expected = "cu_seqlens_q itself with causal or a window, in a graph and on a GPU, where no value is read"
            raise ArgumentError("cu_seqlens_k", expected=expected, got="another tensor", fix=fix)
        same = q.shape[0] == k.shape[0] and torch.equal(cu_seqlens_q, cu_seqlens_k)
    if mask is None or same:
        boundaries = cu_seqlens_q, cu_seqlens_q if same else cu_seqlens_k
        longest: dict[str, Any] = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k} if q.is_cuda else {}
        return attention_varlen(q, k, v, *boundaries, mask, sinks=s_aux, **options, **longest)
    outputs: list[Tensor] = []
    for rows, keys in read_sequences(cu_seqlens_q, cu_seqlens_k, q, k).slices():
        operands = q[None, rows], k[None, keys], v[None, keys]
        numbers = dropout_p, softmax_scale, causal, window_size, softcap, deterministic, s_aux
        outputs.append(flash_attn_func(*operands, *numbers)[0])
    return torch.cat(outputs)


def _mask(is_causal: bool, window_size: Sequence[int], farthest: int) -> Mask | None:
    left, right = window_size
    if is_causal:
        right = 0
    if left < 0 and right < 0:
        return None
    if left < 0 and right == 0:
        return masks.causal()
    return masks.sliding_window(farthest if left < 0 else left, farthest if right < 0 else right)
