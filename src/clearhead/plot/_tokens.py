"""The text of one batch item as pictures need it: tokens, which are special, and which belong to one word."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby
from typing import Any, cast, final

from .._checks import flag, integer, items
from .._checks import shown as shown_value
from ..errors import ArgumentError, DTypeError, ShapeError
from ._spelling import has_marks, joined, read_texts, shown, spell, stored_forms
from ._word_numbers import number_words

SPECIAL = re.compile(r"\[[A-Z]{3,}\]|</?(s|pad|unk|mask|eos|bos|cls|sep)>|<\|[\w-]+\|>")
_ROLES = ("bos", "eos", "sep", "pad", "cls", "mask")
_TEXTS = "a list of strings or Tokens, or one for every batch item"


@final
class Tokens:
    """Tokens with their special marks and their words.

    What a tokenizer stores is written as text: ``Ġanimal`` and ``▁animal`` as ``animal``, the bytes ``ä½ł`` as ``你``.
    If several tokens make one character, the first of them has it, and the others are ``⇠``.

    Args:
        names: the tokens as text, or as their tokenizer stores them.
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
        >>> Tokens(["Ġna", "Ã¯", "ve", "Ġä½", "ł"])
        Tokens(['na', 'ï', 've', '你', '⇠'])
    """

    names: tuple[str, ...]
    special: tuple[bool, ...]
    words: tuple[int, ...]

    def __init__(
        self, names: Sequence[str], special: Sequence[bool] | None = None, words: Sequence[int] | None = None
    ) -> None:
        stored = _strings(names)
        looks = (bool(SPECIAL.fullmatch(name)) for name in stored)
        if special is not None:
            looks = (flag("special", value) for value in items("special", special, "True or False per token"))
        self.special = tuple(looks)
        words = None if words is None else items("words", words, "an int per token")
        for what, values in (("special", self.special), ("words", words)):
            if values is not None and len(values) != len(stored):
                raise ShapeError(what, expected=f"{len(stored)} values, one per token", got=str(len(values)))
        texts = tuple(spell(stored, self.special))
        marked = has_marks(stored, texts, self.special)
        self.names = tuple(map(shown, texts)) if marked else stored
        if words is None:
            words = number_words(texts, self.special, marked=marked)
        self.words = _numbered(words)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def cut(self, start: int, stop: int) -> Tokens:
        """The tokens from `start` up to `stop`."""
        integer("start", start, least=0)
        integer("stop", stop, least=0)
        return at_places(self, range(len(self))[start:stop])

    def word_names(self) -> list[str]:
        """The words, their pieces put together without the tokenizer's marks."""
        words = groupby(zip(self.words, self.names, strict=True), operator.itemgetter(0))
        return [joined(name for _, name in pieces) for _, pieces in words]

    def __repr__(self) -> str:
        return f"Tokens({list(self.names)!r})"


def written(names: Iterable[str], special: Iterable[bool], words: Sequence[int]) -> Tokens:
    """Tokens whose names are as pictures write them."""
    tokens = object.__new__(Tokens)
    tokens.names, tokens.special, tokens.words = tuple(names), tuple(special), _numbered(words)
    return tokens


def at_places(tokens: Tokens, places: Sequence[int]) -> Tokens:
    """The tokens at some places."""
    names, special, words = tokens.names, tokens.special, tokens.words
    return written(
        (names[place] for place in places), [special[place] for place in places], [words[place] for place in places]
    )


def among_special(tokens: Tokens, special: Sequence[bool], added: Iterable[str]) -> Tokens:
    """Tokens with those that a tokenizer added, where `special` is true; each is a word of its own."""
    inner, outer, unique = iter(zip(tokens.names, tokens.words, strict=True)), iter(added), count(-1, -1)
    pairs = [(next(outer), next(unique)) if is_added else next(inner) for is_added in special]
    return written([name for name, _ in pairs], special, [word for _, word in pairs])


def numbered_tokens(length: int) -> Tokens:
    """The numbers 0, 1, … in place of tokens."""
    return written(map(str, range(length)), [False] * length, range(length))


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

    If several tokens make one character, the first of them has it, and the others are ``⇠``. Bytes that are no
    character, as where a text was cut off, are ``�``.

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
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise DTypeError("tokenizer", expected="a tokenizer of transformers", got=shown_value(tokenizer))
    ids = _token_ids(ids)
    words = None if words is None else _word_numbers(words)
    if words is not None and len(words) != len(ids):
        expected = f"{len(ids)} values, one for each of ids"
        raise ShapeError("words", expected=expected, got=str(len(words)))
    others = {getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
    known = set(tokenizer.all_special_ids) - ({tokenizer.unk_token_id} - others)  # GPT-2 has one token for all roles
    return tokens_of(tokenizer, ids, [number in known for number in ids], words)


def tokens_of(
    tokenizer: Any, ids: Sequence[int], special: Sequence[bool], words: Sequence[int | None] | None = None
) -> Tokens:
    """`read_tokens`, told which tokens are special."""
    stored = stored_forms(tokenizer, ids)
    texts = read_texts(tokenizer, ids, stored, special)
    marked = has_marks(stored, texts, special)
    own = None if words is None or _are_stretches(words, stored, texts) else _with_special(words)
    return written(map(shown, texts), special, number_words(texts, special, own, marked=marked))


def _token_ids(ids: Iterable[Any]) -> list[int]:
    expected = "a list of token numbers"
    try:
        return [operator.index(number) for number in items("ids", ids, expected)]
    except (TypeError, RuntimeError):  # tensors on meta have no numbers
        raise DTypeError("ids", expected=expected, got=shown_value(ids)) from None


def _word_numbers(words: Iterable[Any]) -> list[int | None]:
    expected = "a number, or None, per token"
    given = items("words", words, expected)
    if any(word is not None and (isinstance(word, bool) or not isinstance(word, int)) for word in given):
        raise DTypeError("words", expected=expected, got=shown_value(words))
    return given


def _strings(names: Iterable[Any], what: str = "tokens") -> tuple[str, ...]:
    if isinstance(names, str):
        raise DTypeError(what, expected="a list of strings", got="one string")
    listed = items(what, names, "a list of strings")
    if not all(isinstance(name, str) for name in listed):
        raise DTypeError(what, expected="a list of strings", got="other things among them")
    return tuple(listed)


def _are_stretches(words: Sequence[int | None], stored: Sequence[str], texts: Sequence[str]) -> bool:
    """Whether what a tokenizer takes for words are stretches of text, as where it splits at no spaces."""
    if len(set(words) - {None}) < 2 and any("▁" in form for form in stored):
        return True
    runs = groupby(zip(words, texts, strict=True), operator.itemgetter(0))
    return any(word is not None and _has_gap([text for _, text in run]) for word, run in runs)


def _has_gap(texts: Sequence[str]) -> bool:
    """Whether a space lies between two of these tokens."""
    shapes = (f"{' ' * text.startswith(' ')}{'x' * bool(text.strip())}{' ' * text.endswith(' ')}" for text in texts)
    return len("".join(shapes).split()) > 1


def _with_special(words: Sequence[int | None]) -> list[int]:
    """A tokenizer's own words; its special tokens are words of their own."""
    unique = count(-2, -1)
    return [next(unique) if word is None else word for word in words]


def _numbered(words: Sequence[int]) -> tuple[int, ...]:
    """Count runs of equal numbers from 0."""
    for word in words:
        if isinstance(word, bool) or not isinstance(word, int):
            raise ArgumentError("words", expected="an int per token", got=shown_value(word))
    return tuple(number for number, (_, run) in enumerate(groupby(words)) for _ in run)
