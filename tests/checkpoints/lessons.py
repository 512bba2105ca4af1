"""Multi-head attention the way lessons write it, one class per lesson, each with its own names and its own mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, L, D)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # (B, L, H·D)


class SelfAttentionLesson(nn.Module):
    """q_proj, k_proj, v_proj, o_proj; keys with `attention_mask == 0` get −inf."""

    def __init__(self, hidden_dim: int, nums_head: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.nums_head = nums_head
        self.head_dim = hidden_dim // nums_head
        self.q_proj = nn.Linear(hidden_dim, hidden_dim)
        self.k_proj = nn.Linear(hidden_dim, hidden_dim)
        self.v_proj = nn.Linear(hidden_dim, hidden_dim)
        self.o_proj = nn.Linear(hidden_dim, hidden_dim)
        self.att_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (split(proj(x), self.nums_head) for proj in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask == 0, float("-inf"))
        return self.o_proj(merge(self.att_dropout(scores.softmax(-1)) @ v))


class TransformerLesson(nn.Module):
    """w_q, w_k, w_v, w_o; keys with `mask == 0` get −1e9, so that a row that hides all of them is uniform."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (split(p(x), self.num_heads) for p, x in ((self.w_q, query), (self.w_k, key), (self.w_v, value)))
        scores = torch.matmul(q, k.transpose(-2, -1)) / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.w_o(merge(torch.matmul(scores.softmax(dim=-1), v)))


class DiveLesson(nn.Module):
    """W_q, W_k, W_v, W_o without biases; `valid_lens` of shape (B,) or (B, L) says how many keys may be seen."""

    def __init__(
        self,
        key_size: int,
        query_size: int,
        value_size: int,
        num_hiddens: int,
        num_heads: int,
        dropout: float,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)
        self.W_q = nn.Linear(query_size, num_hiddens, bias=bias)
        self.W_k = nn.Linear(key_size, num_hiddens, bias=bias)
        self.W_v = nn.Linear(value_size, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        q = split(self.W_q(queries), self.num_heads)
        k = split(self.W_k(keys), self.num_heads)
        v = split(self.W_v(values), self.num_heads)
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, L, S)
        if valid_lens is not None:
            limits = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens  # (B, 1 or L)
            hidden = torch.arange(k.shape[2]) >= limits[:, None, :, None]  # (B, 1, 1 or L, S)
            scores = scores.masked_fill(hidden, -1e6)
        return self.W_o(merge(self.dropout(torch.softmax(scores, -1)) @ v))


class StepByStepLesson:
    """Four Linears, no module around them and no mask."""

    def __init__(self, size: int, heads: int, *, bias: bool = True) -> None:
        self.heads = heads
        self.to_queries, self.to_keys, self.to_values, self.combine = (
            nn.Linear(size, size, bias=bias) for _ in range(4)
        )

    def double(self) -> StepByStepLesson:
        for linear in (self.to_queries, self.to_keys, self.to_values, self.combine):
            linear.double()
        return self

    def __call__(self, x: Tensor) -> Tensor:
        q, k, v = (split(linear(x), self.heads) for linear in (self.to_queries, self.to_keys, self.to_values))
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5, dim=-1)
        return self.combine(merge(torch.einsum("bhij,bhjd->bhid", weights, v)))


class VisionLesson(nn.Module):
    """qkv and proj, laid out as timm's Vision Transformers are."""

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, L, D) each
        weights = (q * q.shape[-1] ** -0.5 @ k.mT).softmax(-1)
        return self.proj(merge(self.attn_drop(weights) @ v))


class NanoLesson(nn.Module):
    """c_attn and c_proj as ordinary Linears, causal, with the mask in a buffer called `bias`."""

    def __init__(self, n_embd: int, n_head: int, block_size: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.ones(block_size, block_size).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part, self.n_head) for part in self.c_attn(x).chunk(3, dim=-1))
        visible = self.get_buffer("bias")[..., : x.shape[1], : x.shape[1]]
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(visible == 0, float("-inf"))
        return self.c_proj(merge(scores.softmax(-1) @ v))


class AnnotatedLesson(nn.Module):
    """A ModuleList of four, `h` for the number of heads, and −1e9."""

    def __init__(self, h: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.h = h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        inputs = zip(self.linears, (query, key, value), strict=False)
        q, k, v = (split(linear(x), self.h) for linear, x in inputs)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(mask.unsqueeze(1) == 0, -1e9)
        return self.linears[-1](merge(self.dropout(scores.softmax(-1)) @ v))
