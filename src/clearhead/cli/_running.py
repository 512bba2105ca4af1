"""Running a model and recording it, with errors in the words of the command."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._statistics.recorded import Recorded
from ..errors import ArgumentError, ClearheadError, RecordError, ShapeError, UnseenAttentionWarning
from ..inspection._record import record
from ..plot._given import given
from ._demo import PretrainedModel
from ._errors import warn


def run_recorded(
    loaded: PretrainedModel, inputs: Mapping[str, Any], statistics: Sequence[str], warned: set[str]
) -> Recorded:
    """Run a model and record its attention, or the weights that it returns if it is not recordable.

    Warnings about unrecorded attention are written once. `warned` holds their texts.
    """
    if not loaded.recordable:
        with about_the_model(loaded), torch.no_grad():
            outputs = loaded.model(**inputs, output_attentions=True)
        length = inputs["input_ids"].shape[1]
        weights = [layer for layer in getattr(outputs, "attentions", None) or () if layer is not None]
        if not weights or any(tuple(layer.shape[2:]) != (length, length) for layer in weights):
            raise _unfit(loaded, "none, or weights of other shapes")
        with about_the_model(loaded):
            return given(weights)
    with _unseen_on_stderr(warned), about_the_model(loaded):
        with torch.no_grad(), record(loaded.model, statistics, keep="queries_keys") as rec:
            loaded.model(**inputs)
        return rec


@contextmanager
def about_the_model(loaded: PretrainedModel) -> Generator[None]:
    """Say of a model that its calls cannot be read, without the advice for Python that errors of the library give."""
    try:
        yield
    except (ArgumentError, RecordError, ShapeError) as error:
        if str(error).startswith(("--", "model ")):  # in the words of the command
            raise
        raise _unfit(loaded, str(error).partition(". ")[0].rstrip(".")) from error
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:  # a model of images, audio, …
        if isinstance(error, ClearheadError):
            raise
        got = textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder="…")
        raise _unfit(loaded, got) from error


def _unfit(loaded: PretrainedModel, got: str) -> ArgumentError:
    return ArgumentError(f"model {loaded.name}", expected=loaded.expected, got=got)


@contextmanager
def _unseen_on_stderr(warned: set[str]) -> Generator[None]:
    """Write as lines which attention was not recorded; the advice after the first sentence is for Python."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnseenAttentionWarning)
        yield
    for warning in caught:
        text = str(warning.message).partition(". ")[0].rstrip(".") + "."
        if issubclass(warning.category, UnseenAttentionWarning) and text not in warned:
            warned.add(text)
            warn(text)


def blocks_of(loaded: PretrainedModel) -> list[nn.Module]:
    """The longest row of modules of a model: its layers, each of which takes about the same time."""
    rows = [list(module) for module in loaded.model.modules() if isinstance(module, nn.ModuleList)]
    return max(rows, key=len, default=[])


@contextmanager
def after_each(blocks: Sequence[nn.Module], advance: Callable[[], None]) -> Generator[None]:
    """Call `advance` after each module has run; what has not run by the end counts too."""
    left = len(blocks)

    def ran(*_: object) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            advance()

    with ExitStack() as undo:
        for block in blocks:
            undo.callback(block.register_forward_hook(ran).remove)
        yield
    while left > 0:
        ran()


@contextmanager
def one_thread() -> Generator[None]:
    """Compute on one thread. On the small tensors of a picture, waking a second one takes longer than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def as_table(values: Sequence[Tensor]) -> list[list[float]]:
    """Layer → head → number."""
    return [row.tolist() for row in values]
