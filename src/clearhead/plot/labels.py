"""Tokens as text that is safe to show anywhere."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["printable"]


def printable(tokens: Sequence[str]) -> list[str]:
    r"""Write control and invisible characters as escapes, so that a token cannot steer a terminal or flip a line.

    Example:
        >>> printable(["street", "\x1b[31m", "\u202e", "街"])
        ['street', '\\x1b[31m', '\\u202e', '街']
    """
    return ["".join(c if c.isprintable() else _escaped(c) for c in token) or "∅" for token in tokens]


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
