"""Finds padding in the arguments of a model's call, so that padded queries do not count."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._call.call import AttentionCall
from .._statistics.arguments import counted_queries, query_marks
from .._statistics.totals import PartialCall, Totals
from ..errors import RecordError, shape_text
from ._naming import ModuleNames

#: Arguments with the padding of source and target. In each pair the first is 1 at real tokens, and the second is
#: ``True`` at padding.
_SOURCE = ("attention_mask", "src_key_padding_mask")
_TARGET = ("decoder_attention_mask", "tgt_key_padding_mask")
_DECODER_SIGNS = ("decoder_input_ids", "decoder_inputs_embeds", "tgt", *_TARGET)


class CountedQueries:
    """The counted queries of each attention call: those of `query_mask`, or those without padding.

    Padding is read once from the arguments of the root call, which is the call of the model. In an encoder–decoder
    model, the source's padding applies to modules with ``encoder`` in their name, and the target's to the others.

    Args:
        query_mask: bool or 0/1 (B, L); ``None`` to find padding.
        running: follows the model, and holds the arguments of its root call.
    """

    def __init__(self, query_mask: Tensor | None, running: ModuleNames) -> None:
        self._query_mask = None if query_mask is None else query_marks(query_mask)
        self._running = running
        self.forget()

    def of_call(self, name: str, call: AttentionCall, is_first: bool) -> Tensor | None:
        """The counted queries of the first or a later call of a module: bool (B, L), or ``None`` for all.

        Raises:
            RecordError: if several processes share the call, and the padding masks of only some of them fit. Every
                process raises it.
        """
        sizes = call.grid.batch_size, call.grid.query_length
        if self._query_mask is not None:
            if tuple(self._query_mask.shape) != sizes and not is_first:
                return None  # a later step has other sizes, and the first call passed the check
            return counted_queries(self._query_mask, call)
        mask = self._mask_of(name)
        if mask is None:
            return None
        if isinstance(call, PartialCall):
            return _of_shared_call(mask, call, call.totals)
        if mask.shape == sizes:
            return mask
        is_step = call.grid.query_length == self._input_length and call.grid.query_length < call.grid.key_length
        if mask.shape == (call.grid.batch_size, call.grid.key_length) and is_step:
            return mask[:, -call.grid.query_length :]  # in a decoding step the queries are the last keys
        return None

    def signature(self, name: str) -> Hashable:
        """A value that is equal on all processes. It omits sizes of root calls' masks, which may be full or split."""
        return self._mask_of(name) is not None if self._query_mask is None else tuple(self._query_mask.shape)

    def forget(self) -> None:
        """Release the tensors of the root call."""
        self._arguments: object = None
        self._source: Tensor | None = None
        self._target: Tensor | None = None

    def _mask_of(self, name: str) -> Tensor | None:
        """The mask of a module's queries in the root call."""
        if self._arguments is not self._running.root_arguments:
            self._read_root_call()
        return self._target if self._two_sided and "encoder" not in name.split(".") else self._source

    def _read_root_call(self) -> None:
        model, self._arguments = self._running.model, self._running.root_arguments
        named = _named(model, self._running.root_arguments)
        self._source = _read(named, *_SOURCE)
        self._target = _read(named, *_TARGET)
        # The encoder of an encoder–decoder model has the same config, but no decoder.
        has_decoder = any("decoder" in name.split(".") for name, _ in model.named_modules())
        is_both = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and has_decoder
        self._two_sided = bool(is_both) or any(named.get(name) is not None for name in _DECODER_SIGNS)
        # The first tensor that is no mask holds the tokens.
        tokens = (
            value
            for name, value in named.items()
            if isinstance(value, Tensor) and value.dim() >= 2 and name not in _SOURCE + _TARGET
        )
        self._input_length = next((value.shape[1] for value in tokens), None)


def _of_shared_call(mask: Tensor, call: AttentionCall, totals: Totals) -> Tensor | None:
    """The counted queries of a call that several processes share. The root call has the full mask, or its shard.

    If the root call has a mask on one process, it has one on every process. All of them make one exchange.
    """
    device, batch, length = call.query.device, call.grid.batch_size, call.grid.query_length
    rows = totals.rows(length, device)
    marks = torch.zeros(batch, length + 2, dtype=torch.uint8, device=device)
    fits = mask.shape[0] == batch and mask.shape[1] in (length, len(rows))
    if fits:
        tokens = mask.to(device, torch.uint8)
        marks[:, rows] = tokens[:, rows] if mask.shape[1] == length else tokens
    marks[:, length + fits] = 1  # the last two columns tell whether it misfits on a process, and fits on one
    marks = totals.largest(marks) != 0
    misfits, fitting = marks[:, length:].any(0).tolist()
    if misfits and fitting:
        expected = f"({batch}, {length}), or the part of it as the tokens are cut, in every process"
        got = f"{shape_text(mask.shape)} for {len(rows)} tokens in this one"
        fix = "Give record the whole one, as query_mask=."
        raise RecordError("the padding mask of the root call", expected=expected, got=got, fix=fix)
    return marks[:, :length] if fitting else None


def _named(model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """The arguments by name, with those inside ``**kwargs`` and inside a batch that is a dictionary."""
    args, kwargs = arguments
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError:
        return dict(kwargs)
    values = [item for value in bound.values() for item in (value if isinstance(value, tuple) else (value,))]
    batches: list[Mapping[str, Any]] = [value for value in values if isinstance(value, Mapping)]
    # If several batches have a mask, it is unknown which one applies to a call.
    names = Counter(name for batch in batches for name in batch)
    return {name: value for batch in batches for name, value in batch.items() if names[name] == 1} | bound


def _read(named: dict[str, Any], keep: str, drop: str) -> Tensor | None:
    """A padding mask as bool, ``True`` at real tokens."""
    for name in (keep, drop):
        mask = named.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and (name == keep or not mask.is_floating_point()):
            return mask != 0 if name == keep else mask == 0
    return None
