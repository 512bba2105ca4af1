"""Which spelled tokens are pieces of one word."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

CONTINUES = "##"
#: Scripts from here on are written without spaces between words.
FIRST_UNSPACED = "\u2e80"
_JOINER = "\u200d"  # of emoji
_FLAG_LETTERS = range(0x1F1E6, 0x1F200)  # two are a flag
_SKIN_TONES = range(0x1F3FB, 0x1F400)


def number_words(
    texts: Sequence[str], special: Sequence[bool], own: Sequence[int] | None = None, *, marked: bool
) -> list[int]:
    r"""The number of every token's word.

    Args:
        texts: spelled tokens.
        special: which of them are words of their own.
        own: the numbers of the tokenizer. It cuts through some characters; these are put together. Default: guessed
            from spaces and letters.
        marked: whether a space before a token says that a word begins.

    Example:
        >>> texts = [" na", "i", "\u0308", "ve", " 你", "", "好"]
        >>> number_words(texts, [False] * 7, marked=True)
        [0, 0, 0, 0, 1, 1, 2]
        >>> number_words(texts, [False] * 7, [0, 0, 1, 2, 3, 3, 3], marked=True)
        [0, 0, 0, 0, 1, 1, 1]
    """
    words: list[int] = []
    word, so_far = -1, ""
    for place, text in enumerate(texts):
        if place == 0 or special[place] or special[place - 1]:
            continues = False
        elif own is None:
            continues = _is_piece(text, so_far, marked) or _is_cut(text, so_far, marked)
        else:
            continues = own[place] == own[place - 1] or _is_cut(text, so_far, marked)
        word += not continues
        so_far = so_far + text if continues else text
        words.append(word)
    return words


def _is_piece(text: str, so_far: str, marked: bool) -> bool:
    """Whether a token looks like the next piece of a word."""
    if text.startswith(CONTINUES) and len(text) > len(CONTINUES):
        return True
    return marked and _is_letter(text[:1]) and _is_letter(so_far[-1:])


def _is_cut(text: str, so_far: str, marked: bool) -> bool:
    """Whether a token goes on with what is never cut: a character, a letter and its marks, an emoji, a space's word."""
    if not text:
        return marked
    first, last = text[0], so_far[-1:]
    if _is_mark(first) or last == _JOINER or ord(first) in _SKIN_TONES:
        return last.strip() != ""
    if ord(first) in _FLAG_LETTERS and _flag_letters_at_the_end(so_far) % 2 == 1:
        return True
    if so_far == " ":
        return marked and not first.isspace()
    return marked and _is_mark(last) and _is_letter(first)


def _flag_letters_at_the_end(text: str) -> int:
    return len(text) - len(text.rstrip("".join(map(chr, _FLAG_LETTERS))))


def _is_mark(character: str) -> bool:
    """Whether a character changes the one before it."""
    return character == _JOINER or unicodedata.category(character or " ").startswith("M")


def _is_letter(character: str) -> bool:
    return (character.isalnum() and character < FIRST_UNSPACED) or (character != _JOINER and _is_mark(character))
