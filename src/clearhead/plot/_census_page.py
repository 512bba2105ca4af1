"""The page of a census: every head by any two metrics, and the texts in which it was strongest."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from ._bundle import bundle
from ._labels import printable, shortened
from ._language import say, words_now
from ._page_maker import Page, filled_page, part_of_page

_LONGEST = 24  # characters of a token
MAP = 48  # tokens of a map


@dataclass(frozen=True)
class StrongRow:
    """The weights of one query in a text in which a metric of its head was large.

    Args:
        metric, value: the metric and its value there.
        text, position: the text and the query, from 0.
        context: the tokens around the query, with their weights.
        at: the place of the query in the context.
        keys: the largest keys: token, position and weight.
        weights: the weights of the first `MAP` tokens, (n, n), or ``None``.
    """

    metric: str
    value: float
    text: int
    position: int
    context: Sequence[tuple[str, float]]
    at: int
    keys: Sequence[tuple[str, int, float]]
    weights: Tensor | None = None

    def described(self) -> dict[str, Any]:
        """The row as JSON."""
        names = printable([token for token, _ in self.context])
        keys = printable([token for token, _, _ in self.keys])
        return {
            "metric": self.metric,
            "value": round(self.value, 4),
            "text": self.text,
            "position": self.position,
            "at": self.at,
            "context": [
                [shortened(name, _LONGEST), round(weight, 3)]
                for name, (_, weight) in zip(names, self.context, strict=True)
            ],
            "keys": [
                [shortened(name, _LONGEST), position, round(weight, 3)]
                for name, (_, position, weight) in zip(keys, self.keys, strict=True)
            ],
            "map": None if self.weights is None else _map(self.weights),
        }


def census_page(
    census: Mapping[str, Any],
    rows: Mapping[tuple[int, int], Sequence[StrongRow]],
    *,
    title: str,
    kinds: Mapping[str, Sequence[tuple[int, int, float]]],
    masses: Sequence[str],
    other: str | None = None,
) -> Page:
    """The page.

    Args:
        census: the index of a census, as `Census.as_json` returns it.
        rows: (layer, head) → its strongest rows.
        title: of the page.
        kinds: kind → heads (layer, head, mean), the largest first.
        masses: the metrics whose scales begin at 0.
        other: the address of a page of all weights, beside this one.
    """
    heads, columns = census["heads"], list(census["heads"][0]["columns"]) if census["heads"] else []
    metrics = [*census["metrics"], *({"name": name, "meaning": name, "counts": ""} for name in columns)]
    described = [_described(head, rows.get((head["layer"], head["head"]), ())) for head in heads]
    named = next((kind for kind, ranked in kinds.items() if ranked), None)
    first = (kinds[named][0][:2] if named else (0, 0)) if heads else (0, 0)
    data = {
        "metrics": metrics,
        "masses": list(masses),
        "heads": described,
        "metric": named or "entropy",
        "first": next(at for at, head in enumerate(heads) if (head["layer"], head["head"]) == tuple(first)),
        "other": other,
        "words": words_now(),
    }
    tokens, texts = f"{census['tokens']:,}", f"{census['texts']:,}"
    parts = {
        "facts": html.escape(say("{0} heads · {1} tokens in {2} texts", len(heads), tokens, texts)),
        "kinds": _kinds(kinds),
        "table": _table(metrics, described),
    }
    style = part_of_page("page.css") + part_of_page("census.css")
    return filled_page("census.html", printable([title])[0], style, _script(), data, parts)


def _described(head: Mapping[str, Any], rows: Sequence[StrongRow]) -> dict[str, Any]:
    values = [*(each["mean"] for each in head["metrics"].values()), *head["columns"].values()]
    return {
        **{name: head[name] for name in ("layer", "head", "module", "kinds")},
        "values": [None if value is None else round(value, 4) for value in values],
        "rows": [row.described() for row in rows],
    }


def _kinds(kinds: Mapping[str, Sequence[tuple[int, int, float]]]) -> str:
    """The heads of each kind as links, which need no script."""
    lines = [
        f"<dt>{html.escape(kind)}</dt><dd>"
        + "".join(
            f'<a href="#layer={layer}&amp;head={head}">{layer}.{head}&nbsp;({mean:.2f})</a>'
            for layer, head, mean in ranked[:16]
        )
        + (f"<span>{html.escape(say('and {0} more', len(ranked) - 16))}</span>" if len(ranked) > 16 else "")
        + "</dd>"
        for kind, ranked in kinds.items()
        if ranked
    ]
    note = say("Layer and head, from 0, and the mean weight on such keys. No head is listed below its threshold.")
    return f'<dl class="kinds">{"".join(lines)}<p class="quiet">{html.escape(note)}</p></dl>'


def _table(metrics: Sequence[Mapping[str, Any]], heads: Sequence[Mapping[str, Any]]) -> str:
    """Every mean, for readers without scripts and for copying."""
    names = "".join(f'<th scope="col">{html.escape(metric["name"])}</th>' for metric in metrics)
    body = "".join(
        f'<tr><th scope="row">{head["layer"]}.{head["head"]}</th>'
        + "".join(f"<td>{'–' if value is None else f'{value:.3f}'}</td>" for value in head["values"])
        + "</tr>"
        for head in heads
    )
    return f"<table><thead><tr><th></th>{names}</tr></thead><tbody>{body}</tbody></table>"


def _map(weights: Tensor) -> dict[str, Any]:
    levels = (weights[:MAP, :MAP].clamp(0, 1) * 255).round().byte().contiguous()
    return {"size": levels.shape[0], "levels": base64.b64encode(levels.numpy().tobytes()).decode("ascii")}


@cache
def _script() -> str:
    return f'"use strict";\n(() => {{\n{bundle("census_main.js", part_of_page)}}})();\n'
