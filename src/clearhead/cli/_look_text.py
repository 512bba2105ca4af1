"""``clearhead look``: a pretrained model on a text."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..plot._labels import printable
from ..plot._sheet import draw_sheet
from ..plot._terminal import colored_tokens, overview, sparkline, top_keys
from . import _demo as demo
from ._demo import TextModel
from ._errors import warn
from ._output import Outcome, as_json, new_console, rounded, rounded_all, show_parts
from ._progress import Work
from ._seeing import Seen, parts_of, recorded_with, see, shown_numbers, shown_statistic
from ._windows import cut_into_windows, unknown_note

SPARKS = 72
TITLE = 400  # characters of the text, of which the picture shows fewer


def look_at_text(
    text: str,
    model: str | None,
    *,
    layer: int | None,
    head: int | None,
    statistic: str | None,
    work: Work,
) -> Outcome:
    """Load a model, run it on a text and read off where its heads look.

    Args:
        text, model: as on the command line.
        layer, head: the head shown large. Default: chosen automatically.
        statistic: a key of `SHOWN`.
        work: what is at work.
    """
    recorded_with(statistic)  # refuses it before anything is loaded
    loaded = demo.load_text_model(model, notify=warn)
    work.loaded()
    work.step("reading the text")
    windows = cut_into_windows(loaded, text)
    notes = [note for note in (unknown_note(loaded, windows),) if note]
    for note in notes:
        warn(note)
    running = "running it" if len(windows) == 1 else f"running it on {len(windows)} windows"
    advance = work.step(running, parts_of(loaded, windows))
    seen = see(loaded, windows, layer=layer, head=head, statistic=statistic, next_part=advance)
    title = " ".join(text[:TITLE].split())
    numbers, shown = shown_numbers(statistic, seen.numbers), shown_statistic(statistic)
    chosen = layer is not None and head is not None
    return Outcome(
        figure=lambda: draw_sheet(seen.first, *seen.place, title=title, numbers=numbers),
        page=lambda: seen.page.page((0, *seen.place), title=loaded.name, statistic=shown, notes=notes).text,
        as_json=lambda: _numbers(loaded, seen),
        show=lambda: _show(loaded, seen, numbers, chosen),
    )


def _show(loaded: TextModel, seen: Seen, numbers: tuple[str, list[list[float]]] | None, chosen: bool) -> None:
    """Print the overview of all heads and the chosen one token by token, in colour if this is a terminal."""
    layer, head = seen.place
    console = new_console()
    lines: list[RenderableType] = [Text(f"layer {layer}, head {head}: what each token looks at most", style="bold")]
    if not chosen:
        lines.append(Text("Chosen for its clear looks at words further away; choose with --layer and --head.", "dim"))
    if len(seen.windows) > 1:
        first, last = seen.windows[0].first, seen.windows[0].last
        lines.append(Text(f"The first window of {len(seen.windows)}, tokens {first}–{last}.", "dim"))
    show_parts(
        console,
        Text(_facts(loaded, seen), style="bold"),
        overview(seen.summaries, numbers=numbers, chosen=seen.place, width=console.width),
        Group(*lines, top_keys(seen.first, seen.first.layers[layer], head)),
        _marginals(console, seen),
    )


def _numbers(loaded: TextModel, seen: Seen) -> str:
    """Everything in numbers; `docs/pictures.md` describes the fields."""
    layer, head = seen.place
    names = [found.name for found in seen.first.layers]
    return as_json(
        loaded.name,
        chosen={"layer": layer, "head": head},
        heads=[
            {
                "layer": row,
                "head": column,
                "module": names[row],
                "looks_at": summary.kind,
                **{name: rounded(values[row][column].item()) for name, values in seen.numbers.items()},
            }
            for row, heads in enumerate(seen.summaries)
            for column, summary in enumerate(heads)
        ],
        windows=[
            {
                "first": window.first,
                "last": window.last,
                "tokens": list(window.tokens.names),
                "special": list(window.tokens.special),
                "entropy": rounded_all(found.entropy.tolist()),
                "received": rounded_all(found.received.tolist()),
                "top_keys": found.top_keys.tolist(),
                "top_weights": [rounded_all(row) for row in found.top_weights.tolist()],
            }
            for window, found in zip(seen.windows, seen.chosen, strict=True)
        ],
    )


def _facts(loaded: TextModel, seen: Seen) -> str:
    heads = max(len(row) for row in seen.summaries)
    tokens = len(seen.windows[0].tokens)
    facts = f"{printable([loaded.name])[0]} · {len(seen.summaries)} layers × {heads} heads"
    if len(seen.windows) == 1:
        return f"{facts} · {tokens} tokens"
    return f"{facts} · {seen.windows[-1].last + 1} tokens in {len(seen.windows)} windows of up to {tokens}"


def _marginals(console: Console, seen: Seen) -> RenderableType:
    """The text, shaded by what its tokens receive, and both marginals as sparklines.

    A key that everything looks at would leave the others no height at all, so blocks follow square roots there.
    """
    layer, head = seen.place
    found = seen.first.layers[layer]
    received, entropy = found.received[head].tolist(), found.entropy[head].tolist()
    parts: list[RenderableType] = []
    if console.color_system is not None:
        parts = [
            Text("shaded by what each token receives", style="dim"),
            colored_tokens(seen.first.keys.names, received),
        ]
    lines = (
        ("received", [value**0.5 for value in received], f"{max(received):.1f} of {len(entropy)}, as square roots"),
        ("entropy", entropy, f"{max(entropy):.2f} nats"),
    )
    room = console.width - len("received   up to ") - max(len(most) for _, _, most in lines)
    for name, values, most in lines:
        line = Text(f"{name:>8} ", "dim")
        line.append(sparkline(values, min(SPARKS, max(10, room))), "")
        line.append(f"  up to {most}", "dim")
        parts.append(line)
    return Group(*parts)
