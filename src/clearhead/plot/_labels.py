"""Names as text that is safe and short enough to show anywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence


def printable(tokens: Sequence[str]) -> list[str]:
    r"""Write control and invisible characters as escapes, so that a token cannot steer a terminal or flip a line.

    Joiners between two characters stay: emoji and some scripts are written with them.

    Example:
        >>> printable(["street", "\x1b[31m", "\u202e", "街", "\u200d"])
        ['street', '\\x1b[31m', '\\u202e', '街', '\\u200d']
    """
    return [token if token and token.isprintable() else _escaped(token) for token in tokens]


#: A joiner or non-joiner between two characters.
_JOINER = re.compile(r"(?<=[^\s\u200c\u200d])[\u200c\u200d](?=[^\s\u200c\u200d])")


def _escaped(token: str) -> str:
    joiners = {match.start() for match in _JOINER.finditer(token)}
    shown = (
        c if c.isprintable() or place in joiners else c.encode("unicode_escape").decode("ascii")
        for place, c in enumerate(token)
    )
    return "".join(shown) or "∅"


def shortened(text: str, longest: int) -> str:
    """Cut a text to `longest` characters, the last of them an ellipsis.

    Example:
        >>> shortened("uncharacteristically", 8)
        'unchara…'
    """
    return text if len(text) <= longest else text[: longest - 1] + "…"


def layer_labels(names: Sequence[str]) -> list[str]:
    """Number layers as their modules are numbered, and from 0 if they are not.

    Example:
        >>> layer_labels(["encoder.layer.3.attention.self", "encoder.layer.5.attention.self"])
        ['3', '5']
        >>> layer_labels(["first.attention", "second.attention"])
        ['0', '1']
    """
    numbers = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", name) for name in names]
    labels = [number[1] for number in numbers if number]
    return labels if len(set(labels)) == len(names) else [str(index) for index in range(len(names))]
