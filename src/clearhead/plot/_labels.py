"""Names as text that is safe and short enough to show anywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence


def printable(tokens: Sequence[str]) -> list[str]:
    r"""Write control and invisible characters as escapes, so that a token cannot steer a terminal or flip a line.

    Example:
        >>> printable(["street", "\x1b[31m", "\u202e", "街"])
        ['street', '\\x1b[31m', '\\u202e', '街']
    """
    return [token if token and token.isprintable() else _escaped(token) for token in tokens]


def _escaped(token: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in token) or "∅"


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
    labels = [found[1] for found in numbers if found]
    return labels if len(set(labels)) == len(names) else [str(index) for index in range(len(names))]
