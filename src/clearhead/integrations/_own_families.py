"""Attention of transformers that computes its softmax itself, by family: its projections, and our attention.

`_own_attention` makes a subclass of a class of transformers and one of these, which comes first. `super().forward` is
therefore the forward of transformers.
"""

from __future__ import annotations

import math
import threading
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import transformers as _registered
from ._masks import carried_by
from ._packed_row import Row


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (B, L, H·D) → (B, H, L, D)


def _row_of(mask: Tensor | Row | None) -> Row | None:
    if isinstance(mask, Row):
        return mask
    carried = carried_by(mask)
    return None if carried is None else carried.row


def _attend(
    module: nn.Module, heads: list[Tensor], mask: Tensor | Row | None, dropout: float, wanted: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The merged output (B, L, H·Dv) of query, key and value (B, H, L, D), and the weights if they are wanted."""
    row = _row_of(mask)
    if row is not None:
        options |= {"cu_seq_lens_q": row.boundaries, "cu_seq_lens_k": row.boundaries}
        mask = None
    options |= {"dropout": dropout, "output_attentions": wanted}
    output, weights = ALL_ATTENTION_FUNCTIONS[_registered.NAME](module, *heads, mask, **options)
    return output.flatten(2), weights


class Bert(nn.Module):
    """RemBERT and Megatron-BERT: the projections of BERT, and a cache."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        sinusoidal_pos: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if encoder_hidden_states is not None:
            others |= {} if sinusoidal_pos is None else {"sinusoidal_pos": sinusoidal_pos}
            others |= {"past_key_values": past_key_values, "output_attentions": output_attentions}
            others |= {"attention_mask": attention_mask, "encoder_hidden_states": encoder_hidden_states}
            return cast(Any, super()).forward(hidden_states, **others)
        heads = [_heads(part(hidden_states), self.attention_head_size) for part in (self.query, self.key, self.value)]
        if sinusoidal_pos is not None:
            rotated = len(heads) if self.rotary_value else 2
            heads[:rotated] = self.apply_rotary_position_embeddings(sinusoidal_pos, *heads[:rotated])
        if past_key_values is not None:
            heads[1:] = _cached(past_key_values, heads[1], heads[2], self.layer_idx)
        return _attend(self, heads, attention_mask, self.dropout.p, output_attentions)


def _cached(cache: Any, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """The keys and values (B, H, S, D) of a layer, with those of earlier calls."""
    return getattr(cache, "self_attention_cache", cache).update(key, value, layer)


class _RunningRow(threading.local):
    def __init__(self) -> None:
        self.row: Row | None = None  # in each thread, so that a graph's guards on it hold


_running = _RunningRow()


class EncoderOfRows(nn.Module):
    """An encoder that computes what its layers share from positions. For a row these are those of its texts."""

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        row = _row_of(attention_mask)
        if row is None:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        _running.row = row
        try:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        finally:
            _running.row = None


class RoFormerPositions(nn.Module):
    """The table of RoFormer's rotations."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        row = _running.row
        return super().forward(*args, **kwargs) if row is None else super().forward((), 0, row.positions)


class MPNetEncoder(EncoderOfRows):
    """MPNet's bias by distance, (1, H, L, L) with L the longest text, without a copy for each item of the batch."""

    def compute_position_bias(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        row = _running.row
        longest = x[:1] if row is None else x[:, : row.longest]
        return cast(Any, super()).compute_position_bias(longest, *args, **kwargs)


class _Corners(torch.autograd.Function):
    """The first rows and columns of a bias (1, H, L, L), for each text. PyTorch's slices have a gradient of L² each."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
        ctx.sizes = bias.shape
        return tuple(bias[:, :, :length, :length] for length in lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].new_zeros(ctx.sizes)
        for gradient in gradients:
            length = gradient.shape[-1]
            total[:, :, :length, :length] += gradient
        return total, None


class MPNet(nn.Module):
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool | None = False,
        **others: Any,
    ) -> tuple[Tensor, ...]:
        heads = [_heads(part(hidden_states), self.attention_head_size) for part in (self.q, self.k, self.v)]
        row, dropout, weights = _row_of(attention_mask), self.dropout.p, None
        if row is None or position_bias is None:
            bias = {"position_bias": position_bias}
            output, weights = _attend(self, heads, attention_mask, dropout, output_attentions, **bias)
        else:  # a bias lines up with the tokens of one text
            texts = [[x[:, :, text] for x in heads] for text in row.slices]
            biases: Any = _Corners.apply(position_bias, [text[0].shape[2] for text in texts])
            outputs = [
                _attend(self, text, None, dropout, False, position_bias=bias)[0]
                for text, bias in zip(texts, biases, strict=True)
            ]
            output = torch.cat(outputs, 1)
        output = self.o(output)
        return (output, weights) if output_attentions and weights is not None else (output,)


class LayoutLMv3(nn.Module):
    """Its attention subtracts the largest score in another order, which changes nothing but the rounding."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        rel_2d_pos: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        heads = [_heads(part(hidden_states), self.attention_head_size) for part in (self.query, self.key, self.value)]
        bias: Any = rel_pos if self.has_relative_attention_bias else None
        if bias is not None and self.has_spatial_attention_bias:
            bias = bias + rel_2d_pos
        if bias is not None:
            bias = bias / math.sqrt(self.attention_head_size)
        return _attend(self, heads, attention_mask, self.dropout.p, None, position_bias=bias)


class Luke(nn.Module):
    """Words and entities have two queries each: one for words and one for entities.

    Both queries of a token lie side by side, and each key has zeros beside the other query. So one call adds up
    the scores of four.
    """

    def forward(
        self: Any,
        word_hidden_states: Tensor,
        entity_hidden_states: Tensor | None,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor | None, ...]:
        words, entities, size = word_hidden_states, entity_hidden_states, self.attention_head_size
        tokens = words if entities is None else torch.cat([words, entities], 1)
        key, value = _heads(self.key(tokens), size), _heads(self.value(tokens), size)
        if entities is None or not self.use_entity_aware_attention:
            query = _heads(self.query(tokens), size)
        else:
            for_words = torch.cat([self.query(words), self.e2w_query(entities)], 1)
            for_entities = torch.cat([self.w2e_query(words), self.e2e_query(entities)], 1)
            query = torch.cat([_heads(for_words, size), _heads(for_entities, size)], -1)  # (B, H, L, 2 · D)
            is_word = torch.arange(tokens.shape[1], device=tokens.device)[:, None] < words.shape[1]
            key = torch.cat([key.where(is_word, 0), key.where(~is_word, 0)], -1)
        options = {"scaling": 1 / math.sqrt(size)}
        output, weights = _attend(
            self, [query, key, value], attention_mask, self.dropout.p, output_attentions, **options
        )
        of_words, of_entities = output.tensor_split([words.shape[1]], 1)
        outputs = of_words, None if entities is None else of_entities
        return (*outputs, weights) if output_attentions else outputs


class XLM(nn.Module):
    """XLM and Flaubert: a mask of 0 and 1, (B, S) or (B, L, S), and a cache in every call."""

    def forward(
        self: Any,
        input: Tensor,
        mask: Tensor,
        kv: Tensor | None = None,
        cache: Any = None,
        output_attentions: bool | None = False,
        **others: Any,
    ) -> tuple[Tensor | None, ...]:
        if kv is not None:
            return cast(Any, super()).forward(input, mask, kv, cache, output_attentions, **others)
        heads = [_heads(part(input), self.head_dim) for part in (self.q_lin, self.k_lin, self.v_lin)]
        if isinstance(cache, Row):
            visible = cache
        else:
            visible = mask.ne(0).unsqueeze(1) if mask.dim() == 3 else mask.ne(0)[:, None, None]  # (B, 1, L or 1, S)
            if cache is not None:
                heads[1:] = _cached(cache, heads[1], heads[2], self.layer_id)
        output, weights = _attend(self, heads, visible, self.dropout, output_attentions)
        output = self.out_lin(output)
        return (output, weights) if output_attentions else (output,)
