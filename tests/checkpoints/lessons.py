"""Multi-head attention the way lessons write it: each class has its own names, its own mask and its own fill value."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        other = right[key]
        assert (tensor.dtype, tensor.device, tensor.shape) == (other.dtype, other.device, other.shape), key
        assert torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), key


def textbook_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, visible: Tensor | None = None, fill: float = float("-inf")
) -> Tensor:
    """Heads of projected queries, keys and values; scores where `visible` is 0 become `fill`."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # (B, H, L, D)
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, L, S)
    if visible is not None:
        scores = scores.masked_fill(visible == 0, fill)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)  # (B, L, H·D)


class SelfAttentionLesson(nn.Module):
    """q_proj, k_proj, v_proj, o_proj; keys with `attention_mask == 0` get −inf."""

    def __init__(self, hidden_dim: int, nums_head: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.nums_head = nums_head
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_dim, hidden_dim) for _ in range(4))
        self.att_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.o_proj(
            textbook_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.nums_head, attention_mask)
        )


class TransformerLesson(nn.Module):
    """w_q, w_k, w_v, w_o; keys with `mask == 0` get −1e9, so that a row that hides all of them is uniform."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.w_o(textbook_attention(self.w_q(query), self.w_k(key), self.w_v(value), self.num_heads, mask, -1e9))


class AnnotatedLesson(nn.Module):
    """A list of four Linears, and `h` for the number of heads."""

    def __init__(self, d_model: int, h: int) -> None:
        super().__init__()
        self.h, self.linears = h, nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v, _ = (linear(x) for linear, x in zip(self.linears, (query, key, value, value), strict=True))
        return self.linears[3](textbook_attention(q, k, v, self.h, mask))


class DiveLesson(nn.Module):
    """W_q, W_k, W_v, W_o without biases; `valid_lens` of shape (B,) or (B, L) says how many keys may be seen."""

    def __init__(
        self, key_size: int, query_size: int, value_size: int, num_hiddens: int, num_heads: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(0.5)
        sizes = (query_size, key_size, value_size, num_hiddens)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(size, num_hiddens, bias=bias) for size in sizes)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor) -> Tensor:
        limits = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens  # (B, 1 or L)
        visible = torch.arange(keys.shape[1]) < limits[:, None, :, None]  # (B, 1, 1 or L, S)
        return self.W_o(
            textbook_attention(self.W_q(queries), self.W_k(keys), self.W_v(values), self.num_heads, visible, -1e6)
        )


class VisionLesson(nn.Module):
    """qkv and proj, laid out as timm's Vision Transformers are."""

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=qkv_bias), nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1)).unbind(2)
        return self.proj(textbook_attention(q, k, v, self.num_heads))


class NanoLesson(nn.Module):
    """c_attn and c_proj as ordinary Linears, causal, with the mask in a buffer called `bias`."""

    def __init__(self, n_embd: int, n_head: int, block_size: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.ones(block_size, block_size).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        visible = self.get_buffer("bias")[..., : x.shape[1], : x.shape[1]]
        return self.c_proj(textbook_attention(*self.c_attn(x).chunk(3, dim=-1), self.n_head, visible))


class ConcatLesson(nn.Module):
    """w_q, w_k, w_v, w_concat."""

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.w_q, self.w_k, self.w_v, self.w_concat = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.w_concat(textbook_attention(self.w_q(q), self.w_k(k), self.w_v(v), self.n_head, mask, -1e4))


class TensorFlowLesson(nn.Module):
    """wq, wk, wv, dense."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.wq, self.wk, self.wv, self.dense = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.dense(textbook_attention(self.wq(q), self.wk(k), self.wv(v), self.num_heads, mask, -1e9))


class NormedLesson(nn.Module):
    """w_qs, w_ks, w_vs, fc, and the residual and the LayerNorm after them."""

    def __init__(self, n_head: int, d_model: int, d_k: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.w_qs, self.w_ks, self.w_vs = (nn.Linear(d_model, n_head * d_k, bias=False) for _ in range(3))
        self.fc = nn.Linear(n_head * d_k, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        attended = textbook_attention(self.w_qs(q), self.w_ks(k), self.w_vs(v), self.n_head, mask, -1e9)
        return self.layer_norm(self.fc(attended) + q)


class CrossLesson(nn.Module):
    """to_q, to_k and to_v without biases, or to_q and to_kv, and to_out with a dropout."""

    def __init__(self, query_dim: int, context_dim: int, heads: int, dim_head: int, *, fused: bool, last: bool) -> None:
        super().__init__()
        self.heads, self.fused, inner = heads, fused, heads * dim_head
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        if fused:
            self.to_kv = nn.Linear(context_dim, 2 * inner, bias=False)
        else:
            self.to_k, self.to_v = (nn.Linear(context_dim, inner, bias=False) for _ in range(2))
        out = nn.Linear(inner, query_dim)
        self.to_out = nn.Sequential(out, nn.Dropout(0.0)) if last else out

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        k, v = self.to_kv(context).chunk(2, -1) if self.fused else (self.to_k(context), self.to_v(context))
        return self.to_out(textbook_attention(self.to_q(x), k, v, self.heads))


class PatchLesson(nn.Module):
    """to_qkv and to_out."""

    def __init__(self, dim: int, heads: int, dim_head: int, *, last: bool) -> None:
        super().__init__()
        self.heads = heads
        self.to_qkv, out = nn.Linear(dim, 3 * heads * dim_head, bias=False), nn.Linear(heads * dim_head, dim)
        self.to_out = nn.Sequential(out, nn.Dropout(0.0)) if last else out

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(textbook_attention(*self.to_qkv(x).chunk(3, -1), self.heads))


class FusedLesson(nn.Module):
    """query_key_value and dense: by heads as in GPT-NeoX and BLOOM, or all queries first."""

    def __init__(self, hidden_size: int, num_attention_heads: int, *, by_head: bool, bias: bool = True) -> None:
        super().__init__()
        self.num_attention_heads, self.by_head = num_attention_heads, by_head
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.dense = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.query_key_value(x)
        if self.by_head:
            heads = mixed.unflatten(-1, (self.num_attention_heads, -1)).chunk(3, -1)  # (B, L, H, D) each
            q, k, v = (part.flatten(-2) for part in heads)
        else:
            q, k, v = mixed.chunk(3, -1)
        return self.dense(textbook_attention(q, k, v, self.num_attention_heads))


class Head(nn.Module):
    """One head, which has its own Linears and a mask."""

    def __init__(self, names: str, n_embd: int, head_size: int, block_size: int, bias: bool) -> None:
        super().__init__()
        self.names = names.split()
        for name in self.names:
            self.add_module(name, nn.Linear(n_embd, head_size, bias=bias))
        self.register_buffer("tril", torch.ones(block_size, block_size).tril())

    def forward(self, x: Tensor) -> Tensor:
        visible = self.get_buffer("tril")[: x.shape[1], : x.shape[1]]
        return textbook_attention(*(self.get_submodule(name)(x) for name in self.names), 1, visible)


class HeadsLesson(nn.Module):
    """A list of heads, and a projection of their outputs."""

    def __init__(self, names: str, output: str, num_heads: int, n_embd: int, head_size: int, bias: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(names, n_embd, head_size, 32, bias) for _ in range(num_heads))
        self.output = output
        self.add_module(output, nn.Linear(num_heads * head_size, n_embd))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.output)(torch.cat([head(x) for head in self.heads], -1))
