"""A text in windows that a model takes one at a time."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate, compress
from typing import Any

import torch

from ..errors import ArgumentError
from ..integrations._hub import without_noise
from ..plot._language import say
from ..plot._tokens import Tokens, among_special, tokens_of
from ..plot._tokens import written as as_written
from ._demo import PretrainedModel

MANY_UNKNOWN = 0.1  # of a text's tokens
MANY_LANGUAGES = "google-bert/bert-base-multilingual-cased"


@dataclass(frozen=True)
class Window:
    """A part of a text as a model takes it.

    Args:
        inputs: the arguments of the model, a batch of one.
        tokens: its tokens and the special ones that the tokenizer added.
        first, last: places of its first and last token in the text. Special tokens do not count.
    """

    inputs: dict[str, Any]
    tokens: Tokens
    first: int
    last: int


def overlap_of(size: int) -> int:
    """How many tokens of a window are also in the next: an eighth."""
    return size // 8


def cut_into_windows(loaded: PretrainedModel, text: str) -> list[Window]:
    """Tokenize a text and cut it where it is longer than the model takes; nothing is left out.

    Neighbouring windows share an eighth of their tokens, so one of them has context for a token at an edge. Each window
    has its own special tokens.
    """
    _require_text(text)
    with without_noise():
        parts = list(_encode(loaded, text))
    starts = list(accumulate((len(part.ordinary) - overlap_of(loaded.max_tokens) for part in parts), initial=0))
    whole = _read(loaded, parts, starts)
    windows: list[Window] = []
    for part, first in zip(parts, starts, strict=False):
        stop = first + len(part.ordinary)
        added = loaded.reader.convert_ids_to_tokens(list(compress(part.ids, part.special)))
        tokens = among_special(whole.cut(first, stop), part.special, added)
        windows.append(Window(part.inputs, tokens, first, stop - 1))
    if not windows or not windows[0].tokens.names:
        raise ArgumentError("text", expected="at least one token", got="none")
    return windows


def joined_inputs(batch: Sequence[Window]) -> dict[str, torch.Tensor]:
    """The arguments of the model for windows of one length."""
    return {name: torch.cat([window.inputs[name] for window in batch]) for name in batch[0].inputs}


def unknown_note(loaded: PretrainedModel, windows: Sequence[Window]) -> str | None:
    """A warning, in the chosen language, if the vocabulary lacks more than a tenth of the tokens, else ``None``."""
    unknown = loaded.reader.unk_token_id
    if unknown is None:
        return None
    count = unknowns = 0
    for window in windows:
        ids = window.inputs["input_ids"][0].tolist()
        ordinary = [number for number, special in zip(ids, window.tokens.special, strict=True) if not special]
        count, unknowns = count + len(ordinary), unknowns + ordinary.count(unknown)
    if unknowns <= MANY_UNKNOWN * count:
        return None
    name = loaded.reader.convert_ids_to_tokens(unknown)
    return say(
        "{0} does not know {1} % of the tokens of this text and reads them all as {2}, so what their rows show means "
        "little. Use a model of its language, such as --model {3}.",
        loaded.name, f"{100 * unknowns / count:.0f}", name, MANY_LANGUAGES,
    )  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """A window's ids, which of them the tokenizer added, the numbers of its own words, and arguments of the model.

    `unknown` has the characters of the text in place of each token that the vocabulary lacks, by its place.
    """

    ids: list[int]
    special: list[bool]
    words: Sequence[int | None] | None
    inputs: dict[str, Any]
    unknown: Mapping[int, str]

    @property
    def ordinary(self) -> list[int]:
        """Places of the tokens of the text."""
        return [place for place, special in enumerate(self.special) if not special]


def _read(loaded: PretrainedModel, parts: Sequence[_Part], starts: Sequence[int]) -> Tokens:
    """The tokens of the whole text, so that a character or a word at the edge of a window is not cut."""
    ids: list[int] = []
    words: list[int | None] = []
    unknown: list[str | None] = []
    for part, start in zip(parts, starts, strict=False):
        for place in part.ordinary[len(ids) - start :]:
            ids.append(part.ids[place])
            unknown.append(part.unknown.get(place))
            words += [] if part.words is None else [part.words[place]]
    read = tokens_of(loaded.reader, ids, [False] * len(ids), words or None)
    names = (written or name for written, name in zip(unknown, read.names, strict=True))
    return as_written(names, read.special, read.words)


def _encode(loaded: PretrainedModel, text: str) -> Generator[_Part]:
    tokenizer, size = loaded.reader, loaded.max_tokens
    if tokenizer.is_fast:
        encoded = tokenizer(
            text,
            truncation=True,
            max_length=size,
            stride=overlap_of(size),
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
            return_offsets_mapping=True,
        )
        masks, offsets = encoded.pop("special_tokens_mask"), encoded.pop("offset_mapping")
        named = signature(loaded.model.forward).parameters.keys()
        taken = (
            named & encoded.keys() if "input_ids" in named else encoded.keys()
        )  # token types are not for every model
        for part, ids in enumerate(encoded["input_ids"]):
            inputs = {name: torch.tensor([encoded[name][part]]) for name in taken}
            places = enumerate(zip(ids, offsets[part], strict=True))
            unknown = {n: text[slice(*ends)] for n, (number, ends) in places if number == tokenizer.unk_token_id}
            yield _Part(ids, list(map(bool, masks[part])), encoded.word_ids(part), inputs, unknown)
        return
    everything = tokenizer(text, add_special_tokens=False)["input_ids"]
    room = size - tokenizer.num_special_tokens_to_add()
    step = room - overlap_of(size)
    for first in range(0, max(len(everything) - overlap_of(size), 1), step):
        ids = tokenizer.build_inputs_with_special_tokens(everything[first : first + room])
        special = tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        yield _Part(ids, list(map(bool, special)), None, inputs, {})


def _require_text(text: str) -> None:
    if not text.strip():
        raise ArgumentError("text", expected="some text", got="none")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!a} at {error.start}"
        raise ArgumentError(
            "text", expected="Unicode text", got=got, fix="It was probably read from other bytes."
        ) from error
