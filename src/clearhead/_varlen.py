"""`attention_varlen`: packed sequences of different lengths, without padding."""

from __future__ import annotations

import math
from typing import Literal, overload

from torch import Tensor

from ._call.call import Call
from ._call.sequences import read_sequences
from ._checks import integer, strided
from ._environment import read_environment
from ._layer.plan import attend
from ._proxies import recorded_call
from .errors import ClearheadError, ShapeError, shape_text
from .masks._base import Mask
from .masks._tensors import as_mask


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several packed sequences, for Σ l·s of work instead of (Σ l)·(Σ s).

    ::

        sequence d has the queries cu_seqlens_q[d] … cu_seqlens_q[d + 1] − 1 and the keys cu_seqlens_k[d] … − 1
        query i attends to key j if both are in one sequence and the mask allows it

    The layout is that of FlashAttention's variable-length functions (Dao et al., 2022). Rules about positions count
    within each sequence: ``masks.causal()`` is top-left in each, and ``masks.sliding_window(…)`` ends at its borders.
    Tensors given to `masks.keep`, `drop` and `bias` line up with the rows and columns of all sequences, T × Tk.

    Args:
        query: (T, H, D), the T tokens of all sequences.
        key: (Tk, Hkv, D).
        value: (Tk, Hkv, Dv).
        cu_seqlens_q: integers (n + 1,), the first query of each of n sequences, and T.
        cu_seqlens_k: likewise for the keys, ending in Tk. A sequence may be empty.
        mask, scale, dropout_p, softcap, sinks, return_lse: as for `attention`.
        max_seqlen_q, max_seqlen_k: the most queries and keys of a sequence. A GPU needs them for speed, because the
            boundaries are not read from it. Default: T and Tk.

    Returns:
        (T, H, Dv). With `return_lse` also lse, (T, H). A query whose sequence has no key gets 0 and −∞. NaN or inf in
        one sequence reaches neither outputs nor gradients of another.

    Raises:
        ArgumentError: if boundaries do not begin at 0, decrease, or do not end at T (Tk). If a sequence is longer than
            `max_seqlen_q` or `max_seqlen_k`. On a GPU these values are not checked, because that would wait for it.
            If queries and keys have different numbers of sequences.
        ShapeError, DTypeError, DeviceError: as `attention`, and for boundaries of another kind.

    Example:
        >>> import torch, clearhead
        >>> x = torch.randn(7, 2, 4)  # sequences of 3 and 4 tokens, 2 heads
        >>> ends = torch.tensor([0, 3, 7])
        >>> packed = clearhead.attention_varlen(x, x, x, ends, ends, clearhead.masks.causal())
        >>> alone = clearhead.attention(*(x[3:].transpose(0, 1),) * 3, clearhead.masks.causal())
        >>> torch.allclose(packed[3:], alone.transpose(0, 1), atol=1e-6)
        True
    """
    try:
        _require_packed(query=query, key=key, value=value)
        for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if longest is not None:
                integer(name, longest, least=0, most=math.inf)
        sequences = read_sequences(cu_seqlens_q, cu_seqlens_k, query, key, (max_seqlen_q, max_seqlen_k))
        options = as_mask(mask), scale, softcap, sinks, dropout_p
    except ClearheadError as error:
        return recorded_call(attention_varlen, error, locals())
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # (1, H, T, D), (1, Hkv, Tk, D) and (…, Dv)
    output, lse, _ = attend(Call(q, k, v, *options, lse=return_lse, sequences=sequences), read_environment())
    output = output.squeeze(0).transpose(0, 1)  # (T, H, Dv)
    return output if lse is None else (output, lse.squeeze(0).transpose(0, 1))


def _require_packed(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if strided(name, tensor).dim() != 3:
            fix = "Batches with padding go into clearhead.attention; here sequences lie end to end."
            heads = "(T, H, D)" if name == "query" else "(Tk, Hkv, D)"
            raise ShapeError(name, expected=heads, got=shape_text(tensor.shape), fix=fix)
