"""The text of one batch item as pictures need it: tokens, which are special, and which belong to one word."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby
from typing import Any, cast, final

from .._checks import flag, integer, items, shown
from ..errors import ArgumentError, DTypeError, ShapeError

SPECIAL = re.compile(r"\[[A-Z]{3,}\]|</?(s|pad|unk|mask|eos|bos|cls|sep)>|<\|[\w-]+\|>")
WORD_STARTS = ("Ġ", "▁")
CONTINUES = "##"
_TEXTS = "a list of strings or Tokens, or one for every batch item"
# Scripts from here on are written without spaces between words.
FIRST_UNSPACED = "\u2e80"


@final
class Tokens:
    """Tokens with their special marks and their words.

    Args:
        names: the tokens as text.
        special: which of them the tokenizer added, such as ``[CLS]``. Default: those that look like it.
        words: a number per token; neighbours with the same number are pieces of one word. Default: guessed from
            the marks of tokenizers (``##ing``, ``Ġanimal``, ``▁animal``); every token is a word where there are none.

    Raises:
        DTypeError: if `names` is no sequence of strings.
        ShapeError: if the lengths differ.

    Example:
        >>> tokens = Tokens(["[CLS]", "play", "##ing", "chess"])
        >>> tokens.words, tokens.special
        ((0, 1, 1, 2), (True, False, False, False))
        >>> tokens.word_names()
        ['[CLS]', 'playing', 'chess']
    """

    def __init__(
        self, names: Sequence[str], special: Sequence[bool] | None = None, words: Sequence[int] | None = None
    ) -> None:
        self.names: tuple[str, ...] = _strings(names)
        looks = (bool(SPECIAL.fullmatch(name)) for name in self.names)
        if special is not None:
            looks = (flag("special", value) for value in items("special", special, "True or False per token"))
        self.special: tuple[bool, ...] = tuple(looks)
        words = None if words is None else items("words", words, "an int per token")
        for what, values in (("special", self.special), ("words", words)):
            if values is not None and len(values) != len(self.names):
                raise ShapeError(what, expected=f"{len(self.names)} values, one per token", got=str(len(values)))
        self.words: tuple[int, ...] = _numbered(_guess_words(self.names, self.special) if words is None else words)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def cut(self, start: int, stop: int) -> Tokens:
        """The tokens from `start` up to `stop`."""
        integer("start", start, least=0)
        integer("stop", stop, least=0)
        return Tokens(self.names[start:stop], self.special[start:stop], self.words[start:stop])

    def word_names(self) -> list[str]:
        """The words, their pieces put together without the tokenizer's marks."""
        names = [""] * (self.words[-1] + 1 if self.words else 0)
        for name, word in zip(self.names, self.words, strict=True):
            names[word] += name.removeprefix(CONTINUES) if names[word] else name
        return names

    def __repr__(self) -> str:
        return f"Tokens({list(self.names)!r})"


def numbered_tokens(length: int) -> Tokens:
    """The numbers 0, 1, … in place of tokens."""
    return Tokens([str(place) for place in range(length)], [False] * length, range(length))


Texts = Tokens | Sequence[str] | Sequence[Tokens] | Sequence[Sequence[str]]


def as_texts(given: Texts | None, name: str = "tokens") -> list[Tokens] | None:
    """One `Tokens` per text, whether one text was given or several, as the argument `name`."""
    if given is None:
        return None
    if isinstance(given, Tokens):
        return [given]
    texts = items(name, _strings(given, name) if isinstance(given, str) else cast("Sequence[Any]", given), _TEXTS)
    if all(isinstance(token, str) for token in texts):
        return [Tokens(texts)]
    return [text if isinstance(text, Tokens) else Tokens(_strings(text, name)) for text in texts]


def read_tokens(tokenizer: Any, ids: Sequence[int], *, words: Sequence[int | None] | None = None) -> Tokens:
    """Read tokens from a transformers tokenizer, written as a reader would (``animal``, not ``Ġanimal``).

    Args:
        tokenizer: of transformers.
        ids: the token numbers of one text, (L,).
        words: the tokenizer's ``encoding.word_ids(item)``. Default: guessed as `Tokens` does.

    Example:
        >>> from transformers import AutoTokenizer
        >>> from clearhead.cli._demo import default_model_path
        >>> tokenizer = AutoTokenizer.from_pretrained(default_model_path())
        >>> read_tokens(tokenizer, tokenizer("Embeddings")["input_ids"])
        Tokens(['[CLS]', 'em', '##bed', '##ding', '##s', '[SEP]'])
    """
    return read_known_tokens(tokenizer, ids, {}, words=words)


#: Number, stored form and special mark of a token → how it is written.
Names = dict[tuple[int, str, bool], str]


def read_known_tokens(
    tokenizer: Any,
    ids: Sequence[int],
    names: Names,
    *,
    words: Sequence[int | None] | None = None,
    special: Sequence[bool] | None = None,
) -> Tokens:
    """`read_tokens`, with the names of tokens that other parts of the text have; new ones are added.

    `special` marks the tokens that the tokenizer added. Default: by their numbers.
    """
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise DTypeError("tokenizer", expected="a tokenizer of transformers", got=shown(tokenizer))
    ids = _token_ids(ids)
    words = None if words is None else _word_numbers(words)
    if words is not None and len(words) != len(ids):
        expected = f"{len(ids)} values, one for each of ids"
        raise ShapeError("words", expected=expected, got=str(len(words)))
    stored = tokenizer.convert_ids_to_tokens(ids)
    if special is None:
        known = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        special = [number in known for number in ids]
    tokens = list(zip(ids, stored, special, strict=True))
    names |= {each: _readable(tokenizer, *each) for each in set(tokens) - names.keys()}
    usable = _guess_words(stored, special) if words is None or _is_one_word(words) else _with_special(words)
    return Tokens([names[each] for each in tokens], special, usable)


def _token_ids(ids: Iterable[Any]) -> list[int]:
    expected = "a list of token numbers"
    try:
        return [operator.index(number) for number in items("ids", ids, expected)]
    except (TypeError, RuntimeError):  # tensors on meta have no numbers
        raise DTypeError("ids", expected=expected, got=shown(ids)) from None


def _word_numbers(words: Iterable[Any]) -> list[int | None]:
    expected = "a number, or None, per token"
    given = items("words", words, expected)
    if any(word is not None and (isinstance(word, bool) or not isinstance(word, int)) for word in given):
        raise DTypeError("words", expected=expected, got=shown(words))
    return given


def _strings(names: Iterable[Any], what: str = "tokens") -> tuple[str, ...]:
    if isinstance(names, str):
        raise DTypeError(what, expected="a list of strings", got="one string")
    listed = items(what, names, "a list of strings")
    if not all(isinstance(name, str) for name in listed):
        raise DTypeError(what, expected="a list of strings", got="other things among them")
    return tuple(listed)


def _readable(tokenizer: Any, number: int, stored: str, special: bool) -> str:
    text: str = stored if special else tokenizer.decode([number], clean_up_tokenization_spaces=False)
    if not text.strip():
        text = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or stored
    return stored if "\ufffd" in text else text.strip()


def _is_one_word(words: Sequence[int | None]) -> bool:
    """Whether a tokenizer takes the whole text for one word."""
    return len(set(words) - {None}) < 2


def _with_special(words: Sequence[int | None]) -> list[int]:
    """A tokenizer's own words; its special tokens are words of their own."""
    unique = count(-2, -1)
    return [next(unique) if word is None else word for word in words]


def _numbered(words: Sequence[int]) -> tuple[int, ...]:
    """Count runs of equal numbers from 0."""
    for word in words:
        if isinstance(word, bool) or not isinstance(word, int):
            raise ArgumentError("words", expected="an int per token", got=shown(word))
    return tuple(number for number, (_, run) in enumerate(groupby(words)) for _ in run)


def _guess_words(names: Sequence[str], special: Sequence[bool]) -> list[int]:
    marked = any(name.startswith(WORD_STARTS) for name in names)
    word = -1
    words: list[int] = []
    for place, name in enumerate(names):
        before = "" if place == 0 or special[place - 1] else names[place - 1]
        if special[place] or not before:
            continues = False
        elif name.startswith(CONTINUES) and len(name) > len(CONTINUES):
            continues = True
        else:
            starts = name.startswith(WORD_STARTS)
            continues = marked and not starts and _is_letter(name[:1]) and _is_letter(before[-1:])
        word += not continues
        words.append(word)
    return words


def _is_letter(character: str) -> bool:
    return character.isalnum() and character < FIRST_UNSPACED
