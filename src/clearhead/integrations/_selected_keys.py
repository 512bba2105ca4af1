"""The keys that the indexer of a transformers model selects, as a mask of Clearhead."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import masks
from .._checks import shown
from ..errors import ArgumentError, in_words_of


def selected_keys(module: Any, indices: Tensor | None, block_indices: Tensor | None) -> masks.Mask | None:
    """The mask of the keys that a layer selects besides those that its attention mask hides; ``None`` for all.

    Args:
        module: the layer. Its ``config.index_block_size`` is the number of keys in a block.
        indices: (B, L, k) numbers of keys.
        block_indices: (B, Hkv, L, k) numbers of blocks of keys, −1 for none.
    """
    mask = None if indices is None else _selected("indices", indices, 1)
    if block_indices is None:
        return mask
    size = getattr(getattr(module, "config", None), "index_block_size", None)
    if size is None:
        expected = "a layer whose config.index_block_size is the number of keys in a block"
        raise ArgumentError("block_indices", expected=expected, got=shown(type(module).__name__))
    blocks = _selected("block_indices", block_indices, size)
    return blocks if mask is None else mask & blocks


def pools_padding(module: Any) -> bool:
    """Whether an indexer of the layer's model scores blocks by all their tokens, padding included.

    What it selects then depends on the states of padded tokens, which are fully masked queries of earlier layers.
    """
    return hasattr(getattr(module, "config", None), "index_block_size")


def with_means_of_values(output: Tensor, lse: Tensor, value: Tensor) -> Tensor:
    """The output (B, H, L, Dv) with the mean of all values in fully masked rows, as ``eager`` computes them."""
    means = value.mean(2, keepdim=True).repeat_interleave(output.shape[1] // value.shape[1], 1)  # (B, H, 1, Dv)
    return output.where((lse > float("-inf"))[..., None], means)


def _selected(name: str, indices: Tensor, block: int) -> masks.Mask:
    try:
        return masks.selected(indices, block=block)
    except ArgumentError as error:
        raise in_words_of(error, {"indices": name, "block": "config.index_block_size"}) from error.__cause__
