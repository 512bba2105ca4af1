"""Fonts of matplotlib pictures: installed ones for the characters that its own font lacks, such as CJK and emoji."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ._labels import printable
from ._language import language_now, speaking, words_now

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST = "DejaVu Sans"  # comes with matplotlib
#: Tried before all other installed fonts, because these are made for running text.
PREFERRED = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "SimHei",
    "Noto Sans",
    "Noto Emoji",
    "Segoe UI",
    "Segoe UI Emoji",
    "Arial Unicode MS",
)
BOXES = re.compile(r"\.?Last ?Resort")  # fonts that have a box for every character
MISSING = re.compile(r"Glyph (\d+) .*missing from")
MOST_NAMED = 5
#: Options of `savefig` by the kind of a file. A PNG takes half of the time of the default level, and is 5 % larger.
SAVED: dict[str, dict[str, Any]] = {"png": {"pil_kwargs": {"compress_level": 4}}}


def fonts(text: str = "") -> list[str]:
    """Font families that have the characters of a text together, as far as fonts are installed."""
    from matplotlib.font_manager import fontManager

    families = [FIRST]
    lacking = set(map(ord, text)) - characters_of(FIRST)
    if lacking:
        add_new_fonts()
    installed = sorted(font.name for font in fontManager.ttflist if not BOXES.match(font.name))
    for name in dict.fromkeys((*PREFERRED, *installed)) if lacking else ():
        if lacking & characters_of(name):
            families.append(name)
            lacking -= characters_of(name)
        if not lacking:
            break
    return families


@functools.cache
def add_new_fonts() -> None:
    """Add the fonts that were installed after matplotlib stored its list of fonts."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    for path in set(findSystemFonts()) - {font.fname for font in fontManager.ttflist}:
        with suppress(OSError, RuntimeError):  # a damaged file, or one that matplotlib cannot draw
            fontManager.addfont(path)


@functools.cache
def characters_of(family: str) -> frozenset[int]:
    """The characters of a font family's upright face; none if it is not installed or its glyphs are bitmaps."""
    from matplotlib.font_manager import fontManager, get_font

    for font in fontManager.ttflist:
        if (font.name, font.style, font.weight) == (family, "normal", 400):
            try:
                return frozenset(get_font(font.fname).get_charmap())
            except (OSError, RuntimeError):  # colour bitmaps, which matplotlib cannot draw, or a damaged file
                return frozenset()
    return frozenset()


@contextmanager
def drawable_language() -> Generator[None]:
    """Draw in the chosen language, or in English if no installed font has the characters of that language."""
    from matplotlib import rc_context

    text = "".join(words_now().values())
    families = fonts(text)
    readable = set(map(ord, text)) <= set[int]().union(*map(characters_of, families))
    with speaking(language_now() if readable else "en"), rc_context({"font.family": families} if text else {}):
        yield


def figure_bytes(figure: Figure, kind: str, notify: Callable[[str], None] = lambda message: None) -> bytes:
    """A figure as a ``"png"``, ``"svg"`` or ``"pdf"``.

    `notify` is called once if no installed font has some characters, in place of matplotlib's warning for each.
    """
    target = BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", MISSING.pattern)
        figure.savefig(target, dpi=150, format=kind, **SAVED.get(kind, {}))
    lacking: dict[str, None] = {}
    for warning in caught:
        match = MISSING.match(str(warning.message))
        if match is None:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        else:
            lacking[chr(int(match[1]))] = None
    if lacking:
        named = ", ".join(printable(list(lacking)[:MOST_NAMED]))
        more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
        notify(
            f"no installed font has {named}{more}, so the picture shows boxes. Install one that has, such as Noto Sans "
            "CJK or Noto Emoji. The page uses the browser's fonts."
        )
    return target.getvalue()
