"""A page of 24 layers × 32 heads on 2,000 tokens: its size, its first paint, and what every action takes.

    python -m benchmarks.seeing.page_actions [--docs]

An action is timed in headless Chromium, as processor time of the page's main thread for its handlers and the layout.
The figure is the median of all rounds. The first paint is the time from the start of loading to the first pixel, by the
browser's own clock. Needs Chromium and the package playwright.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.seeing.page_model import structured
from benchmarks.writing import milliseconds, table
from tests.support.chromium import opened_browser

REST = 200  # milliseconds between actions, until everything is drawn; of the smallest work a tenth
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def choose(name: str, *values: str) -> str:
    """Choose the next of some values in a menu."""
    return f"""(turn) => {{
        const menu = document.getElementById("{name}");
        menu.focus();
        menu.value = {list(values)}[turn % {len(values)}];
        menu.dispatchEvent(new Event("change"));
    }}"""


def point(name: str, event: str) -> str:
    """Move the pointer over an element."""
    return f"""(turn) => {{
        const target = document.getElementById("{name}");
        const {{ left, top }} = target.getBoundingClientRect();
        const place = {{ clientX: left + 50 + 31 * turn, clientY: top + 60 + 17 * turn, bubbles: true }};
        target.dispatchEvent(new PointerEvent("{event}", place));
    }}"""


ACTIONS = {
    "choose a head": "(turn) => document.querySelectorAll('#overview button')[37 * turn + 5].click()",
    "point at the map": point("cells", "pointermove"),
    "choose a query": choose("from", "10", "7", "9"),
    "choose a key": choose("to", "10", "7", "9"),
    "sort the heads": choose("order", "entropy", "kinds", "asked", "layers"),
    "show numbers": choose("statistic", "entropy", "maps"),
    "switch arcs": "() => document.getElementById('arcs').click()",
    "leave out special tokens": "() => document.getElementById('special').click()",
    "change the theme": choose("theme", "dark", ""),
    "zoom": "(turn) => document.getElementById(turn % 2 ? 'zoom-out' : 'zoom-in').click()",
    "scroll the heads": "() => document.getElementById('overview').scrollBy(0, 100)",
}


@contextmanager
def opened_page(effort: Effort) -> Generator[tuple[Path, Any], None, None]:
    """The file of the page, and the page in a browser."""
    rec, tokens = structured(effort.size(24, 4), effort.size(32, 50), effort.size(2000, 40))
    with tempfile.TemporaryDirectory() as folder, opened_browser() as browser:
        path = rec.page(tokens).save(Path(folder) / "page.html")
        opened = browser.new_page(viewport={"width": 1400, "height": 900})
        opened.goto(path.as_uri())
        opened.wait_for_selector("html[data-ready]", timeout=60_000)
        yield path, opened


def measured(effort: Effort) -> dict[str, float]:
    """Megabytes of the file, milliseconds of the first paint and of every action."""
    with opened_page(effort) as (path, opened):
        paints: list[float] = []
        rest = effort.size(REST, REST // 10)
        for _ in range(effort.rounds):
            opened.reload()
            opened.wait_for_selector("html[data-ready]", timeout=60_000)
            opened.wait_for_timeout(rest)
            paints.append(opened.evaluate(PAINT))
        found = {"megabytes": path.stat().st_size / 1e6, "first paint": statistics.median(paints)}
        session = opened.context.new_cdp_session(opened)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        timed = partial(_milliseconds, opened, session, effort.rounds, rest)
        return found | {name: timed(action) for name, action in ACTIONS.items()}


def _milliseconds(opened: Any, session: Any, rounds: int, rest: int, action: str) -> float:
    times: list[float] = []
    for turn in range(rounds):
        before = _busy(session)
        opened.evaluate(f"(turn) => {{ ({action})(turn); document.body.getBoundingClientRect(); }}", turn)
        times.append(1e3 * (_busy(session) - before))
        opened.wait_for_timeout(rest)
    return statistics.median(times)


def _busy(session: Any) -> float:
    """Seconds for which the page's main thread has worked."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def lines(effort: Effort) -> list[Line]:
    return [Line("24 × 32 heads, 2,000 tokens", lambda: measured(effort))]


def texts(measured: Figures) -> dict[str, str]:
    found: dict[str, float] = dict(measured["24 × 32 heads, 2,000 tokens"])
    size, paint = found.pop("megabytes"), found.pop("first paint")
    return {
        "table": table(("action", "ms"), [(name, f"{value:.0f}") for name, value in found.items()]),
        "size": f"{size:.1f} MB",
        "paint": milliseconds(paint / 1e3),
        "slowest": milliseconds(max(found.values()) / 1e3),
    }


BENCHMARK = Benchmark("page_actions", __doc__, lines, texts, minutes=2)

if __name__ == "__main__":
    BENCHMARK.main()
