"""`MultiHeadAttention`: project, split into heads, attend, merge, project back."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn

from .attention import attention, autocast_is_on
from .call import is_finite, is_probability, number
from .errors import ArgumentError, DeviceError, DTypeError, ShapeError, explain_problem, shape_text
from .heads import merge_heads, split_heads
from .masks.base import Mask
from .weights import attention_weights

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention, batch first, with weights on request.

    ::

        head_h = attention(query Wq_h, key Wk_h, value Wv_h);  output = concat(head_1 … head_H) Wo

    (Vaswani et al., "Attention is all you need", 2017.) The four projections are ordinary `Linear` submodules,
    called as modules, so hooks, LoRA and quantisation on them take effect, and each can be replaced.

    Args:
        embed_dim: E, the size of the output, and of the query unless `qdim` says otherwise.
        num_heads: H.
        num_kv_heads: Hkv, key/value heads; divides H. Default H.
        head_dim: D. Default E / H, which must then be whole.
        qdim: features of the query input. Default E.
        kdim: features of the key input. Default E.
        vdim: features of the value input. Default E.
        bias: whether query, key and value projections have a bias. Default True.
        out_bias: whether the output projection has one. Default as `bias`.
        scale: factor of the scores. Default 1/√D.
        dropout: probability that a weight is dropped in training. Default 0.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: for sizes that are not positive or do not divide, or dropout outside [0, 1].

    Example:
        >>> import torch, clearhead
        >>> attend = clearhead.MultiHeadAttention(embed_dim=12, num_heads=3)
        >>> x = torch.randn(2, 5, 12)
        >>> output, weights = attend(x, mask=clearhead.masks.causal(), need_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 5, 12]), torch.Size([2, 5, 5]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qdim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = _size("embed_dim", embed_dim)
        self.num_heads = _size("num_heads", num_heads)
        self.num_kv_heads = _size("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        self.head_dim = _head_dim(embed_dim, num_heads) if head_dim is None else _size("head_dim", head_dim)
        if num_heads % self.num_kv_heads:
            raise ArgumentError(
                explain_problem(
                    "num_kv_heads",
                    expected=f"a divisor of num_heads = {num_heads}",
                    got=str(num_kv_heads),
                    fix="Every key/value head serves the same number of query heads.",
                )
            )
        self.scale = None if scale is None else number("scale", scale, "a finite number, or None for 1/√D", is_finite)
        self.dropout = number("dropout", dropout, "a probability in [0, 1]", is_probability)
        inner, kv_inner = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qdim, kdim, vdim = (
            _size(name, embed_dim if size is None else size)
            for name, size in (("qdim", qdim), ("kdim", kdim), ("vdim", vdim))
        )
        self.q_proj = nn.Linear(qdim, inner, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(kdim, kv_inner, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(vdim, kv_inner, bias=bias, device=device, dtype=dtype)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(inner, embed_dim, bias=out_bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every projection from Xavier's uniform distribution and set biases to zero."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: Literal[False] = False,
        average_attn_weights: bool = True,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: Literal[True],
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from `query` to `key` and mix `value`.

        Args:
            query: (B, L, qdim), or (L, qdim) without a batch.
            key: (B, S, kdim). Default: the query, which makes it self-attention.
            value: (B, S, vdim). Default: the key.
            mask: from `clearhead.masks`, or a bool tensor with ``True`` = may attend. Default: everything visible.
            need_weights: also return the weights, before dropout. Default False.
            average_attn_weights: average them over the heads. Default True.

        Returns:
            Output (B, L, E); with `need_weights` also the weights, (B, L, S), or (B, H, L, S) if not averaged, in
            float32 (float64 for float64 inputs). A query that sees no key has zero weights and ``out_proj(0)``.

        Raises:
            ShapeError: if an input does not have the features its projection takes, or shapes disagree.
            ArgumentError: if `value` is given without `key`.
            And what `attention` raises.
        """
        key, value = _complete(query, key, value)
        _require_features("query", query, self.q_proj)
        _require_features("key", key, self.k_proj)
        _require_features("value", value, self.v_proj)
        _require_together(query, key, value)
        q = split_heads(self.q_proj(query), self.num_heads)  # (B, H, L, D)
        k = split_heads(self.k_proj(key), self.num_kv_heads)  # (B, Hkv, S, D)
        v = split_heads(self.v_proj(value), self.num_kv_heads)  # (B, Hkv, S, D)
        dropout_p = self.dropout if self.training else 0.0
        mixed = attention(q, k, v, mask, scale=self.scale, dropout_p=dropout_p)  # (B, H, L, D)
        output = self.out_proj(merge_heads(mixed))  # (B, L, E)
        if not need_weights:
            return output
        return output, attention_weights(q, k, mask, scale=self.scale, average_attn_weights=average_attn_weights)

    def extra_repr(self) -> str:
        kv = f", num_kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}{kv}, head_dim={self.head_dim}{dropout}"


def _complete(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
    if key is None:
        if value is not None:
            raise ArgumentError(
                explain_problem(
                    "key",
                    expected="a tensor, because value was given",
                    got="None",
                    fix="Leave both out for self-attention, or pass key too.",
                )
            )
        key = query
    return key, key if value is None else value


def _require_features(name: str, x: object, projection: nn.Module) -> None:
    """Raise unless a projection can take the input; a projection that is no plain `Linear` judges for itself."""
    if not isinstance(x, Tensor):
        raise DTypeError(explain_problem(name, expected="a torch.Tensor", got=type(x).__name__))
    if not x.is_floating_point():
        raise DTypeError(
            explain_problem(name, expected="a floating point tensor", got=str(x.dtype), fix="Embed token ids first.")
        )
    features = getattr(projection, "in_features", None)
    expected = features if isinstance(features, int) else "features"
    if x.dim() not in (2, 3) or (isinstance(features, int) and x.shape[-1] != features):
        raise ShapeError(
            explain_problem(
                name,
                expected=f"(B, length, {expected}), or (length, {expected}) without a batch",
                got=shape_text(x.shape),
                fix=f"The module is batch first; the features of the {name} input are set by {name[0]}dim=.",
            )
        )
    if type(projection) is not nn.Linear or autocast_is_on(x):
        return
    weight = projection.weight
    if x.dtype != weight.dtype:
        raise DTypeError(
            explain_problem(
                name,
                expected=f"the module's dtype {weight.dtype}",
                got=str(x.dtype),
                fix=f"Convert the input with .to({weight.dtype}), or the module.",
            )
        )
    if x.device != weight.device:
        raise DeviceError(
            explain_problem(
                name,
                expected=f"the module's device {weight.device}",
                got=str(x.device),
                fix="Move the input or the module with .to(...).",
            )
        )


def _require_together(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless the inputs belong to one batch and each key has its value."""
    if not query.dim() == key.dim() == value.dim():
        problem = "inputs that all have a batch, or none"
    elif query.dim() == 3 and not (query.shape[0] == key.shape[0] and key.shape[0] == value.shape[0]):
        problem = "equal batch sizes B"
    elif key.shape[-2] != value.shape[-2]:
        problem = "equal key and value lengths S"
    else:
        return
    got = f"query {shape_text(query.shape)}, key {shape_text(key.shape)}, value {shape_text(value.shape)}"
    fix = "Inputs are (B, length, features)."
    raise ShapeError(explain_problem("query, key, value", expected=problem, got=got, fix=fix))


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DTypeError(explain_problem(name, expected="an int ≥ 1", got=repr(value)))
    if value < 1:
        raise ArgumentError(explain_problem(name, expected="an int ≥ 1", got=str(value)))
    return value


def _head_dim(embed_dim: int, num_heads: int) -> int:
    if embed_dim % num_heads:
        raise ArgumentError(
            explain_problem(
                "embed_dim",
                expected=f"a multiple of num_heads = {num_heads}",
                got=str(embed_dim),
                fix="Choose other sizes, or set head_dim yourself.",
            )
        )
    return embed_dim // num_heads
