"""The recorder of a census: it adds the numbers of every call of a batch to the sums of its layer."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from functools import cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ..._call.call import Call
from ..._statistics.compute import compute_statistics
from ..._statistics.masses import Masses
from ..._statistics.patch_layout import PatchLayout
from ..._statistics.stacks import Sides
from ..._statistics.statistic import Options
from ..._statistics.totals import PartialCall
from ...errors import ArgumentError, RecordError
from ...kernels._weights import exact_weights
from .._chosen_layers import ChosenLayers
from .._naming import Frame, Layer
from .._patch_layout import find_layout
from .._recorder import Recorder
from ._calls import Padded, Tokens, as_padded, having, masses_of
from ._metrics import NAMES, STATISTICS, Counted
from ._moments import Moments, Values

_STATISTICS = (*(metric.name for metric in STATISTICS), "mass")
_DISTANCE = NAMES.index("distance")
#: Arguments of modules that hold integers but no tokens.
_NO_TOKENS = ("mask", "position", "type_ids", "cu_seq")


class _Seen(NamedTuple):
    """What the calls of a batch over the same tokens share. It is found by the ids of `of`, which it keeps alive."""

    masses: Masses
    having: Tensor
    of: tuple[object, ...]


@final
class Counting(Recorder):
    """Adds up the calls of one batch after another. A batch counts as a whole, or not at all.

    Args:
        model: the model.
        layers: the layers to count.
        counted: what to count.
        resumed: whether all batches may have been counted before.
    """

    def __init__(self, model: nn.Module, layers: ChosenLayers, counted: Counted, *, resumed: bool = False) -> None:
        super().__init__(model, layers, None)
        self._options, self._nothing_left = counted, resumed
        self.moments: dict[Layer, Moments] = {}
        self._batch: list[tuple[Layer, Moments]] = []
        self._shared: dict[Hashable, _Seen] = {}
        self._tokens_of_stack: dict[int, Tensor] = {}
        self._first_text = 0
        self._texts = 0
        self._tokens: dict[Layer, int] = {}
        self._layout = cache(self._find_layout)

    @property
    def names(self) -> dict[str, Moments]:
        """The sums by the names of the layers, in running order."""
        return {name: self.moments[layer] for name, layer in self._layers.names.items() if layer in self.moments}

    @property
    def _layers_seen(self) -> Collection[Layer]:
        return self.moments or {layer: None for layer, _ in self._batch}

    def wanted(self) -> Hashable:
        """Refuse calls that are split over processes."""
        expected, fix = "a model that one process runs", "Take the census before the model is split."
        raise RecordError("census", expected=expected, got="one that is split over processes", fix=fix)

    def begin(self, first_text: int) -> None:
        """Begin a batch. Its texts are numbered from here on."""
        self._batch, self._tokens, self._first_text, self._texts = [], {}, first_text, 0
        self._picture_size = None  # each batch may have its own
        self._nothing_left = False
        self._shared.clear()
        self._tokens_of_stack.clear()

    def report_unseen(self) -> None:
        """As of other recorders, unless there was nothing left to run."""
        if not self._nothing_left:
            super().report_unseen()

    def finish(self) -> tuple[int, int]:
        """Add the batch to the sums. Returns its numbers of texts, and of tokens in the layer with the most."""
        for layer, moments in self._batch:
            known = self.moments.get(layer)
            if known is not None and known.count.shape != moments.count.shape:
                heads = f"{known.count.shape[1]} heads in every batch"
                raise ArgumentError(f"layer {layer.module!r}", expected=heads, got=str(moments.count.shape[1]))
            self.moments[layer] = moments if known is None else known.merged(moments)
        self._batch = []
        self._shared.clear()
        return self._texts, max(self._tokens.values(), default=0)

    def _receive(self, layer: Layer, query: Tensor, call: Call, sides: Sides, output: Tensor | None) -> None:
        running = self._running.model.get_submodule(layer.module)
        if isinstance(call, PartialCall) or getattr(running, "head_shard", None) is not None:
            self.wanted()
        is_self = sides.queries == sides.keys
        counted = self._counted_queries.of_call(layer.module, call, query, is_self=is_self, is_first=True)
        layout = self._layout(layer.module, self._picture_size, call.grid.query_length, call.grid.key_length)
        padded = as_padded(call, counted)
        tokens = self._tokens_of(padded, sides, layout)
        values = self._values(padded, tokens, layout, _norms(padded, call, output))
        self._batch.append((layer, Moments.of(values, self._options.strongest)))
        self._tokens[layer] = self._tokens.get(layer, 0) + int(values.marks[0].any(1).sum())

    def _values(self, padded: Padded, tokens: Tokens, layout: PatchLayout | None, norms: Tensor | None) -> Values:
        call = padded.call
        seen = self._masses(call, tokens)
        options, found = Options(masses=seen.masses, exact=False), {} if norms is None else {"output_norm": norms}
        computed = compute_statistics(call, [x for x in _STATISTICS if x not in found], options, padded.counted)
        results: dict[str, Tensor] = {**computed.results, **found}
        statistics = torch.stack([results[metric.name] for metric in STATISTICS])
        numbers = torch.cat((statistics, results["mass"].movedim(-1, 0)))  # (M, B, H, L)
        sees = results["sees"]
        counts = sees if padded.counted is None else sees & padded.counted[:, None]  # (B, H, L)
        marks = counts.expand(len(numbers), *counts.shape).clone()
        marks[len(STATISTICS) :] &= seen.having
        if not tokens.is_self or (layout is None and not tokens.is_line):
            marks[_DISTANCE] = False
        elif layout is not None:
            numbers[_DISTANCE] = _patch_distances(call, layout)
            marks[_DISTANCE, ..., : len(layout.prefix)] = False
        return Values(numbers.float(), marks, self._numbered(call.grid.batch_size))

    def _masses(self, call: Call, tokens: Tokens) -> _Seen:
        grid = call.grid
        key = id(tokens.keys), id(call.mask), grid.query_length, grid.key_length, tokens.is_self, tokens.is_line
        if key not in self._shared:
            masses = masses_of(call, tokens, self._options)
            self._shared[key] = _Seen(masses, having(call, masses), (tokens.keys, call.mask))
        return self._shared[key]

    def _numbered(self, items: int) -> Tensor:
        """The texts of the items of a call. The windows of an image are items of their own."""
        if self._texts == 0:
            self._texts = items
        each = max(1, items // self._texts)
        return self._first_text + (torch.arange(items) // each).clamp(max=self._texts - 1)

    def _tokens_of(self, padded: Padded, sides: Sides, layout: PatchLayout | None) -> Tokens:
        """The tokens of a call's keys: those of the innermost running module that has as many."""
        is_self = sides.queries == sides.keys
        if layout is not None:
            return Tokens(None, is_self, is_line=False)
        if not is_self:
            ids = self._tokens_of_stack.get(sides.keys)
            fits = ids is not None and ids.shape == (padded.call.grid.batch_size, padded.call.grid.key_length)
            return Tokens(ids if fits else None, is_self)
        ids = self._found_tokens(padded)
        if ids is not None:
            ids = self._tokens_of_stack.setdefault(sides.queries, ids)
        # Parts of a picture whose layout is unknown are no line either. A text beside the picture has tokens.
        return Tokens(ids, is_self, is_line=ids is not None or self._picture_size is None)

    def _found_tokens(self, padded: Padded) -> Tensor | None:
        grid = padded.call.grid
        shape = grid.batch_size, grid.key_length
        for frame in reversed(self._running.frames):
            for ids in _integers_of(frame):
                if ids.shape == shape:
                    return ids.to(grid.device)
                packed = padded.key_places
                if packed is None:
                    continue
                if ids.numel() == int((packed >= 0).sum()):  # packed already in the model's arguments
                    return padded.tokens(ids, of_keys=True)
                if ids.shape == shape[:1] + ids.shape[1:] and ids.shape[1] >= shape[1]:
                    return self._unpadded(frame, ids, packed)
        return None

    def _unpadded(self, frame: Frame, ids: Tensor, packed: Tensor) -> Tensor | None:
        """The tokens of a padded batch from which the model removed its padding."""
        mask = frame.kwargs.get("attention_mask")
        real = (packed >= 0).sum(1)
        if isinstance(mask, Tensor) and mask.shape == ids.shape and bool((mask.sum(1) == real).all()):
            chosen = ids.flatten()[mask.flatten() != 0]
            return chosen[packed.clamp(min=0)]
        return None

    def _find_layout(self, name: str, size: tuple[int, int] | None, queries: int, keys: int) -> PatchLayout | None:
        try:
            return find_layout(self._running.model, name, size, queries, keys)
        except ArgumentError:
            return None


def _norms(padded: Padded, call: Call, output: Tensor | None) -> Tensor | None:
    """The norms (B, H, L) of outputs that the call has computed anyway, unless dropout or rounding is in them."""
    if output is None or call.dropout_p > 0 or output.dtype not in (torch.float32, torch.float64):
        return None
    if output.shape[:3] != call.query.shape[:3]:
        return None
    norms = torch.linalg.vector_norm(output, dim=-1)  # (B, H, L)
    return norms if padded.places is None else norms[0][:, padded.places.clamp(min=0)].transpose(0, 1)


def _integers_of(frame: Frame) -> Iterator[Tensor]:
    """The integers (B, n) among the arguments of a module, those named ids first."""
    named: dict[str, Any] = frame.kwargs
    chosen = [value for name, value in named.items() if not any(part in name for part in _NO_TOKENS)]
    for value in (*chosen, *frame.args):
        if isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32):
            yield value


def _patch_distances(call: Call, layout: PatchLayout) -> Tensor:
    """The mean distance in patches of the patches that each patch attends to, (B, H, L); 0 for other queries."""
    prefix, (rows, columns) = len(layout.prefix), layout.grid
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float().to(call.query.device)
    distances = torch.cdist(places, places)  # (patches, patches)
    result = call.query.new_zeros(call.query.shape[:3], dtype=torch.float32)
    if layout.queries is not None:
        return result
    for start in range(0, len(places), 64):  # no tensor of all weights
        queries = torch.arange(prefix + start, min(prefix + start + 64, prefix + len(places)), device=places.device)
        weights = exact_weights(call, queries, None)[..., prefix:].float()  # (B, H, n, patches)
        total = weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        result[..., queries] = torch.linalg.vecdot(weights, distances[queries - prefix]) / total
    return result
