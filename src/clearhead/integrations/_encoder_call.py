"""A call of an encoder of transformers, read by the names of its arguments."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor, nn

from .._call.sequences import PackedSequences, read_sequences
from .._environment import reads_values
from .._layer.tokens import RealTokens, find_tokens, sequences_between
from ._unpad_checks import OF_TOKENS, runs_in_one_kernel, takes_tokens

#: Arguments of a packed row. The boundaries are first.
_OF_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

#: Encoders that multiply their embeddings by the mask.
_SCALING = ("DebertaModel", "DebertaV2Model", "FlaubertModel", "XLMModel")


class EncoderCall(NamedTuple):
    """A call of an encoder that can run on one row.

    Args:
        tokens: the real tokens.
        arguments: (B, L, …), those of each token, with positions, and those that mean the same for one row.
        as_tuple: whether it returns a tuple.
        texts: the boundaries of a row that the caller has packed. Default: none.
    """

    tokens: RealTokens
    arguments: dict[str, Any]
    as_tuple: bool
    texts: PackedSequences | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it wants the last hidden states alone, without gradients of its inputs."""
        embedded = self.arguments.get("inputs_embeds")
        return not self.arguments.get("output_hidden_states") and (embedded is None or not embedded.requires_grad)

    def in_row(self) -> dict[str, Any]:
        """The arguments for one row (1, T, …)."""
        return {
            name: self.tokens.unpad(value)[None] if name in OF_TOKENS else value
            for name, value in self.arguments.items()
        }

    def sequences(self) -> PackedSequences:
        """The texts in the row."""
        return sequences_between(self.tokens, self.tokens, self.arguments["position_ids"].device)


def read_call(encoder: nn.Module, arguments: dict[str, Any]) -> EncoderCall | None:
    """The call, or ``None`` if it must run as it is."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    mask = arguments.pop("attention_mask", None)
    boundaries: list[Any] = [arguments.pop(name, None) for name in _OF_ROWS]
    if mask is None:
        tokens = arguments.get("input_ids", arguments.get("inputs_embeds"))
        mask = tokens[..., 0] if isinstance(tokens, Tensor) and tokens.dim() == 3 else tokens
        real = None
    else:
        real = mask
    if not is_padding(mask) or not takes_tokens(encoder, arguments, mask):
        return None
    if (mask.is_cuda and not runs_in_one_kernel(encoder)) or (mask.is_cpu and not reads_values(mask)):
        return None
    if real is not None and _scales_embeddings(encoder, mask):
        return None
    # Unlike `_layer/unpadding.py`, this compares no costs: all layers share one row, so packing always pays.
    tokens = find_tokens(None if real is None else real.bool(), mask.shape[0], mask.shape[1])
    config: Any = encoder.config
    arguments.setdefault("output_hidden_states", getattr(config, "output_hidden_states", False))
    return_dict = arguments.pop("return_dict", getattr(config, "return_dict", True))
    texts = None
    if boundaries[0] is not None or boundaries[1] is not None:  # as sentence-transformers packs texts
        if real is not None or "position_ids" not in arguments or not _are_of_one_row(boundaries, mask):
            return None
        row = mask[0, :, None]
        texts = read_sequences(cast(Tensor, boundaries[0]), cast(Tensor, boundaries[1]), row, row)
    arguments["position_ids"] = _positions(encoder, arguments, mask)
    return EncoderCall(tokens, arguments, return_dict is False, texts)


def _are_of_one_row(boundaries: list[Any], tokens: Tensor) -> bool:
    """Whether queries and keys have the same boundaries in a batch of one; the layers' own code refuses others."""
    first, second = boundaries[:2]
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or tokens.shape[0] != 1:
        return False
    return first is second or (first.shape == second.shape and torch.equal(first, second))


def _scales_embeddings(encoder: nn.Module, mask: Tensor) -> bool:
    """Whether an encoder multiplies its embeddings by a mask with other numbers than 0 and 1."""
    if type(encoder).__name__ not in _SCALING or mask.dtype == torch.bool or not mask.is_cpu:
        return False
    return bool(((mask != 0) & (mask != 1)).any())


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a model's forward, by name."""
    return dict(zip(_parameters(type(module)), args, strict=False)) | kwargs


@functools.cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of the positional arguments of a model's forward."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def is_padding(mask: object) -> TypeGuard[Tensor]:
    return type(mask) is Tensor and mask.dim() == 2 and (mask.is_cpu or mask.is_cuda) and mask.numel() > 0


def _positions(module: nn.Module, arguments: dict[str, Any], mask: Tensor) -> Tensor:
    """The positions (1 or B, L) of the tokens of the padded batch."""
    if "position_ids" in arguments:
        return arguments["position_ids"]
    # MPNet and descendants of RoBERTa count the tokens that are not the padding token.
    embeddings: Any = getattr(module, "embeddings", None)
    for owner in (embeddings, sys.modules[type(embeddings).__module__]):
        count = getattr(owner, "create_position_ids_from_input_ids", None)
        if count is not None and "input_ids" in arguments:
            return count(arguments["input_ids"], embeddings.padding_idx)
        if count is not None:
            return torch.arange(mask.shape[1], device=mask.device)[None] + embeddings.padding_idx + 1
    own = getattr(embeddings, "position_ids", None)
    if type(own) is Tensor and own.dim() == 2 and own.shape[0] == 1 and own.shape[1] >= mask.shape[1]:
        return own[:, : mask.shape[1]]
    return torch.arange(mask.shape[1], device=mask.device)[None]
