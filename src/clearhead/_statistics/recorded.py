"""The base of records: statistics by module, and weights computed from saved calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._call.call import Call
from .._checks import index, is_probability, items, number, text
from .._weights import Queries, row_numbers
from ..errors import ArgumentError, DTypeError, ShapeError
from ..kernels._block_weights import block_weights
from ..kernels._blocks import block_scores, score_blocks
from ..kernels._weights import exact_weights
from .patch_layout import PatchLayout
from .result import AttentionStatistics
from .stacks import Sides, is_self, layers_in, layers_of, require_one_stack, require_same_side
from .summary import Summary, summarize

MOST_NAMED = 12  # tokens in an error


class RankedHead(NamedTuple):
    """One head, and its weight from the query to the key of `rank_heads`.

    Example:
        >>> RankedHead("encoder.layer.3.attention.self", 1, 0.68)
        <encoder.layer.3.attention.self head 1: 0.6800>
    """

    layer: str
    head: int
    weight: float

    def __repr__(self) -> str:
        return f"<{self.layer or 'the model itself'} head {self.head}: {self.weight:.4f}>"


class Recorded(Mapping[str, Sequence[AttentionStatistics]]):
    """A mapping from module names, in running order, to the statistics of the modules' calls."""

    __slots__ = ()

    @abstractmethod
    def name_of(self, layer: int | str) -> str:
        """The module name of a layer. `layer` is its number in running order, or its name."""

    def sides(self, layer: int | str) -> Sides | None:
        """The stacks of a layer's queries and keys, or ``None`` if they are unknown."""
        return None

    @abstractmethod
    def kept_call(self, layer: int | str, call: int = 0) -> Call:
        """The query, key and mask of one call. Its value is the key.

        Raises:
            RecordError: if queries and keys were not saved.
        """

    @abstractmethod
    def patches(self, layer: int | str) -> PatchLayout:
        """The positions of a vision model's tokens on its input, from the model's configuration.

        Raises:
            ArgumentError: if the model is not a supported vision model.
        """

    def weights(
        self, layer: int | str, head: int | None = None, queries: Queries | None = None, call: int = 0
    ) -> Tensor:
        """Compute exact weights of one call. The record needs ``keep="queries_keys"``.

        Args:
            layer: its number in running order, or its name.
            head: one head, or ``None`` for all.
            queries: the chosen queries. Default all.
            call: the number of the call of this module. Default the first.

        Returns:
            (B, n, S) for one head, else (B, H, n, S).

        Raises:
            RecordError: if queries and keys were not saved.
            ArgumentError: for a layer, head or row that does not exist.
        """
        saved = self.kept_call(layer, call)
        head = None if head is None else index("head", head, saved.grid.num_heads) % saved.grid.num_heads
        return exact_weights(saved, row_numbers(queries, saved.grid.query_length, "queries"), head)

    def rank_heads(
        self,
        query: int | str,
        key: int | str,
        *,
        tokens: Iterable[str] | None = None,
        key_tokens: Iterable[str] | None = None,
        item: int = 0,
        call: int = 0,
        layers: str | Sequence[int | str] | None = None,
    ) -> list[RankedHead]:
        """Rank the heads of all layers by their exact weight from one query to one key.

        The record needs ``keep="queries_keys"``.

        Args:
            query: the number of the query, or its text in `tokens`. Negative numbers count from the end.
            key: the number of the key, or its text in `key_tokens`. Negative numbers count from the end.
            tokens: the text of every query of the batch item, (L,): strings or `clearhead.plot.Tokens`. Default: none.
            key_tokens: the same of the keys, (S,). Default: `tokens`.
            item: the number of the batch item. Default the first.
            call: the number of the call of each layer. Default the first.
            layers: names and numbers of layers, or the name of a module with all of its layers. Default all.

        Returns:
            All heads, (layer, head, weight), largest weight first. Equal weights stay in running order.

        Raises:
            RecordError: if queries and keys were not saved.
            ArgumentError: for a query, key or batch item that a layer does not have, and for a text that no token or
                more than one token has, or if layers attend over other tokens than those that have the text.
            ShapeError: if there are not as many tokens as queries or keys.

        Example:
            >>> import torch, clearhead
            >>> attend = clearhead.MultiHeadAttention(embed_dim=12, num_heads=3)
            >>> with clearhead.record(attend, keep="queries_keys") as rec, torch.no_grad():
            ...     output, weights = attend(torch.randn(1, 3, 12), need_weights=True, average_attn_weights=False)
            >>> first = rec.rank_heads("tired", "it", tokens=["it", "was", "tired"])[0]
            >>> first.head == int(weights[0, :, 2, 0].argmax())
            True
        """
        texts = _texts("tokens", tokens), _texts("key_tokens", tokens if key_tokens is None else key_tokens)
        ranked: list[RankedHead] = []
        chosen = self._chosen(layers)
        if isinstance(query, str):
            require_same_side(self, chosen, "query", "queries")
        if isinstance(key, str):
            require_same_side(self, chosen, "key", "keys")
        for layer in chosen:
            grid = self.kept_call(layer, call).grid
            row = _place("query", query, "tokens", texts[0], grid.query_length)
            column = _place("key", key, "tokens" if key_tokens is None else "key_tokens", texts[1], grid.key_length)
            place = index("item", item, grid.batch_size) % grid.batch_size
            weights = self.weights(layer, queries=[row], call=call)[place, :, 0, column]  # (H,)
            ranked += [RankedHead(layer, head, weight) for head, weight in enumerate(weights.tolist())]
        return sorted(ranked, key=lambda place: place.weight, reverse=True)

    def rollout(
        self,
        targets: Sequence[int] | Tensor,
        *,
        layers: str | Sequence[int | str] | None = None,
        residual: float = 0.5,
        call: int = 0,
    ) -> Tensor:
        """Attention rollout from target tokens of the last layer to the input. It needs ``keep="queries_keys"``.

        ::

            r ← residual · r + (1 − residual) · r A_l    for l = last … first

        A_l is the mean of layer l's weights over heads. r starts with one-hot rows at the targets (Abnar and Zuidema,
        "Quantifying attention flow in Transformers", 2020). Each product r A_l is computed block by block.

        Args:
            targets: token numbers, (t,).
            layers: the layers, first to last, or the name of a module with all of its self-attention layers. Default
                all.
            residual: share of the residual connection. Default 0.5.
            call: the number of the call of each layer. Default the first.

        Returns:
            (B, t, L). Rows sum to 1 if every token sees a key.

        Raises:
            RecordError: if queries and keys were not saved.
            ShapeError: if the layers are not self-attention of one stack, such as the encoder of an encoder–decoder
                model or one tower of CLIP, or have different batch sizes.
            ArgumentError: for a target that does not exist, or a residual outside [0, 1].
        """
        chosen = self._chosen(layers, self_attention=True)
        calls = [self.kept_call(layer, call) for layer in chosen]
        residual = number("residual", residual, "a share in [0, 1]", is_probability)
        batch_size, length = _common_sizes(calls)
        require_one_stack(self, chosen)
        index = row_numbers(targets, length, "targets", "token numbers below")
        if index is None:
            raise DTypeError("targets", expected="token numbers", got="None")
        rows = calls[0].query.new_zeros(batch_size, len(index), length, dtype=calls[0].layout.compute_dtype)
        rows[:, torch.arange(len(index), device=index.device), index] = 1  # (B, t, L)
        with torch.no_grad():
            # From the last layer to the first, so that the products have t rows and not L.
            for each in reversed(calls):
                rows = residual * rows + (1 - residual) * _through(each, rows)
        return rows

    def _chosen(self, layers: str | Sequence[int | str] | None, *, self_attention: bool = False) -> list[str]:
        """Names of layers. The name of a module stands for its layers, or for those with `self_attention`."""
        if layers is None:
            return list(self)
        if not isinstance(layers, str):
            chosen = items("layers", layers, "a list of names or numbers")
            return [name for layer in chosen for name in layers_of(self, self.name_of(layer))]
        names = [name for name in layers_in(self, layers) if not self_attention or is_self(self, name)]
        if not names:
            expected = (
                f"a list of names or numbers, or a module with {'self-' * self_attention}attention that was recorded"
            )
            raise ArgumentError("layers", expected=expected, got=repr(layers))
        return names

    def summary(self) -> Summary:
        """One number per head for each statistic that has one. Print it for a layers × heads table."""
        return summarize(self)


def _texts(name: str, tokens: Iterable[str] | None) -> list[str] | None:
    return None if tokens is None else [text(name, token) for token in items(name, tokens, "a list of strings")]


def _place(name: str, token: int | str, option: str, texts: list[str] | None, count: int) -> int:
    """The number of one of `count` tokens, given by its number or by its text in `texts`, the argument `option`."""
    if not isinstance(token, str):
        return index(name, token, count) % count
    if texts is None:
        expected = f"a token's number, or {option}= beside its text"
        raise ArgumentError(name, expected=expected, got=f"{token!r} without {option}")
    if len(texts) != count:
        raise ShapeError(option, expected=f"{count}, one for each that the layers have", got=str(len(texts)))
    places = [place for place, known in enumerate(texts) if known == token]
    if len(places) != 1:
        where = f"{token!r} at {', '.join(map(str, places))}" if places else f"{token!r}, which is none of them"
        fix = (
            "Pass its number." if places else f"They are {', '.join(texts[:MOST_NAMED])}{', …' * (count > MOST_NAMED)}."
        )
        raise ArgumentError(name, expected=f"the text of one of {option}", got=where, fix=fix)
    return places[0]


def _common_sizes(calls: Sequence[Call]) -> tuple[int, int]:
    """B and L of self-attention calls over the same tokens."""
    if not calls:
        raise ArgumentError("layers", expected="at least one layer", got="none")
    batch_size, length = calls[0].grid.batch_size, calls[0].grid.query_length
    for place, call in enumerate(calls):
        if (call.grid.query_length, call.grid.key_length) != (length, length):
            raise ShapeError(
                "layers",
                expected=f"self-attention over the same L = {length} tokens in every layer",
                got=f"{call.grid.query_length} queries and {call.grid.key_length} keys in layer {place}",
                fix="Record or choose the self-attention layers of one stack only.",
            )
        if call.grid.batch_size != batch_size:
            raise ShapeError(
                "layers",
                expected=f"the same batch size B = {batch_size} in every layer",
                got=f"B = {call.grid.batch_size} in layer {place}",
                fix="A rollout needs the whole batch in every layer, not windows of an image.",
            )
    return batch_size, length


def _through(call: Call, rows: Tensor) -> Tensor:
    """The product r A, (B, t, L), with A the mean of the weights over heads."""
    result = torch.zeros_like(rows)
    for block, place, query, key in score_blocks(call):
        scores, _ = block_scores(call, block, query, key)
        weights, _ = block_weights(call, block, scores, overflows=True)
        product = rows[block.batch, None, :, place] @ weights  # (b, h, t, s)
        result[block.batch, :, block.columns] += product.sum(1) / call.grid.num_heads  # (b, t, s)
    return result
