"""A walkthrough, and its text for a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from .._checks import shown
from ..errors import UnknownNameError, shape_text
from ._walkthrough_steps import Step
from ._walkthrough_text import LANGUAGES, Language

_WIDTH = 96
_LARGEST_TABLE = 6
_PLACES_NAMED = 4
_NEVER_FIRST = "，。；：、）”？！"


@dataclass(frozen=True, eq=False)
class Walkthrough:
    """Every step of one call; ``str()`` is the text to read.

    Args:
        language: ``"en"`` or ``"zh"``.
        sizes: the number behind each letter of the shapes.
        steps: in the order they are computed; ``walkthrough["scores"]`` finds one by name.
        output: what the steps end with, (B, L, E).
        difference: largest absolute difference to what the module itself returns.
        agrees: whether rounding explains that difference.
        hidden_rows: bool (B, H, L), ``True`` where a query sees no key.
        training: whether the module was in training mode (the steps are always those of evaluation mode).

    Example:
        >>> import clearhead, torch
        >>> walk = clearhead.walkthrough(clearhead.MultiHeadAttention(12, 3), torch.randn(2, 5, 12))
        >>> [step.name for step in walk.steps][-3:], walk.agrees
        (['weighted_sum', 'merge', 'output_projection'], True)
    """

    language: str
    sizes: Mapping[str, int]
    steps: tuple[Step, ...]
    output: Tensor = field(repr=False)
    difference: float
    agrees: bool
    hidden_rows: Tensor = field(repr=False)
    training: bool

    def __getitem__(self, name: str) -> Step:
        for step in self.steps:
            if isinstance(name, str) and step.name == name:
                return step
        known = ", ".join(step.name for step in self.steps)
        raise UnknownNameError("name", expected=f"one of {known}", got=shown(name))

    def __str__(self) -> str:
        """All steps, a table of weights where the lengths are small, and what there is to notice."""
        words = LANGUAGES[self.language]
        lines = [words.phrases["heading"], "", words.phrases["letters"]]
        lines += [f"  {letter:<3} = {size:<4} {words.letters[letter]}" for letter, size in self.sizes.items()]
        if "key_input" not in {step.name for step in self.steps}:
            lines.append("  " + words.phrases["self_attention"])
        for number, step in enumerate(self.steps, 1):
            lines += ["", f"{number}. {step.title}", *_step_lines(step, words)]
            if step.name == "softmax":
                lines += _weight_table(step, words) + _hidden_rows(self, words)
        return "\n".join([*lines, "", *_closing_lines(self, words)])


def _step_lines(step: Step, words: Language) -> list[str]:
    colon, comma = words.phrases["colon"], words.phrases["separator"]
    letters = dict.fromkeys(re.findall(r"[A-Za-z]+", step.symbols))
    named = comma.join(f"{letter} {words.letters[letter]}" for letter in letters)
    return [
        *_wrap(step.meaning, indent="   "),
        f"   {words.phrases['formula']}{colon}{step.formula}",
        f"   {words.phrases['shape']}{colon}{step.symbols} = {shape_text(step.shape)}",
        f"   {' ' * _columns(words.phrases['shape'] + colon)}{named}",
    ]


def _weight_table(step: Step, words: Language) -> list[str]:
    queries, keys = step.shape[-2:]
    if not (0 < queries <= _LARGEST_TABLE and 0 < keys <= _LARGEST_TABLE) or 0 in step.shape:
        return []
    rows = step.tensor[0, 0].tolist()
    lines = ["   " + words.phrases["weights"]]
    lines.append("      " + "".join(f"{f'k{j}':>7}" for j in range(keys)))
    for i, row in enumerate(rows):
        lines.append(f"   {f'q{i}':>3}" + "".join(f"{weight:7.3f}" for weight in row))
    return lines


def _closing_lines(walk: Walkthrough, words: Language) -> list[str]:
    lines = _wrap(words.phrases["training"]) if walk.training else []
    sentence = words.phrases["agrees" if walk.agrees else "disagrees"]
    difference = f"{walk.difference:.1e}" if walk.difference else "0"
    return lines + _wrap(sentence.format(difference=difference))


def _hidden_rows(walk: Walkthrough, words: Language) -> list[str]:
    """Name the queries that see no key: first those of all heads, then those of single heads."""
    count = int(walk.hidden_rows.sum())
    if count == 0:
        return []
    phrases = words.phrases
    everywhere = walk.hidden_rows.all(1)  # (B, L)
    single = walk.hidden_rows & ~everywhere[:, None]  # (B, H, L)
    places = [phrases["place_all_heads"].format(b=b, q=q) for b, q in everywhere.nonzero().tolist()]
    places += [phrases["place"].format(b=b, h=h, q=q) for b, h, q in single.nonzero().tolist()]
    if len(places) > _PLACES_NAMED:
        places[_PLACES_NAMED:] = [phrases["more"]]
    named = phrases["place_separator"].join(places)
    return _wrap(phrases["hidden_rows"].format(count=count, rows=walk.hidden_rows.numel(), places=named), "   ")


def _wrap(text: str, indent: str = "") -> list[str]:
    """Break lines between words, or between any two Chinese characters, at a width that terminals have."""
    lines, line = [], indent
    for piece in re.findall(r"[!-~−-⋿–·…]+| |.", text):
        if _columns(line) + _columns(piece) > _WIDTH and piece not in _NEVER_FIRST:
            lines.append(line.rstrip())
            line = indent
        if piece != " " or line != indent:
            line += piece
    return [*lines, line.rstrip()]


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
