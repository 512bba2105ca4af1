"""What the figures of engines say: tables for each model, and Clearhead beside the best of the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from benchmarks.comparing import OURS
from benchmarks.comparing.pictures import draw_speed
from benchmarks.comparing.tables import QUIET
from benchmarks.encoders.batches import EQUAL, MIXED
from benchmarks.encoders.models import MODELS, RANDOM
from benchmarks.figures import ROOT, Figures
from benchmarks.writing import megabytes, milliseconds, ratio, seconds, significant, table

__all__ = ["IN_TURN", "LONG", "SHORT", "SINGLY", "SORTED", "THEIRS", "pictures", "texts", "wrong"]

#: The way that is compared with, in float32: transformers with the attention that it chooses.
THEIRS = "transformers"
SORTED, SINGLY = "mixed, sorted into four batches", "mixed, one at a time"
SHORT, LONG = "one text of 16 tokens", "one text of 200 tokens"
IN_TURN = "MiniLM, all engines in turn"
#: What a cosine may lose by rounding; int8 is only shown.
LOSSES = {"float32": 1e-5, "bfloat16": 1e-2}


@final
@dataclass(frozen=True)
class Standing:
    """Clearhead beside others with MiniLM.

    Args:
        precision, work: Clearhead's.
        beside: the precision of the others.
        works: the others' ways to do the same work.
        engine: which other; the best of all by default.
        turns: whether all run in turn in one process.
    """

    precision: str
    work: str
    beside: str
    works: tuple[str, ...]
    engine: str = ""
    turns: bool = False

    @property
    def title(self) -> str:
        return f"{self.precision}, {self.work}{', in turn' if self.turns else ''}"

    @property
    def others(self) -> str:
        """Which of them count, in words."""
        how = {(SORTED,): ", sorted into four batches", _ANY: ", used in its best way"}.get(self.works, "")
        return f"{self.engine or 'the best engine'} in {self.beside}{how}"


_ANY = (MIXED, SORTED, SINGLY)
#: By the marker.
STANDINGS = {
    "equal": Standing("float32", EQUAL, "float32", (EQUAL,)),
    "equal-turns": Standing("float32", EQUAL, "float32", (EQUAL,), turns=True),
    "mixed": Standing("float32", MIXED, "float32", (MIXED,)),
    "mixed-turns": Standing("float32", MIXED, "float32", (MIXED,), turns=True),
    "mixed-any": Standing("float32", MIXED, "float32", _ANY),
    "default": Standing("float32", MIXED, "float32", (MIXED,), THEIRS),
    "half-equal": Standing("bfloat16", EQUAL, "int8", (EQUAL,)),
    "half-equal-turns": Standing("bfloat16", EQUAL, "int8", (EQUAL,), turns=True),
    "half-mixed": Standing("bfloat16", MIXED, "int8", (MIXED,)),
    "half-mixed-turns": Standing("bfloat16", MIXED, "int8", (MIXED,), turns=True),
    "half-mixed-sorted": Standing("bfloat16", MIXED, "int8", (SORTED,)),
    "half-mixed-any": Standing("bfloat16", MIXED, "int8", _ANY),
    "half-default": Standing("bfloat16", MIXED, "float32", (MIXED,), THEIRS),
    "half-default-turns": Standing("bfloat16", MIXED, "float32", (MIXED,), THEIRS, turns=True),
    "short": Standing("float32", SHORT, "float32", (SHORT,), "OpenVINO"),
    "half-short": Standing("bfloat16", SHORT, "bfloat16", (SHORT,), "OpenVINO"),
    "long": Standing("float32", LONG, "float32", (LONG,), "OpenVINO"),
    "half-long": Standing("bfloat16", LONG, "bfloat16", (LONG,), "OpenVINO"),
}
#: The bars of the picture, by the marker of a standing.
_BARS = {
    "default": "mixed lengths, beside transformers",
    "mixed": "mixed lengths, beside the best in float32",
    "half-default": "mixed lengths, bfloat16 beside transformers",
    "half-mixed": "mixed lengths, bfloat16 beside the best int8",
    "equal": "equal lengths, beside the best in float32",
    "half-equal": "equal lengths, bfloat16 beside the best int8",
    "long": "one text of 200 tokens, beside OpenVINO",
    "short": "one text of 16 tokens, beside OpenVINO",
}
PICTURE = ROOT / "docs" / "images" / "engines.svg"


def texts(figures: Figures) -> dict[str, str]:
    found: dict[str, str] = {}
    rows: list[tuple[str, ...]] = []
    for marker, standing in STANDINGS.items():
        ours, others = _times(figures, standing)
        best = min(others, key=lambda way: others[way], default="")
        gain = ratio(others[best] / ours) if best and ours is not None else "–"
        found |= {marker: gain, f"{marker}-best": best or "–"}
        rows.append((standing.title, standing.others, best or "–", _time(ours), _time(others.get(best)), gain))
    found["standings"] = table(("MiniLM", "beside", "which is", OURS, "the other", "ratio"), rows, left=3)
    found["tables"] = "\n\n".join(
        [*_tables(figures), "### Remarks on the engines", "\n".join(f"* {line}" for line in _remarks(figures))]
    )
    lost = figures[_line("MiniLM", OURS, "bfloat16")].get("lost")
    found["cosine"] = "–" if lost is None else _cosine(lost["worst"])
    return found


def pictures(figures: Figures) -> dict[Path, str]:
    """One bar for each standing of `_BARS`, as long as Clearhead is fast beside the other."""
    bars: dict[str, float] = {}
    for marker, name in _BARS.items():
        ours, others = _times(figures, STANDINGS[marker])
        if ours is not None and others:
            bars[name] = min(others.values()) / ours
    return {PICTURE: draw_speed(bars, "speed of Clearhead beside the other (1: as fast; longer: faster)")}


def _times(figures: Figures, standing: Standing) -> tuple[float | None, dict[str, float]]:
    """Seconds of Clearhead, if it has this precision, and of each way to use another."""
    ours, others = None, {}
    for engine, precision, times in _timed(figures, standing.turns):
        if engine == OURS and precision == standing.precision:
            ours = times[standing.work]
        elif engine != OURS and precision == standing.beside and standing.engine in ("", engine):
            others |= {_way(engine, precision, work): times[work] for work in standing.works}
    return ours, others


def _timed(figures: Figures, turns: bool) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Engine, precision and seconds by work, for MiniLM."""
    timed = figures[IN_TURN]["times"] if turns else _alone(figures, "MiniLM", "times")
    for line, times in timed.items():
        _, engine, precision = line.split(", ")
        yield engine, precision, times


def _way(engine: str, precision: str, work: str) -> str:
    how = {SORTED: ", sorted", SINGLY: ", one at a time"}.get(work, "")
    return f"{engine}, {precision}{how}"


def _alone(figures: Figures, model: str, what: str) -> dict[str, Any]:
    """What was measured of each engine that takes part, by line."""
    return {
        line: found[what]
        for line, found in figures.items()
        if line.startswith(f"{model}, ") and what in found and line != IN_TURN
    }


def _line(model: str, engine: str, precision: str) -> str:
    return f"{model}, {engine}, {precision}"


def _tables(figures: Figures) -> Iterator[str]:
    for model in MODELS:
        measured = {line: figures[line] for line in _alone(figures, model, "times")}
        if not measured:
            continue
        named = {line.partition(", ")[2]: found for line, found in measured.items()}
        works = list(next(iter(named.values()))["times"])
        yield f"### {model}"
        yield table(
            ("ms", *works),
            ((name, *(significant(found["times"][work] * 1e3) for work in works)) for name, found in named.items()),
        )
        yield table(
            ("engine", "worst cosine", "mean cosine", "memory", "peak memory", "time to the first batch"),
            (
                (
                    name,
                    *(_cosine(found["lost"][which]) for which in ("worst", "mean")),
                    *(megabytes(found[which]) for which in ("memory", "peak")),
                    seconds(found["first"]),
                )
                for name, found in named.items()
            ),
        )


def _remarks(figures: Figures) -> Iterator[str]:
    yield from wrong(figures)
    for line, found in figures.items():
        if found.get("load") and found["load"] > QUIET:
            yield f"NOT QUIET: other programs took {found['load']:.0%} of the processors in `{line}`"
    reasons: dict[str, list[str]] = {}
    for line, found in figures.items():
        if line != IN_TURN and "skipped" in found:
            reasons.setdefault(found["skipped"], []).append(f"`{line}`")
    for reason, skipped in reasons.items():
        yield f"Not measured, because {reason}: {', '.join(skipped)}"
    yield f"Random weights: {', '.join(RANDOM)}. The cosines of int8 are those of such weights"


def wrong(figures: Figures) -> list[str]:
    """Embeddings that are further from transformers' than rounding, and NaN."""
    return [
        f"DIFFERENT EMBEDDINGS: {line}: a cosine is {found['lost']['worst']:.1e} below 1, allowed are {limit:.0e}"
        for line, found in figures.items()
        for limit in [LOSSES.get(line.rpartition(", ")[2])]
        if limit is not None and "lost" in found and not found["lost"]["worst"] <= limit
    ]


def _cosine(lost: float) -> str:
    return f"{1 - lost:.5f}"


def _time(value: float | None) -> str:
    return "–" if value is None else milliseconds(value)
