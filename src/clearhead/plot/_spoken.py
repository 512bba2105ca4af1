"""The argument `language` of the functions that make pages and pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from .._checks import LANGUAGES, choice
from ._fonts import drawable_language, fonts
from ._language import speaking, words_now

if TYPE_CHECKING:
    from matplotlib.axes import Axes

P = ParamSpec("P")
T = TypeVar("T")


def spoken(make: Callable[P, T]) -> Callable[P, T]:
    """Run a function in the language of its argument `language`, ``"en"`` by default."""

    @wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> T:
        with speaking(choice("language", options.get("language", "en"), LANGUAGES)):
            return make(*args, **options)

    return made


def spoken_picture(draw: Callable[P, Axes]) -> Callable[P, Axes]:
    """The same for a matplotlib picture: in English if no installed font has the characters of the language."""

    @spoken
    @wraps(draw)
    def drawn(*args: P.args, **options: P.kwargs) -> Axes:
        with drawable_language():
            axes = draw(*args, **options)
            if words_now():
                _set_fonts(axes)
        return axes

    return drawn


def _set_fonts(axes: Axes) -> None:
    """Fonts for the texts that axes had before: their titles and the labels of their axes."""
    from matplotlib.text import Text

    for text in axes.findobj(Text):
        if isinstance(text, Text) and not text.get_text().isascii():
            text.set_fontfamily(fonts(text.get_text()))
