"""ASCII replaces the characters that the encoding of an output lacks."""

from __future__ import annotations

import codecs
import sys
import unicodedata
from io import TextIOWrapper

#: Signs of the commands → one ASCII character each, so that columns stay where they are.
SIGNS = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.-~=+*#", strict=True)),
    **dict(zip("░▒▓", ".:*", strict=True)),
    **dict(zip("·×→…–−", "-x>.--", strict=True)),
    **dict(zip("∅⏎␍⇥␣⇠◌�≥√Σ∞", "0||>_<o?>VSi", strict=True)),
}
HANDLER = "clearhead.ascii"


def use_ascii_where_needed() -> None:
    """Let both outputs replace the characters that they lack, instead of failing."""
    codecs.register_error(HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a notebook's has no encoding
            stream.reconfigure(errors=HANDLER)


def unprintable(text: str) -> str:
    """The characters of a text that the output has neither themselves nor in ASCII."""
    encoding = sys.stdout.encoding
    return "".join(sign for sign in dict.fromkeys(text) if not sign.encode(encoding, "ignore") and not _ascii(sign))


def _ascii(sign: str) -> str:
    """A similar ASCII text, such as a letter without its accent, or nothing."""
    return SIGNS.get(sign) or unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_ascii(sign) or "?" * _columns(sign) for sign in lacking), error.end


def _columns(sign: str) -> int:
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1
