"""The language of pages, pictures and the terminal: texts are English in the code, and looked up in a file."""

from __future__ import annotations

import tomllib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources

_language: ContextVar[str] = ContextVar("language", default="en")


@contextmanager
def speaking(language: str) -> Generator[None]:
    """Choose the language of `say`: one of `_checks.LANGUAGES`."""
    token = _language.set(language)
    try:
        yield
    finally:
        _language.reset(token)


def language_now() -> str:
    """The chosen language."""
    return _language.get()


def words_now() -> Mapping[str, str]:
    """English text → text in the chosen language; empty in English."""
    return _words(language_now())


def say(english: str, *values: object) -> str:
    """A text in the chosen language, with `values` in place of ``{0}``, ``{1}`` and so on.

    Example:
        >>> say("layer {0}, head {1}", 2, 5)
        'layer 2, head 5'
        >>> with speaking("zh"):
        ...     say("layer {0}, head {1}", 2, 5)
        '第 2 层第 5 头'
    """
    text = words_now().get(" ".join(english.split()) if "\n" in english else english, english)
    return text.format(*values) if values else text


@cache
def _words(language: str) -> Mapping[str, str]:
    if language == "en":
        return {}
    file = resources.files("clearhead.plot").joinpath(f"words_{language}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
