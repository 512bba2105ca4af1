"""The page of a census: the heads of each kind, all heads by any two metrics, and where a head was strongest."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ._encoding import Packer
from ._labels import printable, shortened
from ._language import say, words_now
from ._page_maker import Page, filled_page

_LONGEST = 24  # characters of a token
_LISTED = 8  # heads of a kind

#: Kind → its heads as layer, head and mean mass, the largest first.
Kinds = Mapping[str, Sequence[tuple[int, int, float]]]


@dataclass(frozen=True)
class WholeMap:
    """All weights between neighbouring tokens of a text.

    Args:
        first: the first of them, from 0.
        tokens: their names.
        weights: (n, n).
    """

    first: int
    tokens: Sequence[str]
    weights: Tensor

    def described(self) -> dict[str, Any]:
        """The map as JSON; a weight is one byte."""
        levels = (self.weights.clamp(0, 1) * 255).round().byte().contiguous()
        levels = base64.b64encode(levels.numpy().tobytes()).decode("ascii")
        return {"first": self.first, "tokens": _names(self.tokens), "levels": levels}


@dataclass(frozen=True)
class StrongRow:
    """The weights of one query in a text in which a metric of its head was large.

    Args:
        metric, value: the metric and its value there.
        text, position: the text and the query, from 0.
        context: tokens around the query and around its largest key: position and weight; ``None`` where some are left
            out.
        keys: the largest keys: token, position and weight.
        whole: the map around the query. Default: none.
    """

    metric: str
    value: float
    text: int
    position: int
    context: Sequence[tuple[str, int, float] | None] = ()
    keys: Sequence[tuple[str, int, float]] = ()
    whole: WholeMap | None = None

    def described(self) -> dict[str, Any]:
        """The row as JSON."""
        return {
            "metric": self.metric,
            "value": round(self.value, 4),
            "text": self.text,
            "position": self.position,
            "context": [None if each is None else _key(each) for each in self.context],
            "keys": [_key(each) for each in self.keys],
            "map": None if self.whole is None else self.whole.described(),
        }


def census_page(
    census: Mapping[str, Any],
    rows: Mapping[tuple[int, int], Sequence[StrongRow]],
    *,
    title: str,
    kinds: Kinds,
    least: Mapping[str, float],
    link: str | None = None,
) -> Page:
    """The page.

    Args:
        census: the index of a census, as `Census.as_json` returns it.
        rows: (layer, head) → its strongest rows.
        title: of the page.
        kinds: the heads of each kind.
        least: mass → the mean that names a head.
        link: the address of a page of `clearhead look`, beside this one.
    """
    heads, columns = census["heads"], list(census["heads"][0]["columns"])
    metrics = [{"name": metric["name"], "meaning": say(metric["meaning"])} for metric in census["metrics"]]
    metrics += [{"name": name, "meaning": name} for name in columns]
    values = [_values(head) for head in heads]
    named = next((kind for kind, ranked in kinds.items() if ranked), None)
    first = kinds[named][0][:2] if named else (0, 0)
    packer = Packer()
    names = [[kind for kind, ranked in kinds.items() if any(x[:2] == _place(head) for x in ranked)] for head in heads]
    place = packer.add_json([[row.described() for row in rows.get(_place(head), ())] for head in heads])
    data = {
        "metrics": metrics,
        "least": dict(least),
        "heads": [
            {**{name: head[name] for name in ("layer", "head", "module")}, "kinds": of_head, "values": numbers}
            for head, of_head, numbers in zip(heads, names, values, strict=True)
        ],
        "up": named or "induction",
        "across": "entropy" if named == "previous" else "previous",
        "first": [_place(head) for head in heads].index(first),
        "link": link,
        "items": [{"description": place}],
        "words": words_now(),
    }
    parts = {
        "facts": html.escape(
            say("{0} heads · {1} tokens in {2} texts", len(heads), f"{census['tokens']:,}", f"{census['texts']:,}")
        ),
        "finding": html.escape(_finding(kinds, len(heads))),
        "kinds": _kinds(kinds, least, {metric["name"]: metric["meaning"] for metric in metrics}, heads),
        "examples": _examples(kinds, rows),
        "table": _table(metrics, heads, values),
    }
    return filled_page("census", printable([title])[0], data, [packer.finish()], parts)


def _place(head: Mapping[str, Any]) -> tuple[int, int]:
    return head["layer"], head["head"]


def _values(head: Mapping[str, Any]) -> list[float | None]:
    values = [*(each["mean"] for each in head["metrics"].values()), *head["columns"].values()]
    return [None if value is None else round(value, 4) for value in values]


def _names(tokens: Sequence[str]) -> list[str]:
    return [shortened(name, _LONGEST) for name in printable(tokens)]


def _key(key: tuple[str, int, float]) -> list[Any]:
    return [*_names(key[:1]), key[1], round(key[2], 3)]


def _finding(kinds: Kinds, heads: int) -> str:
    """How many heads each kind has, in one sentence."""
    counts = [f"{len(ranked)} {kind}" for kind, ranked in kinds.items() if ranked]
    if not counts:
        return say("No head reaches the mean weight that names a kind.")
    named = {place[:2] for ranked in kinds.values() for place in ranked}
    return say("{0} of {1} heads have a name: {2}.", len(named), heads, ", ".join(counts))


def _kinds(kinds: Kinds, least: Mapping[str, float], meanings: Mapping[str, str], heads: Sequence[Any]) -> str:
    """Every kind, what it means, and its heads as links."""
    lines: list[str] = []
    for kind, ranked in kinds.items():
        shown = "".join(_link(*place) for place in ranked[:_LISTED])
        if len(ranked) > _LISTED:
            shown += f"<span>{html.escape(say('and {0} more', len(ranked) - _LISTED))}</span>"
        means = [(*_place(head), head["metrics"][kind]["mean"]) for head in heads]
        known = [mean for mean in means if mean[2] is not None]
        if not ranked and known:
            largest = _link(*max(known, key=lambda mean: mean[2]))
            shown = f'<span class="quiet">{html.escape(say("none; the largest:"))}</span>{largest}'
        meaning = f'<span class="quiet">{html.escape(meanings[kind])}</span>'
        lines.append(f"<dt>{html.escape(kind)}{meaning}</dt><dd>{shown or '–'}</dd>")
    usual = least[next(iter(least))]
    others = [f"{kind} {bound:g}" for kind, bound in least.items() if bound != usual]
    bounds = f"{usual:g}" + (f" ({', '.join(others)})" if others else "")
    note = say("Layer.head, from 0, and the mean weight in brackets. A mean of at least {0} names a head.", bounds)
    return f'<p class="quiet">{html.escape(note)}</p><dl class="kinds">{"".join(lines)}</dl>'


def _link(layer: int, head: int, mean: float) -> str:
    label = html.escape(say("layer {0}, head {1}: {2}", layer, head, f"{mean:.2f}"))
    address = f"#layer={layer}&amp;head={head}"
    return f'<a href="{address}" aria-label="{label}">{layer}.{head}&nbsp;({mean:.2f})</a>'


def _examples(kinds: Kinds, rows: Mapping[tuple[int, int], Sequence[StrongRow]]) -> str:
    """Where the first head of each kind was strongest, for readers without scripts."""
    lines: list[str] = []
    for kind, ranked in kinds.items():
        strongest = [row for place in ranked[:1] for row in rows.get(place[:2], ())[:1] if row.metric == kind]
        for row in strongest:
            best = row.keys[0][1] if row.keys else None
            words = " ".join("…" if each is None else _word(each, row.position, best) for each in row.context)
            lines.append(f'<li>{_link(*ranked[0])} {html.escape(kind)}: <span dir="auto">{words}</span></li>')
    return "".join(lines)


def _word(token: tuple[str, int, float], query: int, key: int | None) -> str:
    name, at = html.escape(_names(token[:1])[0]), token[1]
    name = f"<mark>{name}</mark>" if at == key else name
    return f"<strong>{name}</strong>" if at == query else name


def _table(metrics: Sequence[Mapping[str, str]], heads: Sequence[Any], values: Sequence[Sequence[float | None]]) -> str:
    """Every mean, for readers without scripts and for copying."""
    names = "".join(f'<th scope="col">{html.escape(metric["name"])}</th>' for metric in metrics)
    body = "".join(
        f'<tr><th scope="row">{head["layer"]}.{head["head"]}</th>'
        + "".join(f"<td>{'–' if value is None else f'{value:.3f}'}</td>" for value in numbers)
        + "</tr>"
        for head, numbers in zip(heads, values, strict=True)
    )
    return f"<table><thead><tr><td></td>{names}</tr></thead><tbody>{body}</tbody></table>"
