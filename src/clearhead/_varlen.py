"""`attention_varlen`: documents of different lengths laid end to end, without padding."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from ._call.request import Request
from ._call.rows import read_rows
from ._checks import strided
from ._environment import read_environment
from ._layer.plan import attend
from .errors import ShapeError, shape_text
from .masks._base import Mask


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
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several documents that lie end to end, for Σ l·s of work instead of (Σ l)·(Σ s).

    ::

        document d has queries cu_seqlens_q[d] … cu_seqlens_q[d + 1] − 1 and keys cu_seqlens_k[d] … − 1;
        query i sees key j if both are of one document and the mask allows it

    (The layout of FlashAttention's variable-length functions, Dao et al., 2022.) Rules about positions count within
    each document: ``masks.causal()`` is top-left in each, ``masks.sliding_window(…)`` ends with it. Tensors given to
    `masks.keep`, `drop` and `bias` line up with the rows and columns of the whole, T × Tk.

    Args:
        query: (T, H, D), T tokens of all documents.
        key: (Tk, Hkv, D).
        value: (Tk, Hkv, Dv).
        cu_seqlens_q: integers (n + 1,): where each of n documents begins among the queries, and T.
        cu_seqlens_k: likewise among the keys, ending in Tk. A document may be empty.
        mask, scale, dropout_p, softcap, sinks, return_lse: as for `attention`.

    Returns:
        (T, H, Dv); with `return_lse` also (T, H). A query whose document has no key gets 0 and −∞. NaN or inf in one
        document never reaches another, in outputs or gradients.

    Raises:
        ArgumentError: if boundaries do not begin at 0, decrease, or do not end at T (Tk), or if there are not as many
            documents of keys as of queries.
        ShapeError, DTypeError, DeviceError: as `attention`, and for boundaries of another kind.

    Example:
        >>> import torch, clearhead
        >>> x = torch.randn(7, 2, 4)  # documents of 3 and 4 tokens, 2 heads
        >>> ends = torch.tensor([0, 3, 7])
        >>> found = clearhead.attention_varlen(x, x, x, ends, ends, clearhead.masks.causal())
        >>> alone = clearhead.attention(*(x[3:].transpose(0, 1),) * 3, clearhead.masks.causal())
        >>> torch.allclose(found[3:], alone.transpose(0, 1), atol=1e-6)
        True
    """
    _require_packed(query=query, key=key, value=value)
    rows = read_rows(cu_seqlens_q, cu_seqlens_k, query, key)
    request = Request(mask, scale, softcap, sinks, dropout_p, lse=return_lse, rows=rows)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # (1, H, T, D), (1, Hkv, Tk, D) and (…, Dv)
    output, lse, _ = attend(q, k, v, request, read_environment())
    output = output.squeeze(0).transpose(0, 1)  # (T, H, Dv)
    return output if lse is None else (output, lse.squeeze(0).transpose(0, 1))


def _require_packed(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if strided(name, tensor).dim() != 3:
            fix = "Batches with padding go into clearhead.attention; here documents lie end to end."
            heads = "(T, H, D)" if name == "query" else "(Tk, Hkv, D)"
            raise ShapeError(name, expected=heads, got=shape_text(tensor.shape), fix=fix)
