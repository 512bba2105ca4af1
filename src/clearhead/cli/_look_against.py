"""``clearhead look --against``: two texts, or two models, side by side."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import explain_problem
from ..plot._collect import SectionPicture
from ..plot._comparison_plots import draw_comparison
from ..plot._heads import summarize
from ..plot._labels import layer_labels, printable, shortened
from ..plot._terminal import overview, token_table
from . import _demo as demo
from ._against import Against, see_both, where_they_part
from ._errors import UsageProblem, warn
from ._output import Outcome, as_json, new_console, rounded, rounded_all, show_parts
from ._progress import Work
from ._windows import cut_into_windows, unknown_note

LONGEST_NAME = 60
MOST_CHANGES = 3  # of a token
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
    work: Work,
) -> Outcome:
    """Load what is needed, run both and compare them."""
    first = demo.load_text_model(models[0], notify=warn)
    second = first if models[1] == models[0] else demo.load_text_model(models[1], notify=warn)
    work.loaded()
    windows = (cut_into_windows(first, texts[0]), cut_into_windows(second, texts[1]))
    for note in dict.fromkeys(map(unknown_note, (first, second), windows)):
        if note:
            warn(note)
    count = min(len(side) for side in windows)
    advance = work.step("running both" if count == 1 else f"running both on {count} windows", count)
    titles = [" ".join(text.split()) for text in texts]
    if titles[0] == titles[1]:
        titles = [first.name, second.name if second.name != first.name else models[1] or second.name]
    if titles[0][: LONGEST_NAME - 1] == titles[1][: LONGEST_NAME - 1]:
        titles = list(where_they_part(*titles))
    labels = (shortened(titles[0], LONGEST_NAME), shortened(titles[1], LONGEST_NAME))
    seen = see_both((first, second), windows, labels, layer=layer, head=head, next_window=advance)
    return Outcome(
        figure=lambda: draw_comparison(
            seen.pictures, seen.place, seen.scores, labels=labels, by=seen.comparison.by, note=seen.note
        ),
        page=lambda: seen.page(title=first.name).text,
        as_json=lambda: _numbers(first.name, seen),
        show=lambda: _show(first.name, seen),
    )


def _show(name: str, seen: Against) -> None:
    """Print how different every head is, and where the large one changes."""
    console = new_console()
    heads = max(len(row) for row in seen.scores)
    windows = "" if seen.windows == 1 else f" · {seen.windows} windows"
    by = seen.comparison.by
    measure = "Jensen–Shannon divergence in nats" if by == "divergence" else f"change of {by}"
    labels = layer_labels(seen.modules)
    ranking = ", ".join(
        f"layer {labels[layer]} head {head} ({value:.3f})" for layer, head, value in seen.ranked()[:MOST_RANKED]
    )
    parts: list[RenderableType] = [
        Group(
            Text(f"{printable([name])[0]} · {len(seen.scores)} layers × {heads} heads{windows}", style="bold"),
            *map(Text, map("{}  {}".format, ("first ", "second"), printable(seen.labels))),
            Text(seen.note, style="dim"),
        ),
        overview(summarize(seen.pictures[0]), numbers=(measure, seen.scores), chosen=seen.place, width=console.width),
        Text(f"heads that differ most, by {measure}: {ranking}"),
    ]
    if len(seen.pictures) == 3:
        title = f"layer {labels[seen.place[0]]}, head {seen.place[1]}: where each token's look changes most"
        parts.append(Group(Text(title, style="bold"), _changes(seen.pictures[2], seen.place)))
    show_parts(console, *parts)


def _changes(picture: SectionPicture, place: tuple[int, int]) -> RenderableType:
    keys = printable(picture.keys.names)

    def changes(places: list[int], weights: list[float]) -> list[RenderableType]:
        changed = [pair for pair in zip(places, weights, strict=True) if abs(pair[1]) >= LEAST_CHANGE][:MOST_CHANGES]
        parts = Text("   ".join(keys[key] + f" {change:+.2f}".replace("-", "−") for key, change in changed))
        return [parts or Text("as before", style="dim")]

    return token_table(picture, picture.layers[place[0]], place[1], changes)


def _numbers(name: str, seen: Against) -> str:
    """Everything in numbers; `docs/comparing.md` describes the fields."""
    comparison, modules = seen.comparison, seen.modules
    sides = [rec.summary() for rec in comparison.records]

    def pair(statistic: str, layer: int, head: int) -> list[float | None]:
        names = (modules[layer], comparison.modules[modules[layer]])
        return rounded_all([side[statistic][name][head].item() for side, name in zip(sides, names, strict=True)])

    return as_json(
        name,
        compared=seen.note,
        by=comparison.by,
        labels=list(seen.labels),
        chosen={"layer": seen.place[0], "head": seen.place[1]},
        heads=[
            {
                "layer": layer,
                "head": head,
                "module": modules[layer],
                "difference": rounded(value),
                **{statistic: pair(statistic, layer, head) for statistic in comparison.differences},
            }
            for layer, row in enumerate(seen.scores)
            for head, value in enumerate(row)
        ],
    )
