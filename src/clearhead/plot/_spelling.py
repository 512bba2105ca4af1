"""How tokens are written: as the characters of the text, whatever a tokenizer stores for them.

A spelled token is its part of the text, with the space before or after it, which says that a word begins or ends there.
A token that only goes on with a character of an earlier one is ``""``.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from ._word_numbers import CONTINUES

#: How a token is shown that only goes on with a character of an earlier one.
CONTINUED = "⇠"
#: What decoders write for bytes that are no character.
BROKEN = "\ufffd"
SPACES = ("Ġ", "▁")  # of byte-level tokenizers, of SentencePiece
END = "</w>"  # of a word, where tokenizers do not mark its beginning
_MOST_PARTS = 64  # tokens that are looked through for the end of a character
_SEVERAL_BROKEN = re.compile(f"{BROKEN}{{2,}}")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_CIRCLE = "◌"  # under a mark whose letter is another token
_VARIATIONS = "\ufe0e\ufe0f"  # of emoji; they have no sign of their own
_BLANKS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "č": "\r", "ĉ": "\t"})
_SIGNS = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})

#: The text of the tokens from one place up to another, decoded together.
Decode = Callable[[int, int], str]


def join_characters(texts: Sequence[str], decode: Decode) -> list[str]:
    r"""Tokens that were decoded one by one, with every character that several tokens make at the first of them.

    Some decoders write a part of a character as U+FFFD, others as nothing.

    Example:
        >>> parts = ["a".encode(), b"\xe4", b"\xbd", b"\xa0"]
        >>> join_characters(
        ...     ["a", "\ufffd", "\ufffd", "\ufffd"],
        ...     lambda start, stop: b"".join(parts[start:stop]).decode(errors="replace"),
        ... )
        ['a', '你', '', '']
    """
    spelled = [_SEVERAL_BROKEN.sub(BROKEN, text) for text in texts]
    for are_parts, run in groupby(range(len(texts)), lambda place: not _is_whole(texts[place])):
        places = list(run)
        start, end = places[0], places[-1] + 1
        while are_parts and start < end - 1:
            stop = _end_of_characters(decode, start, end)
            if stop is not None:
                spelled[start:stop] = _shared_out(decode, start, stop)
            start = start + 1 if stop is None else stop
    return spelled


def _is_whole(text: str) -> bool:
    return text != "" and BROKEN not in text


def _end_of_characters(decode: Decode, start: int, end: int) -> int | None:
    """Where the characters that begin with a token end between two tokens, or the text does; None if it begins none."""
    last, text = min(start + _MOST_PARTS, end), ""
    for stop in range(start + 2, last + 1):
        text = decode(start, stop)
        if _is_whole(text):
            return None if decode(start + 1, stop) == text else stop
    return last if _is_whole(text.rstrip(BROKEN)) else None


def _shared_out(decode: Decode, start: int, stop: int) -> list[str]:
    """The text of tokens that are whole characters only together, each character at the token that begins it."""
    spelled, text = [""] * (stop - start), ""
    begun = complete = 0  # the token that the next character begins in, and how many characters are complete
    for place in range(stop - start):
        text = decode(start, start + place + 1)
        new = text.rstrip(BROKEN)[complete:]
        if new:
            spelled[begun] += new[0]
            spelled[place] += new[1:]
            begun, complete = place, complete + len(new)
    spelled[begun] += BROKEN * text.endswith(BROKEN)
    return spelled


def spell(stored: Sequence[str], special: Sequence[bool]) -> list[str]:
    """Spell tokens from their stored forms alone: byte-level letters, byte pieces and marks of SentencePiece.

    Names that have none of these are as they were.

    Example:
        >>> spell(["Ġna", "Ã¯", "ve", "Ġä½", "ł"], [False] * 5)
        [' na', 'ï', 've', ' 你', '']
        >>> spell(["▁", "<0xC3>", "<0xA9>", "ta", "it"], [False] * 5)
        [' ', 'é', '', 'ta', 'it']
    """
    names = [name[: -len(END)] if len(name) > len(END) and name.endswith(END) else name for name in stored]
    if any(name.startswith("▁") or _BYTE.fullmatch(name) for name in names):
        to_bytes = _bytes_of_piece
    else:
        literals = [name for name, literal in zip(names, special, strict=True) if not literal]
        alphabet = next((each for each in _ALPHABETS if _are_bytes(literals, each)), None)
        if alphabet is None:
            return _with_ends(names, stored)
        to_bytes = partial(_bytes_of_letters, alphabet)
    raw = [name.encode() if literal else to_bytes(name) for name, literal in zip(names, special, strict=True)]

    def decode(start: int, stop: int) -> str:
        return b"".join(raw[start:stop]).decode(errors="replace")

    return _with_ends(join_characters([decode(place, place + 1) for place in range(len(raw))], decode), stored)


def _with_ends(texts: list[str], stored: Sequence[str]) -> list[str]:
    """Spelled tokens with a space after those that end a word."""
    for place, form in enumerate(stored):
        if len(form) > len(END) and form.endswith(END) and not texts[place].endswith((" ", END)):
            begun = next((earlier for earlier in range(place, 0, -1) if texts[earlier]), 0)
            texts[begun] += " "
    return texts


def has_marks(stored: Sequence[str], texts: Sequence[str], special: Sequence[bool]) -> bool:
    """Whether spaces of spelled tokens say where words begin and end."""
    spaced = any(text[:1] == " " or text[-1:] == " " for text in texts)
    continued = any(form and not text for text, form in zip(texts, stored, strict=True))
    return spaced or continued or spell(stored, special) != list(stored)


def stored_forms(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What a tokenizer stores for tokens; some store bytes."""
    forms = tokenizer.convert_ids_to_tokens(ids)
    return [form.decode(errors="replace") if isinstance(form, bytes) else form for form in forms]


def read_texts(tokenizer: Any, ids: Sequence[int], stored: Sequence[str], special: Sequence[bool]) -> list[str]:
    """Spell tokens as their tokenizer decodes them, or by their stored forms if it decodes nothing.

    What was added to a vocabulary is stored as text, which decoders of bytes would garble.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    is_text = [literal or number in added for literal, number in zip(special, ids, strict=True)]

    def decode(start: int, stop: int) -> str:
        text: str = tokenizer.decode(ids[start:stop], clean_up_tokenization_spaces=False)
        return text

    alone: dict[tuple[int, bool], str] = {}
    for place, key in enumerate(zip(ids, is_text, strict=True)):
        if key not in alone:
            alone[key] = stored[place] if is_text[place] else _with_dropped(decode(place, place + 1), stored[place])
    texts = [alone[key] for key in zip(ids, is_text, strict=True)]
    is_decoded = texts != stored or any(BROKEN in text for text in texts)
    return _with_ends(join_characters(texts, decode), stored) if is_decoded else spell(stored, is_text)


def _with_dropped(text: str, form: str) -> str:
    """The text of a token that was decoded by itself, with what decoders drop: spaces at its ends, or all of it."""
    if text.strip():
        is_start = form.startswith(SPACES) and not text.startswith((" ", form[0]))
        return " " + text if is_start else text
    blank = form.translate(_BLANKS)
    if blank.isspace() and (blank != form or form > "\xff"):  # below lie the letters of bytes
        return blank
    return text or (form if form.isascii() and not _BYTE.fullmatch(form) else BROKEN)


def shown(text: str) -> str:
    r"""A spelled token as pictures write it: white space that is no gap between words as signs.

    Example:
        >>> [shown(text) for text in (" animal", " ", "\n\n", ")\n", "", "\u0308")]
        ['animal', '␣', '⏎⏎', ')⏎', '⇠', '◌̈']
    """
    inner = text.strip(" ")
    if not inner:
        return "␣" * len(text) or CONTINUED
    alone = unicodedata.category(inner[0]) == "Mn" and inner[0] not in _VARIATIONS
    return _CIRCLE * alone + inner.translate(_SIGNS)


def joined(names: Iterable[str]) -> str:
    """The pieces of a word, as `shown` writes them or with the ``##`` of WordPiece, as one word.

    Example:
        >>> joined(["play", "##ing"]), joined(["␣", "é", "⇠", "t", "é"]), joined(["⇠"])
        ('playing', 'été', '⇠')
    """
    word = ""
    for name in names:
        if word in ("", "␣"):
            word = name
        elif name != CONTINUED:
            word += name.removeprefix(CONTINUES).removeprefix(_CIRCLE)
    return word


def _byte_letters() -> Iterator[tuple[str, int]]:
    """The letter that byte-level tokenizers write for each byte (`bytes_to_unicode` of GPT-2)."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = 0
    for byte in range(256):
        yield chr(byte if byte in printed else 0x100 + others), byte
        others += byte not in printed


#: Of byte-level tokenizers; of those whose tokens are the bytes themselves (ByT5).
_ALPHABETS = (dict(_byte_letters()), {chr(byte): byte for byte in range(256)})


def _bytes_of_letters(alphabet: Mapping[str, int], name: str) -> bytes:
    return bytes(alphabet[letter] for letter in name)


def _bytes_of_piece(name: str) -> bytes:
    byte = _BYTE.fullmatch(name)
    return bytes.fromhex(byte[1]) if byte else name.replace("▁", " ").encode()


def _are_bytes(names: Sequence[str], alphabet: Mapping[str, int]) -> bool:
    """Whether the letters of names stand for bytes: all are in the alphabet, they are text, and something shows it.

    That is a character of several bytes, or a space or a newline where only byte-level tokenizers have it.
    """
    if not all(letter in alphabet for name in names for letter in name):
        return False
    raw = b"".join(_bytes_of_letters(alphabet, name) for name in names)
    raw = raw.lstrip(bytes(range(0x80, 0xC0)))  # the end of a character that was cut off
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError:
        return False
    if any(unicodedata.category(sign) == "Cc" and sign not in "\n\r\t" for sign in text):
        return False
    return not text.isascii() or any(name.startswith("Ġ") or (name and not name.strip("ĠĊ")) for name in names)
