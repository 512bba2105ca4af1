"""Finds padding in the masks of attention and in the arguments of modules, so that padded queries do not count."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .._call.call import Call
from .._statistics.arguments import counted_queries, query_marks
from .._statistics.totals import PartialCall, Totals
from ..errors import RecordError, shape_text
from ..masks._grid import Grid
from ._flow import Flow
from ._naming import Frame, ModuleNames

#: Arguments with the padding of source and target. In each pair the first is 1 at real tokens, and the second is
#: ``True`` at padding.
_SOURCE = ("attention_mask", "src_key_padding_mask")
_TARGET = ("decoder_attention_mask", "tgt_key_padding_mask")
_DECODER_SIGNS = ("decoder_input_ids", "decoder_inputs_embeds", "tgt", *_TARGET)


class CountedQueries:
    """The counted queries of each attention call: those of `query_mask`, or those without padding.

    In self-attention over all of its tokens, padding is a key that the mask of the call hides from every query. In all
    attention, as in cross-attention and cached decoding, padding is what an argument of a running module marks, the
    innermost module first. Such a mask belongs to the tokens beside it, so it applies to queries computed from them.

    Args:
        query_mask: bool or 0/1 (B, L); ``None`` to find padding.
        running: follows the model, and holds the arguments of its running modules.
        flow: knows what tensors were computed from.
    """

    def __init__(self, query_mask: Tensor | None, running: ModuleNames, flow: Flow) -> None:
        self._query_mask = None if query_mask is None else query_marks(query_mask)
        self._running, self._flow = running, flow
        self._arguments: WeakKeyDictionary[Frame, _Arguments] = WeakKeyDictionary()

    def of_call(self, name: str, call: Call, query: Tensor, *, is_self: bool, is_first: bool) -> Tensor | None:
        """The counted queries of one call of a module: bool (B, L), or ``None`` for all.

        Args:
            name: the module's.
            call: the call.
            query: the tensor from which the query of the call was read.
            is_self: whether queries and keys are the same tokens.
            is_first: whether it is the module's first call.

        Raises:
            RecordError: if several processes share the call, and the padding masks of only some of them fit. Every
                process raises it.
        """
        grid = call.grid
        if self._query_mask is not None:
            if tuple(self._query_mask.shape) != (grid.batch_size, grid.query_length) and not is_first:
                return None  # a later step has other sizes, and the first call passed the check
            return counted_queries(self._query_mask, call)
        seen = _seen_keys(call) if is_self and grid.query_length == grid.key_length else None
        if isinstance(call, PartialCall):
            mask = self._of_root(name)
            marked = None if mask is None else _of_shared_call(mask, call, call.totals)
        else:
            marked = self._marked(name, query, grid)
        return seen if marked is None else marked if seen is None else seen & marked.to(seen.device)

    def _marked(self, name: str, query: Tensor, grid: Grid) -> Tensor | None:
        """The queries that are no padding by the innermost argument that marks padding."""
        for frame in reversed(self._running.frames):
            arguments = self._of_frame(frame)
            mask = arguments.fitted(name, grid)
            if mask is not None and self._flow.shares_origin(query, arguments.tokens):
                return mask
        return None

    def signature(self, name: str) -> Hashable:
        """A value that is equal on all processes. It omits sizes of root calls' masks, which may be full or split."""
        return self._of_root(name) is not None if self._query_mask is None else tuple(self._query_mask.shape)

    def _of_root(self, name: str) -> Tensor | None:
        frames = self._running.frames
        return self._of_frame(frames[0]).mask_of(name) if frames else None

    def _of_frame(self, frame: Frame) -> _Arguments:
        arguments = self._arguments.get(frame)
        if arguments is None:
            arguments = self._arguments[frame] = _Arguments(frame)
        return arguments


class _Arguments:
    """The padding masks among the arguments of one running module.

    In an encoder–decoder model, the source's padding applies to modules with ``encoder`` in their name, and the
    target's to the others.

    Attributes:
        tokens: the tokens that the masks mark; ``None`` if they are unknown.
    """

    def __init__(self, frame: Frame) -> None:
        named = _named(frame.module, (frame.args, frame.kwargs))
        self._prefix = f"{frame.name}." if frame.name else ""
        self._source = _read(named, *_SOURCE)
        self._target = _read(named, *_TARGET)
        # The encoder of an encoder–decoder model has the same config, but no decoder.
        has_decoder = any("decoder" in name.split(".") for name, _ in frame.module.named_modules())
        is_both = getattr(getattr(frame.module, "config", None), "is_encoder_decoder", False) and has_decoder
        self._two_sided = bool(is_both) or any(named.get(name) is not None for name in _DECODER_SIGNS)
        # The first tensor that is no mask holds the tokens.
        tokens = [
            value
            for name, value in named.items()
            if isinstance(value, Tensor) and value.dim() >= 2 and name not in _SOURCE + _TARGET
        ]
        self.tokens: Tensor | None = None if self._two_sided or not tokens else tokens[0]
        self._input_length = tokens[0].shape[1] if tokens else None

    def mask_of(self, name: str) -> Tensor | None:
        """The mask of a module's queries."""
        inside = name.removeprefix(self._prefix).split(".")
        return self._target if self._two_sided and "encoder" not in inside else self._source

    def fitted(self, name: str, grid: Grid) -> Tensor | None:
        """The mask of a module's queries, if it has their sizes."""
        mask, length = self.mask_of(name), grid.query_length
        if mask is None or mask.shape == (grid.batch_size, length):
            return mask
        is_step = length == self._input_length and length < grid.key_length
        if mask.shape == (grid.batch_size, grid.key_length) and is_step:
            return mask[:, -length:]  # in a decoding step the queries are the last keys
        return None


def _seen_keys(call: Call) -> Tensor | None:
    """The keys that are visible to some query in some head, bool (B, S), or ``None`` for all."""
    seen = call.coverage.keys
    if seen is None:
        return None
    return seen.any(1)[..., 0].expand(call.grid.batch_size, -1)  # (B, S)


def _of_shared_call(mask: Tensor, call: Call, totals: Totals) -> Tensor | None:
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
    marks = totals.maximum(marks) != 0
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
