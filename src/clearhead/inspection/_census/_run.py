"""`census`: run a model over a corpus, and count what every head does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..._checks import integer, module, shown, size, text
from ..._statistics.arguments import whole_numbers
from ...errors import ArgumentError, ClearheadError, DTypeError
from .._chosen_layers import ChosenLayers
from .._recorder import require_uncompiled
from ._counting import Counting
from ._metrics import METRICS, NAMES, Counted, Pair
from ._result import Census

_SAVED_EVERY = 60.0  # seconds

#: The list of metrics in the docstring.
_LIST = f"\n{' ' * 4}".join(
    f"* ``{metric.name}``: {metric.meaning}" + ("" if metric.counts == "all" else f"; counted are {metric.counts}")
    for metric in METRICS
)


def census(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    special: Sequence[int] = (),
    window: int = 5,
    strongest: int = 8,
    pairs: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None,
    layers: Sequence[int | str] | None = None,
    run: Callable[[nn.Module, Any], object] | None = None,
    checkpoint: str | Path | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Census:
    """Run a model over a corpus and count what every head attends to. Gradients are not recorded.

    For each head and each metric it keeps the number of queries, the mean, the spread, both extremes, and the texts in
    which the metric was largest. The metrics are

    {metrics}

    Padding never counts. In cross-attention only ``special``, ``first`` and the numbers without distances are counted.
    Images have no tokens in a line, so they have ``same``, ``first``, and distances between patches. Weights are those
    of `attention` before dropout, in float32. Memory does not grow with the corpus. The model runs in the mode that it
    is in, so call ``model.eval()`` first.

    Tokens are the integers (B, L) among the arguments of the model or of a module in it. Each batch item is a text, or
    each sequence of a packed batch.

    Args:
        model: the model. The same attention is seen as by `record`.
        batches: the arguments of each call: a mapping of names, a tuple, or one tensor.
        special: ids of special tokens, such as ``tokenizer.all_special_ids``. Default none.
        window: the reach of ``window``, in positions. Default 5.
        strongest: how many texts are kept for each metric of a head. Default 8.
        pairs: further metrics by name, the weight from some tokens to others, as two lists of their ids. Then
            ``rank_heads(name)`` ranks the heads over the whole corpus as `record.rank_heads` does in one text. Counted
            are those of the first tokens that see one of the second, in self-attention. Default none.
        layers: the attention modules to count, as names or as numbers in running order. Default all.
        run: ``run(model, batch)`` runs the model on one batch. Default: a call.
        checkpoint: a ``.safetensors`` file to which the census is saved every minute, and when it ends or is
            interrupted. If it exists, the census continues there: as many batches as it has are skipped.
        progress: called after each batch with the numbers of its texts and tokens.

    Returns:
        A `Census`.

    Raises:
        ArgumentError: without a batch, and for a checkpoint with other settings.
        RecordError: if no attention was recorded, or a call is split over processes.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 12), clearhead.MultiHeadAttention(12, 3)).eval()
        >>> batches = [torch.randint(10, (2, 7)) for _ in range(3)]
        >>> found = clearhead.census(model, batches)
        >>> found.texts, found.tokens, found.mean("duplicate")["1"].shape
        (6, 42, torch.Size([3]))
    """
    require_uncompiled()
    module("model", model)
    numbers = integer("window", window, least=0), size("strongest", strongest)
    counted = Counted(whole_numbers("special", special), *numbers, _pairs({} if pairs is None else pairs))
    path = None if checkpoint is None else _checkpoint(checkpoint)
    before = Census.load(path) if path is not None and path.exists() else None
    if before is not None and before.counted != counted:
        raise ArgumentError("checkpoint", expected=f"one with the settings {counted}", got=str(before.counted))
    for name, function in (("run", run), ("progress", progress)):
        if function is not None and not callable(function):
            raise DTypeError(name, expected="a function", got=shown(function))
    corpus = _Corpus(model, counted, layers, before)
    return corpus.count(_iterator(batches), run, path, progress)


if census.__doc__:  # python -OO leaves none
    census.__doc__ = census.__doc__.replace("{metrics}", _LIST)


class _Corpus:
    """The loop over the batches."""

    def __init__(
        self, model: nn.Module, counted: Counted, layers: Sequence[int | str] | None, before: Census | None
    ) -> None:
        self._model, self._counted, self._before = model, counted, before
        self._counting = Counting(model, ChosenLayers(layers, model), counted, resumed=before is not None)
        self._texts, self._tokens, self._batches = 0, 0, 0

    def count(
        self,
        batches: Iterator[Any],
        run: Callable[[nn.Module, Any], object] | None,
        path: Path | None,
        progress: Callable[[int, int], object] | None,
    ) -> Census:
        """Count all batches but those that the checkpoint has."""
        skipped, saved = 0 if self._before is None else self._before.batches, time.monotonic()
        try:
            with self._counting, torch.no_grad():
                for place, batch in enumerate(batches):
                    if place < skipped:
                        continue
                    texts, tokens = self._add(batch, run)
                    if progress is not None:
                        _called("progress(texts, tokens)", progress, texts, tokens)
                    if path is not None and time.monotonic() - saved >= _SAVED_EVERY:
                        self._result().save(path)
                        saved = time.monotonic()
        except BaseException:
            if path is not None and self._batches:
                self._result().save(path)
            raise
        result = self._result()
        if path is not None:
            result.save(path)
        return result

    def _add(self, batch: Any, run: Callable[[nn.Module, Any], object] | None) -> tuple[int, int]:
        self._counting.begin(self._texts)
        _call(self._model, batch) if run is None else _called("run(model, batch)", run, self._model, batch)
        texts, tokens = self._counting.finish()
        if self._before is not None:
            heads = {layer: moments.count.shape[1] for layer, moments in self._counting.names.items()}
            if heads != self._before.heads:  # said now, and not after the whole corpus
                expected = f"one with the layers and heads {heads}"
                raise ArgumentError("checkpoint", expected=expected, got=str(self._before.heads))
        self._texts, self._tokens, self._batches = self._texts + texts, self._tokens + tokens, self._batches + 1
        return texts, tokens

    def _result(self) -> Census:
        counts = self._texts, self._tokens, self._batches
        own = Census(self._counting.names, self._counted, *counts)
        return own if self._before is None else self._before if not self._batches else self._before.merged(own)


def _iterator(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches one after another, so that a corpus is never held in memory. One batch alone is none."""
    with suppress(TypeError):
        if not isinstance(batches, (str, bytes, Tensor, Mapping)):
            return iter(batches)
    raise DTypeError("batches", expected="an iterable of batches", got=shown(batches))


def _pairs(pairs: object) -> tuple[Pair, ...]:
    expected = "a dictionary {name: (ids of queries, ids of keys)}"
    if not isinstance(pairs, Mapping):
        raise DTypeError("pairs", expected=expected, got=shown(pairs))
    made: list[Pair] = []
    for name, pair in cast(Mapping[Any, Any], pairs).items():
        if text("pairs", name, "names of metrics") in NAMES:
            raise ArgumentError("pairs", expected="names that are no metric", got=repr(name))
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DTypeError("pairs", expected=expected, got=shown(pair))
        made.append(Pair(name, *(whole_numbers("pairs", ids) for ids in pair)))
    return tuple(made)


def _checkpoint(path: str | Path) -> Path:
    if not isinstance(path, (str, Path)) or Path(path).suffix != ".safetensors":
        raise ArgumentError("checkpoint", expected="the path of a .safetensors file", got=shown(path))
    return Path(path)


def _called(form: str, function: Callable[..., object], *arguments: object) -> None:
    """Call a function of the caller's, which may not take these arguments."""
    try:
        function(*arguments)
    except ClearheadError:
        raise
    except TypeError as error:
        name, expected = form.partition("(")[0], f"a function {form}"
        raise DTypeError(name, expected=expected, got=shown(function), fix=str(error)) from error


def _call(model: nn.Module, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
