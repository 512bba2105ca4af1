"""A walkthrough, and its text for a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .._checks import shown
from ..errors import UnknownNameError, shape_text
from ._walkthrough_steps import Step, words_in

_WIDTH = 96
_LARGEST_TABLE = 6
_PLACES_NAMED = 4
_NEVER_FIRST = "，。；：、）”？！"


@dataclass(frozen=True, eq=False)
class Walkthrough:
    """The steps of one call. ``str()`` returns a readable text.

    Args:
        language: ``"en"`` or ``"zh"``.
        sizes: the number of each letter in the shapes.
        steps: all steps in order. ``walkthrough["scores"]`` returns one by name.
        output: the result of the last step, (B, L, E).
        difference: the largest absolute difference from the module's output.
        agrees: whether rounding explains that difference.
        hidden_rows: bool (B, H, L), ``True`` for fully masked rows.
        training: whether the module was in training mode. The steps are always those of evaluation mode.

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
        """All steps, a table of weights if the lengths are small, and notes on masked rows and rounding."""
        words = words_in(self.language)
        phrases = words["phrases"]
        lines = [phrases["heading"], "", phrases["letters"]]
        lines += [f"  {letter:<3} = {size:<4} {words['letters'][letter]}" for letter, size in self.sizes.items()]
        if "key_input" not in {step.name for step in self.steps}:
            lines.append("  " + phrases["self_attention"])
        for number, step in enumerate(self.steps, 1):
            lines += ["", f"{number}. {step.title}", *_step_lines(step, words)]
            if step.name == "softmax":
                lines += _weight_table(step, phrases) + _hidden_rows(self.hidden_rows, phrases)
        lines += ["", *_wrap(phrases["training"])] if self.training else [""]
        difference = f"{self.difference:.1e}" if self.difference else "0"
        lines += _wrap(phrases["agrees" if self.agrees else "disagrees"].format(difference=difference))
        return "\n".join(lines)


def _step_lines(step: Step, words: dict[str, Any]) -> list[str]:
    phrases, colon = words["phrases"], words["phrases"]["colon"]
    letters = dict.fromkeys(re.findall(r"[A-Za-z]+", step.symbols))
    return [
        *_wrap(step.meaning, indent="   "),
        f"   {phrases['formula']}{colon}{step.formula}",
        f"   {phrases['shape']}{colon}{step.symbols} = {shape_text(step.shape)}",
        f"   {' ' * _columns(phrases['shape'] + colon)}"
        + phrases["separator"].join(f"{letter} {words['letters'][letter]}" for letter in letters),
    ]


def _weight_table(step: Step, phrases: dict[str, str]) -> list[str]:
    queries, keys = step.shape[-2:]
    if not (0 < queries <= _LARGEST_TABLE and 0 < keys <= _LARGEST_TABLE) or 0 in step.shape:
        return []
    rows = [f"   {f'q{i}':>3}" + "".join(f"{weight:7.3f}" for weight in row) for i, row in enumerate(step.tensor[0, 0])]
    return ["   " + phrases["weights"], "      " + "".join(f"{f'k{j}':>7}" for j in range(keys)), *rows]


def _hidden_rows(hidden: Tensor, phrases: dict[str, str]) -> list[str]:
    """List the fully masked queries: first those of all heads, then those of single heads."""
    count = int(hidden.sum())
    if count == 0:
        return []
    in_all_heads = hidden.all(1)  # (B, L)
    in_some_heads = hidden & ~in_all_heads[:, None]  # (B, H, L)
    places = [phrases["place_all_heads"].format(b=b, q=q) for b, q in in_all_heads.nonzero().tolist()]
    places += [phrases["place"].format(b=b, h=h, q=q) for b, h, q in in_some_heads.nonzero().tolist()]
    if len(places) > _PLACES_NAMED:
        places[_PLACES_NAMED:] = [phrases["more"]]
    named = phrases["place_separator"].join(places)
    return _wrap(phrases["hidden_rows"].format(count=count, rows=hidden.numel(), places=named), "   ")


def _wrap(text: str, indent: str = "") -> list[str]:
    """Break lines at `_WIDTH` columns, between words or between Chinese characters."""
    lines, line = [], indent
    for word in re.findall(r"[!-~−-⋿–·…]+| |.", text):
        if _columns(line) + _columns(word) > _WIDTH and word not in _NEVER_FIRST:
            lines.append(line.rstrip())
            line = indent
        if word != " " or line != indent:
            line += word
    return [*lines, line.rstrip()]


def _columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
