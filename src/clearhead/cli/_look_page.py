"""What ``clearhead look`` prints in the terminal, and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from .._version import __version__
from ..plot._ink import NOTE
from ..plot._labels import printable
from ..plot._terminal import colored_tokens, overview, sparkline, top_keys
from ._demo import TextModel
from ._seeing import Seen

SPARKS = 72


def print_seen(loaded: TextModel, seen: Seen, *, statistic: str | None, chosen: bool) -> None:
    """Print the overview of all heads and the chosen one token by token, in colour if this is a terminal."""
    # A terminal or pipe that is not UTF-8 shows "?" instead of failing.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    layer, head = seen.place
    console = Console(highlight=False)
    console.print(Text(_facts(loaded, seen), style="bold"))
    console.print()
    numbers = None if statistic is None else (statistic, seen.numbers[statistic])
    console.print(overview(seen.summaries, numbers=numbers, chosen=seen.place, width=console.width))
    console.print()
    console.print(Text(f"layer {layer}, head {head}: what each token looks at most", style="bold"))
    if not chosen:
        console.print(Text("Chosen for its clear looks at words further away; choose with --layer and --head.", "dim"))
    if len(seen.windows) > 1:
        first, last = seen.windows[0].first, seen.windows[0].last
        console.print(Text(f"The first window of {len(seen.windows)}, tokens {first}–{last}.", "dim"))
    console.print(top_keys(seen.first, seen.first.layers[layer], head))
    console.print()
    _print_marginals(console, seen)
    console.print(Text(NOTE, style="dim"))
    console.print()


def seen_as_json(loaded: TextModel, seen: Seen) -> str:
    """Everything in numbers; `docs/pictures.md` describes the fields."""
    layer, head = seen.place
    names = [found.name for found in seen.first.layers]
    data: dict[str, Any] = {
        "clearhead": __version__,
        "note": NOTE,
        "model": loaded.name,
        "chosen": {"layer": layer, "head": head},
        "heads": [
            {
                "layer": row,
                "head": column,
                "module": names[row],
                "looks_at": summary.kind,
                **{name: _finite(values[row][column]) for name, values in seen.numbers.items()},
            }
            for row, heads in enumerate(seen.summaries)
            for column, summary in enumerate(heads)
        ],
        "windows": [
            {
                "first": window.first,
                "last": window.last,
                "tokens": list(window.tokens.names),
                "special": list(window.tokens.special),
                "entropy": _rounded(found.entropy.tolist()),
                "received": _rounded(found.received.tolist()),
                "top_keys": found.top_keys.tolist(),
                "top_weights": [_rounded(row) for row in found.top_weights.tolist()],
            }
            for window, found in zip(seen.windows, seen.chosen, strict=True)
        ],
    }
    return json.dumps(data, ensure_ascii=True, allow_nan=False)


def _facts(loaded: TextModel, seen: Seen) -> str:
    heads = max(len(row) for row in seen.summaries)
    tokens = len(seen.windows[0].tokens)
    facts = f"{printable([loaded.name])[0]} · {len(seen.summaries)} layers × {heads} heads"
    if len(seen.windows) == 1:
        return f"{facts} · {tokens} tokens"
    return f"{facts} · {seen.windows[-1].last + 1} tokens in {len(seen.windows)} windows of up to {tokens}"


def _print_marginals(console: Console, seen: Seen) -> None:
    """The text, shaded by what its tokens receive, and both marginals as sparklines.

    A key that everything looks at would leave the others no height at all, so blocks follow square roots there.
    """
    layer, head = seen.place
    found = seen.first.layers[layer]
    received, entropy = found.received[head].tolist(), found.entropy[head].tolist()
    if console.color_system is not None:
        console.print(Text("shaded by what each token receives", style="dim"))
        console.print(colored_tokens(seen.first.keys.names, received))
    lines = (
        ("received", [value**0.5 for value in received], f"{max(received):.1f} of {len(entropy)}, as square roots"),
        ("entropy", entropy, f"{max(entropy):.2f} nats"),
    )
    room = console.width - len("received   up to ") - max(len(most) for _, _, most in lines)
    for name, values, most in lines:
        line = Text(f"{name:>8} ", "dim")
        line.append(sparkline(values, min(SPARKS, max(10, room))), "")
        line.append(f"  up to {most}", "dim")
        console.print(line)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]


def _finite(value: float) -> float | None:
    return round(value, 6) if abs(value) < float("inf") else None
