"""A text in windows that a model takes one at a time."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from ..errors import ArgumentError
from ..integrations._hub import without_noise
from ..plot._tokens import Names, Tokens, read_known_tokens
from ._demo import PretrainedModel

MANY_UNKNOWN = 0.1  # of a text's tokens


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
    windows: list[Window] = []
    names: Names = {}
    first = 0
    for ids, special, words, inputs in parts:
        count = len(ids) - sum(special)
        tokens = read_known_tokens(loaded.reader, ids, names, words=words, special=list(map(bool, special)))
        windows.append(Window(inputs, tokens, first, first + count - 1))
        first += count - overlap_of(loaded.max_tokens)
    if not windows or not windows[0].tokens.names:
        raise ArgumentError("text", expected="at least one token", got="none")
    return windows


def joined_inputs(batch: Sequence[Window]) -> dict[str, torch.Tensor]:
    """The arguments of the model for windows of one length."""
    return {name: torch.cat([window.inputs[name] for window in batch]) for name in batch[0].inputs}


def unknown_note(loaded: PretrainedModel, windows: Sequence[Window]) -> str | None:
    """A warning if the vocabulary lacks more than a tenth of the tokens, else ``None``."""
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
    return (
        f"{loaded.name} does not know {100 * unknowns / count:.0f} % of the tokens of this text; they are {name}, one "
        "like the other. Look at it with a model of its language: --model NAME_OR_PATH."
    )


#: A window's ids, special marks, words of the tokenizer, and arguments of the model.
Part = tuple[list[int], list[int], Sequence[int | None] | None, dict[str, Any]]


def _encode(loaded: PretrainedModel, text: str) -> Generator[Part]:
    tokenizer, size = loaded.reader, loaded.max_tokens
    if tokenizer.is_fast:
        encoded = tokenizer(
            text,
            truncation=True,
            max_length=size,
            stride=overlap_of(size),
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
        )
        masks = encoded.pop("special_tokens_mask")
        named = signature(loaded.model.forward).parameters.keys()
        taken = (
            named & encoded.keys() if "input_ids" in named else encoded.keys()
        )  # token types are not for every model
        for part, ids in enumerate(encoded["input_ids"]):
            inputs = {name: torch.tensor([encoded[name][part]]) for name in taken}
            yield ids, masks[part], encoded.word_ids(part), inputs
        return
    everything = tokenizer(text, add_special_tokens=False)["input_ids"]
    room = size - tokenizer.num_special_tokens_to_add()
    step = room - overlap_of(size)
    for first in range(0, max(len(everything) - overlap_of(size), 1), step):
        ids = tokenizer.build_inputs_with_special_tokens(everything[first : first + room])
        special = tokenizer.get_special_tokens_mask(ids, already_has_special_tokens=True)
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        yield ids, special, None, inputs


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
