"""Finding a batch's padding in the arguments a model was called with, so that padded queries are not counted."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._call.call import AttentionCall
from ..errors import RecordError, shape_text

#: Arguments with the padding of the source and of the target: the first is 1 at real tokens, the second ``True`` at
#: padding.
_SOURCE = ("attention_mask", "src_key_padding_mask")
_TARGET = ("decoder_attention_mask", "tgt_key_padding_mask")
_DECODER_SIGNS = ("decoder_input_ids", "decoder_inputs_embeds", "tgt", *_TARGET)


class PaddingFinder:
    """Reads the root call of a model once and finds the real queries of each attention call.

    In an encoder–decoder model the source's padding is that of modules with ``encoder`` in their name, the target's of
    the others.

    Args:
        model: whose `forward` names its positional arguments.
        arguments: positional and keyword arguments of the root call.
    """

    def __init__(self, model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        named = _named(model, arguments)
        self._source = _read(named, *_SOURCE)
        self._target = _read(named, *_TARGET)
        # An encoder taken out of such a model still has its config, but no decoder.
        has_decoder = any("decoder" in name.split(".") for name, _ in model.named_modules())
        is_both = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and has_decoder
        self._two_sided = bool(is_both) or any(named.get(name) is not None for name in _DECODER_SIGNS)
        self._input_length = _input_length(named)

    def query_mask(self, name: str, batch_size: int, query_length: int, key_length: int) -> Tensor | None:
        """Bool (B, L) of real queries, or ``None`` if the root call has none."""
        mask = self._found(name)
        if mask is None or mask.shape[0] != batch_size:
            return None
        if mask.shape[1] == query_length:
            return mask
        is_step = query_length == self._input_length and query_length < key_length
        if mask.shape[1] == key_length and is_step:
            return mask[:, -query_length:]  # a decoding step: the queries are the last of the keys
        return None

    def query_mask_of_parts(self, name: str, call: AttentionCall) -> Tensor | None:
        """As `query_mask`, of a call of which there are parts; the root call has the whole mask, or that of its part.

        One exchange, if the root call has a mask: then it has one in every process.

        Raises:
            RecordError: in every process, if masks fit the call in some and not in others.
        """
        mask = self._found(name)
        if mask is None or call.part is None:
            return None
        totals, device = call.part.totals, call.query.device
        batch, length = call.grid.batch_size, call.grid.query_length
        rows = totals.rows(length, device)
        marks = torch.zeros(batch, length + 2, dtype=torch.uint8, device=device)
        fits = mask.shape[0] == batch and mask.shape[1] in (length, len(rows))
        if fits:
            own = mask.to(device, torch.uint8)
            marks[:, rows] = own[:, rows] if mask.shape[1] == length else own
        marks[:, length + fits] = 1  # the last two columns: whether it fits nowhere, and anywhere
        marks = totals.largest(marks) != 0
        misfits, fitting = marks[:, length:].any(0).tolist()
        if misfits and fitting:
            raise RecordError(
                "the padding mask of the root call",
                expected=f"({batch}, {length}), or the part of it as the tokens are cut, in every process",
                got=f"{shape_text(mask.shape)} for {len(rows)} tokens in this one",
                fix="Give record the whole one, as query_mask=.",
            )
        return marks[:, :length] if fitting else None

    def finds(self, name: str) -> bool:
        """Whether the root call has a mask of the queries of a module."""
        return self._found(name) is not None

    def _found(self, name: str) -> Tensor | None:
        return self._target if self._two_sided and "encoder" not in name.split(".") else self._source


def _named(model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    args, kwargs = arguments
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError:
        return dict(kwargs)
    batches = list(_mappings(bound.values()))  # of several with a mask each, none is that of every call inside
    names = Counter(name for batch in batches for name in batch)
    return {name: value for batch in batches for name, value in batch.items() if names[name] == 1} | bound


def _mappings(values: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Arguments with names of their own: ``**kwargs``, and a batch that is given as a dictionary."""
    for value in values:
        if isinstance(value, Mapping):
            yield value
        elif isinstance(value, tuple):
            yield from (each for each in value if isinstance(each, Mapping))


def _input_length(named: dict[str, Any]) -> int | None:
    """How many tokens the root call was given: the length of its first tensor that is no mask."""
    for name, value in named.items():
        if isinstance(value, Tensor) and value.dim() >= 2 and name not in _SOURCE + _TARGET:
            return value.shape[1]
    return None


def _read(named: dict[str, Any], keep: str, drop: str) -> Tensor | None:
    for name in (keep, drop):
        mask = named.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and (name == keep or not mask.is_floating_point()):
            return mask != 0 if name == keep else mask == 0
    return None
