"""Writes the table of transformers' types into the page of models, from the result file of the test of all types."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "architectures.json"
#: Where the page has the table.
PLACE = "<!-- models -->"
#: Characters of an error in the table.
LONGEST = 160
BY_UPGRADE = "by clearhead.upgrade(model) only"
HEAD = "<thead><tr><th>model_type</th><th>result</th><th>remark</th></tr></thead>"
TABLE = """<div class="models">
<p><label>Find a type <input type="search" autocomplete="off" spellcheck="false"></label> <output></output></p>
<div class="rows" tabindex="0" role="region" aria-label="All types"><table class="models-table">{head}<tbody>
{rows}
</tbody></table></div>
</div>"""


def types(figures: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Every type with its result and a remark."""
    remarks = figures.get("parts left", {}) | dict.fromkeys(figures["by upgrade"], BY_UPGRADE) | figures["as far"]
    for name, value in figures["known"].items():
        remarks[name] = f"outputs agree; weights differ by {value:.1e}, because eager scales them to a sum of 1"
    for name, (own, sdpa) in figures["gradients"]["worse"].items():
        remarks[name] = f"error of gradients {own:.1e}, SDPA {sdpa:.1e}"
    for result in ("agrees", "keeps eager", "refused", "differs", "not built"):
        for name, remark in _named(figures[result]):
            shown = "agrees with SDPA" if result == "agrees" and name in figures["as far"] else result
            remark = remark or remarks.get(name, "")
            if result == "agrees" and name in figures.get("mechanisms", {}):
                kinds = sorted({key.partition(":")[0] for key in figures["mechanisms"][name]})
                remark = "; ".join(filter(None, [remark, f"with {', '.join(kinds)}"]))
            yield name, shown, _short(remark)


def with_table(text: str) -> str:
    """The text of a page with the table in its place."""
    if PLACE not in text:
        return text
    found = types(json.loads(RESULTS.read_text(encoding="utf-8"))["figures"])
    rows = "\n".join(_row(*each) for each in sorted(found, key=lambda row: row[0].casefold()))
    return text.replace(PLACE, TABLE.format(head=HEAD, rows=rows))


def _named(entries: Any) -> Iterator[tuple[str, str]]:
    """Names with remarks, of a list of names, of remarks by name, or of names by remark."""
    if isinstance(entries, list):
        yield from ((name, "") for name in entries)
        return
    for key, value in entries.items():
        yield from ((name, key) for name in value) if isinstance(value, list) else [(key, value)]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rsplit(' ', 1)[0]} …"


def _row(name: str, result: str, remark: str) -> str:
    return f"<tr><td><code>{html.escape(name)}</code></td><td>{result}</td><td>{html.escape(remark)}</td></tr>"
