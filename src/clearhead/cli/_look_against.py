"""``clearhead look --against``: two texts, or two models, side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..errors import explain_problem
from ..plot._labels import layer_labels, printable, shortened
from ._errors import UsageProblem, warn
from ._output import Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..plot._collect import SectionPicture
    from ._against import Against

LONGEST_NAME = 60
MOST_ROWS = 60
MOST_RANKED = 5
LEAST_CHANGE = 0.005  # what rounds to 0.00 is none


def require_against(against: str | None, against_model: str | None, stat: str | None) -> None:
    """Raise `UsageProblem` for options that mean nothing in a comparison."""
    if against is not None and not against.strip():
        raise UsageProblem(explain_problem("--against", expected="some text", got="nothing but white space"))
    if stat is not None:
        option = "--against" if against_model is None else "--against-model"
        raise UsageProblem(explain_problem("--stat", expected=f"no --stat beside {option}", got=stat))


def look_at_both(
    texts: tuple[str, str],
    models: tuple[str | None, str | None],
    *,
    layer: int | None,
    head: int | None,
    step: Callable[..., Callable[[], None]],
) -> Outcome:
    """Load what is needed, run both and compare them."""
    from . import _demo as demo
    from ._against import see_both
    from ._windows import cut_into_windows

    first = demo.load_text_model(models[0], notify=warn)
    second = first if models[1] == models[0] else demo.load_text_model(models[1], notify=warn)
    windows = (cut_into_windows(first, texts[0]), cut_into_windows(second, texts[1]))
    count = min(len(side) for side in windows)
    advance = step("running both" if count == 1 else f"running both on {count} windows", count)
    titles = [" ".join(text.split()) for text in texts]
    if titles[0] == titles[1]:
        titles = [first.name, second.name if second.name != first.name else models[1] or second.name]
    labels = (shortened(titles[0], LONGEST_NAME), shortened(titles[1], LONGEST_NAME))
    seen = see_both((first, second), windows, labels, layer=layer, head=head, next_window=advance)
    return Outcome(
        figure=lambda: _figure(seen),
        page=lambda: seen.page(title=first.name).text,
        as_json=lambda: both_as_json(first.name, seen),
        show=lambda: print_both(first.name, seen),
    )


def _figure(seen: Against) -> Any:
    from ..plot._comparison_plots import draw_comparison

    return draw_comparison(seen.pictures, seen.place, seen.scores, labels=seen.labels, by=seen.by, note=seen.note)


def print_both(name: str, seen: Against) -> None:
    """Print how different every head is, and where the large one changes."""
    from rich.console import Console
    from rich.text import Text

    from ..plot._ink import NOTE
    from ..plot._terminal import overview

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(highlight=False)
    heads = max(len(row) for row in seen.scores)
    windows = "" if seen.windows == 1 else f" · {seen.windows} windows"
    console.print(Text(f"{printable([name])[0]} · {len(seen.scores)} layers × {heads} heads{windows}", style="bold"))
    for number, label in zip(("first ", "second"), printable(seen.labels), strict=True):
        console.print(Text(f"{number}  {label}"))
    console.print(Text(seen.note, style="dim"))
    console.print()
    measure = "Jensen–Shannon divergence in nats" if seen.by == "divergence" else f"change of {seen.by}"
    console.print(overview(seen.summaries, numbers=(measure, seen.scores), chosen=seen.place, width=console.width))
    console.print()
    labels = layer_labels(seen.modules)
    ranking = ", ".join(
        f"layer {labels[layer]} head {head} ({value:.3f})" for layer, head, value in seen.ranked()[:MOST_RANKED]
    )
    console.print(Text(f"heads that differ most, by {measure}: {ranking}"))
    console.print()
    if len(seen.pictures) == 3:
        title = f"layer {labels[seen.place[0]]}, head {seen.place[1]}: where each token's look changes most"
        console.print(Text(title, style="bold"))
        console.print(_changes(seen.pictures[2], seen.place))
        console.print()
    console.print(Text(NOTE, style="dim"))
    console.print()


def _changes(picture: SectionPicture, place: tuple[int, int]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    layer, head = picture.layers[place[0]], place[1]
    queries, keys = printable(picture.queries.names), printable(picture.keys.names)
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_column(no_wrap=True)
    rows = zip(queries, layer.indices[head].tolist(), layer.weights[head].tolist(), strict=True)
    for query, places, changes in list(rows)[:MOST_ROWS]:
        changed = [pair for pair in zip(places, changes, strict=True) if abs(pair[1]) >= LEAST_CHANGE][:3]
        parts = Text("   ".join(keys[key] + f" {change:+.2f}".replace("-", "−") for key, change in changed))
        table.add_row(Text(query, style="bold"), "→", parts or Text("as before", style="dim"))
    return table


def both_as_json(name: str, seen: Against) -> str:
    """Everything in numbers; `docs/comparing.md` describes the fields."""
    from ..plot._ink import NOTE

    data = {
        "clearhead": __version__,
        "note": NOTE,
        "model": name,
        "compared": seen.note,
        "by": seen.by,
        "labels": list(seen.labels),
        "chosen": {"layer": seen.place[0], "head": seen.place[1]},
        "heads": [
            {
                "layer": layer,
                "head": head,
                "module": seen.modules[layer],
                "difference": round(value, 6),
                **{name: _finite(values[layer][head]) for name, values in seen.numbers.items()},
            }
            for layer, row in enumerate(seen.scores)
            for head, value in enumerate(row)
        ],
    }
    return json.dumps(data, ensure_ascii=True, allow_nan=False)


def _finite(values: Sequence[float]) -> list[float | None]:
    return [round(value, 6) if abs(value) < float("inf") else None for value in values]
