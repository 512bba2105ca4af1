"""DeBERTa's classes for the life of an upgrade: disentangled attention without its scores in memory.

The attention modules of DeBERTa call no function of transformers, so `upgrade` gives them, and their encoders, the
classes of this file. An encoder then hands its layers a mask of keys instead of pairs, and no table of relative
positions. Where the kernel cannot run a call, both are made again and the code of transformers runs.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

from .._checks import PLAIN
from .._environment import read_environment
from ..kernels._disentangled import BUILT, disentangled_attention
from ..kernels._distance_buckets import DistanceBuckets, distance_buckets, reach_of
from ._classes import swap_class
from ._packed_row import running, sequences_of

Output = tuple[Tensor, Tensor | None]


class _Reachable(NamedTuple):
    """The buckets that texts of some length reach.

    Args:
        buckets: counted from the first of them.
        rows: of the embedding of relative positions.
    """

    buckets: DistanceBuckets
    rows: slice


@functools.lru_cache(256)
def _reachable(longest: int, span: int, bucket_size: int, most_distant: int) -> _Reachable:
    """The buckets of texts of at most `longest` tokens, among those of the distances −span to span − 1.

    Distances from `bucket_size` / 2 on share buckets, up to `most_distant`. With −1 they do not.
    """
    with torch.inference_mode(False), torch.device("cpu"):
        reach = reach_of(longest)
        distances = torch.arange(-reach, reach + 1)
        if bucket_size > 0 and most_distant > 0:
            distances = v2.make_log_bucket_position(distances, bucket_size, most_distant).long()
        all_buckets = (distances + span).clamp(0, 2 * span - 1)
        first, last = (int(all_buckets[reach + distance]) for distance in (1 - longest, longest - 1))
        buckets = distance_buckets(all_buckets.clamp(first, last) - first)
    return _Reachable(buckets, slice(first, last + 1))


class _Attention(nn.Module):
    """What the attention of both versions shares."""

    #: The class of transformers whose place a subclass takes.
    theirs: ClassVar[type[nn.Module]]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> Output:
        """As transformers' own, for a mask (B, 1, 1, L) of keys or the boundaries of a packed row."""
        module: Any = self
        packed = attention_mask.dim() == 1
        ordinary = output_attentions or query_states is not None or relative_pos is not None or rel_embeddings is None
        if packed or not (ordinary or self._cannot_run(hidden_states, attention_mask)):
            return self._attend(hidden_states, attention_mask, rel_embeddings), None
        if attention_mask.shape[-2] == 1:
            attention_mask = attention_mask * attention_mask.squeeze(-2).unsqueeze(-1)  # (B, 1, L, L)
        if relative_pos is None and module.relative_attention:
            queries = hidden_states if query_states is None else query_states
            relative_pos = self._relative_positions(queries, hidden_states)
        inputs = output_attentions, query_states, relative_pos, rel_embeddings
        return self.theirs.forward(self, hidden_states, attention_mask, *inputs)

    def _cannot_run(self, hidden_states: Tensor, attention_mask: Tensor) -> bool:
        """Whether the kernel has something against a padded call."""
        if type(hidden_states) not in PLAIN or not hidden_states.is_cpu or hidden_states.dtype is not torch.float32:
            return True
        if attention_mask.dim() != 4 or attention_mask.shape[1:3] != (1, 1):
            return True
        environment = read_environment()
        around = environment.tracing or environment.transformed or environment.dispatching or environment.autocast
        return around or environment.observed  # a record then sees, and says, that the weights are not Clearhead's

    def _attend(self, hidden_states: Tensor, attention_mask: Tensor, rel_embeddings: Any) -> Tensor:
        """The output (B, L, E), by the kernel."""
        module: Any = self
        query, key, value = self._heads_of(hidden_states)  # (B, H, L, D)
        visible = sequences = None
        longest = hidden_states.shape[1]
        if attention_mask.dim() == 1:
            sequences = sequences_of(query, key, attention_mask, attention_mask)
            longest = int(attention_mask.diff().max())
        elif not bool(attention_mask.all()):
            visible = attention_mask.bool()
        reachable = self._reachable(longest)
        of_queries, of_keys = self._vectors(module.pos_dropout(rel_embeddings)[reachable.rows])
        dropout: nn.Dropout = module.dropout
        output = disentangled_attention(
            query,
            key,
            value,
            of_queries,
            of_keys,
            reachable.buckets,
            scale=1 / float(v2.scaled_size_sqrt(query, self._terms())),  # which is float32 in any dtype
            visible=visible,
            sequences=sequences,
            dropout_p=dropout.p if dropout.training else 0.0,
        )
        if visible is not None:
            # Their masked queries attend to all keys alike. Some losses read them.
            output = torch.where(visible.mT, output, value.mean(2, keepdim=True))
        return output.transpose(1, 2).flatten(2)  # (B, L, E)

    def _heads(self, x: Tensor) -> Tensor:
        """(buckets, E) → (H, buckets, D)."""
        module: Any = self
        return x.unflatten(-1, (module.num_attention_heads, -1)).transpose(0, 1)

    def _relative_positions(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """As their encoder makes them."""
        raise NotImplementedError

    def _heads_of(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value (B, H, L, D)."""
        raise NotImplementedError

    def _vectors(self, rel_embeddings: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The vectors (H, buckets, D) of relative positions for queries and for keys."""
        raise NotImplementedError

    def _reachable(self, longest: int) -> _Reachable:
        raise NotImplementedError

    def _terms(self) -> int:
        """How many products a score is the sum of."""
        raise NotImplementedError


class DebertaV2Attention(_Attention, v2.DisentangledSelfAttention):
    """The attention of DeBERTa v2 and v3."""

    theirs = v2.DisentangledSelfAttention

    def _relative_positions(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        sizes = {"bucket_size": self.position_buckets, "max_position": self.max_relative_positions}
        return v2.build_relative_position(queries, keys, **sizes)

    def _heads_of(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projections = self.query_proj, self.key_proj, self.value_proj
        query, key, value = (each(hidden_states) for each in projections)
        heads = (self.num_attention_heads, -1)
        return tuple(x.unflatten(-1, heads).transpose(1, 2) for x in (query, key, value))  # pyright: ignore

    def _vectors(self, rel_embeddings: Tensor) -> tuple[Tensor | None, Tensor | None]:
        of_queries = of_keys = None
        if "c2p" in self.pos_att_type:
            of_queries = self._heads((self.key_proj if self.share_att_key else self.pos_key_proj)(rel_embeddings))
        if "p2c" in self.pos_att_type:
            of_keys = self._heads((self.query_proj if self.share_att_key else self.pos_query_proj)(rel_embeddings))
        return of_queries, of_keys

    def _reachable(self, longest: int) -> _Reachable:
        return _reachable(longest, self.pos_ebd_size, self.position_buckets, self.max_relative_positions)

    def _terms(self) -> int:
        return 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)


class DebertaAttention(_Attention, v1.DisentangledSelfAttention):
    """The attention of DeBERTa v1."""

    theirs = v1.DisentangledSelfAttention

    def _relative_positions(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        return v1.build_relative_position(queries, keys)

    def _heads_of(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = self.transpose_for_scores(self.in_proj(hidden_states))  # (B, H, L, 3 · D)
        query, key, value = projected.chunk(3, dim=-1)
        of_query, of_value = (self.transpose_for_scores(bias[None, None]) for bias in (self.q_bias, self.v_bias))
        return query + of_query, key, value + of_value

    def _vectors(self, rel_embeddings: Tensor) -> tuple[Tensor | None, Tensor | None]:
        of_queries = self._heads(self.pos_proj(rel_embeddings)) if "c2p" in self.pos_att_type else None
        of_keys = self._heads(self.pos_q_proj(rel_embeddings)) if "p2c" in self.pos_att_type else None
        return of_queries, of_keys

    def _reachable(self, longest: int) -> _Reachable:
        return _reachable(longest, self.max_relative_positions, -1, -1)

    def _terms(self) -> int:
        return 1 + len(self.pos_att_type)


class _Encoder(nn.Module):
    """What the encoders of both versions share."""

    theirs: ClassVar[type[nn.Module]]

    def get_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """The mask (B, 1, 1, L) of keys, or the boundaries of the texts of a packed row."""
        packed = running.packed
        if packed is not None and getattr(packed.encoder, "encoder", None) is self:
            return packed.boundaries
        if attention_mask.dim() <= 2 and self.has_our_attention():
            return attention_mask[:, None, None]
        return self.theirs.get_attention_mask(self, attention_mask)  # pyright: ignore

    def get_rel_pos(
        self, hidden_states: Tensor, query_states: Tensor | None = None, relative_pos: Tensor | None = None
    ) -> Tensor | None:
        """Only those of the caller: attention makes the others if it needs them."""
        if relative_pos is not None or self.has_our_attention():
            return relative_pos
        return self.theirs.get_rel_pos(self, hidden_states, query_states)  # pyright: ignore

    def has_our_attention(self) -> bool:
        """Whether no layer has another attention module, which would not read what this encoder hands out."""
        module: Any = self
        return all(isinstance(layer.attention.self, _Attention) for layer in module.layer)


class DebertaV2Encoder(_Encoder, v2.DebertaV2Encoder):
    """The encoder of DeBERTa v2 and v3."""

    theirs = v2.DebertaV2Encoder


class DebertaEncoder(_Encoder, v1.DebertaEncoder):
    """The encoder of DeBERTa v1."""

    theirs = v1.DebertaEncoder


_CLASSES: tuple[type[_Attention | _Encoder], ...] = (
    DebertaV2Attention,
    DebertaV2Encoder,
    DebertaAttention,
    DebertaEncoder,
)


def why_not_patched(model: nn.Module) -> str | None:
    """The reason why the attention of a DeBERTa stays transformers', or ``None``."""
    if not BUILT:
        return "its attention has only the native kernel, which was not built"
    for module in model.modules():
        if isinstance(module, (v1.DisentangledSelfAttention, v2.DisentangledSelfAttention)):
            why = _why_not(module)
            if why is not None:
                return why
    return None


def _why_not(attention: Any) -> str | None:
    if not attention.relative_attention or not {"c2p", "p2c"} & set(attention.pos_att_type):
        return "its scores have no relative positions"
    if getattr(attention, "talking_head", False):
        return "its heads mix their scores"
    if isinstance(attention, v2.DisentangledSelfAttention) and not _rises(attention):
        return "its buckets do not rise with the distance"
    return None


def _rises(attention: v2.DisentangledSelfAttention) -> bool:
    """Whether a greater distance never has a lower bucket, as very few buckets may."""
    bucket_size, most_distant = attention.position_buckets, attention.max_relative_positions
    if bucket_size < 1:
        return True
    buckets = v2.make_log_bucket_position(torch.arange(2 * most_distant), bucket_size, most_distant)
    return bool((buckets.diff() >= 0).all())


def patch(model: nn.Module) -> str | None:
    """Give the attention modules and encoders of a DeBERTa Clearhead's classes, or return the reason why not."""
    for ours in _CLASSES:
        for module in model.modules():
            if isinstance(module, ours.theirs) and not isinstance(module, ours):
                why = swap_class(module, ours.theirs, ours)
                if why is not None:
                    restore(model)
                    return why
    return None


def restore(model: nn.Module) -> None:
    """Undo `patch`."""
    for module in list(model.modules()):
        for ours in _CLASSES:
            if isinstance(module, ours):
                swap_class(module, ours, ours.theirs)


def is_patched(model: Any) -> bool:
    """Whether a DeBERTa's encoder and all its attention modules have these classes."""
    encoder = model.base_model.encoder
    return isinstance(encoder, _Encoder) and encoder.has_our_attention()
