"""An encoder and a decoder learn to write dates such as ``May 3rd, '79`` or ``jeudi 3 mai 1979`` as ``1979-05-03``.

    python examples/translate_dates.py

What a date can look like is said in `date_formats.py`. The model reads and writes characters. It is tested on dates
that it has never seen in any format, writes them with and without caches, greedily and by beam search, and shows in a
picture where it looks: at the source's year while it writes the year, and so on.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from date_formats import LANGUAGES, Written, alphabet, split_dates, write, write_as
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from searching import CachedWriter, UncachedWriter, beam, greedy
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.positions import Rotary
from clearhead.transformer import Decoder, DecoderCache, DecoderLayer, Encoder, EncoderLayer, SwiGLU

console = Console()

PAD, START, END = 0, 1, 2
CHARACTERS = ["", "<", ">", *sorted(set(alphabet() + "-"))]
NUMBERS = {character: number for number, character in enumerate(CHARACTERS)}
LENGTH = len("1979-05-03") + 1  # with END

EXAMPLES = ["Tuesday 3 May 1979", "03.05.79", "May 3rd, '79", "le 3 mai '79", "den 3. Mai '79", "一九七九年五月三日"]


# The model.


def attention(size: int, heads: int, *, rotary: bool) -> clearhead.MultiHeadAttention:
    position = Rotary(size // heads) if rotary else None
    return clearhead.MultiHeadAttention(size, heads, bias=False, position=position)


class Translator(nn.Module):
    """Characters to characters: an encoder that reads, a decoder that writes.

    The encoder's window keeps what a character says near that character, so that the decoder has to look there.
    """

    def __init__(self, size: int = 64, heads: int = 4, layers: int = 2, window: int = 2) -> None:
        super().__init__()
        self.window = masks.sliding_window(window, window)
        self.embed = nn.Embedding(len(CHARACTERS), size)
        self.encoder = Encoder(
            (
                EncoderLayer(
                    size,
                    attention(size, heads, rotary=True),
                    SwiGLU(size, 2 * size),
                    norm=nn.RMSNorm,
                    norm_first=True,
                )
                for _ in range(layers)
            ),
            norm=nn.RMSNorm(size),
        )
        self.decoder = Decoder(
            [
                DecoderLayer(
                    size,
                    attention(size, heads, rotary=True),
                    attention(size, heads, rotary=False),
                    SwiGLU(size, 2 * size),
                    norm=nn.RMSNorm,
                    norm_first=True,
                )
            ],
            norm=nn.RMSNorm(size),
        )
        self.head = nn.Linear(size, len(CHARACTERS))

    def encode(self, source: Tensor) -> Tensor:
        """(B, S) → (B, S, E)."""
        return self.encoder(self.embed(source), mask=self.window & self.visible(source))

    def decode(
        self,
        target: Tensor,
        memory: Tensor | None,
        source: Tensor,
        cache: Sequence[DecoderCache] | None = None,
    ) -> Tensor:
        """Scores of the next character after each of the target's, (B, L, characters)."""
        written = self.decoder(
            self.embed(target), memory, mask=masks.causal(), memory_mask=self.visible(source), cache=cache
        )
        return self.head(written)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores of the next characters for training, when all of the target is known."""
        return self.decode(target, self.encode(source), source)

    def visible(self, source: Tensor) -> masks.Mask:
        """Everything but padding."""
        return masks.keep(keys=source != PAD)


def as_sources(texts: Sequence[str]) -> Tensor:
    """Texts as numbers between START and END, padded on the right, (B, S)."""
    rows = [torch.tensor([START, *(NUMBERS[character] for character in text), END]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def as_targets(days: Sequence[date]) -> Tensor:
    """START, the ten characters of each date, END: (B, LENGTH + 1)."""
    return torch.tensor([[START, *(NUMBERS[character] for character in str(day)), END] for day in days])


def as_texts(written: Tensor) -> list[str]:
    """Numbers back to texts, up to END."""
    rows = (row[: row.index(END)] if END in row else row for row in written.tolist())
    return ["".join(CHARACTERS[number] for number in row) for row in rows]


# Learning.


@dataclass(frozen=True)
class Batch:
    """Dates as people wrote them, and as they should be."""

    source: Tensor
    target: Tensor


def batches(days: Sequence[date], rng: random.Random, size: int, pool: int = 16) -> Iterator[Batch]:
    """Batches without end, each of texts of about one length, so that little of them is padding."""
    while True:
        written = sorted((write(day, rng) for day in rng.choices(days, k=size * pool)), key=lambda one: len(one.text))
        for first in rng.sample(range(0, size * pool, size), pool):
            part = written[first : first + size]
            yield Batch(as_sources([one.text for one in part]), as_targets([one.day for one in part]))


def translate(model: Translator, texts: Sequence[str], *, width: int = 1, cached: bool = True) -> list[str]:
    """Write texts as dates, by beam search if `width` > 1."""
    source = as_sources(texts)
    with torch.no_grad():
        writer = CachedWriter(model, source, LENGTH) if cached else UncachedWriter(model, source)
    if width == 1:
        return as_texts(greedy(writer, START, END, LENGTH))
    return as_texts(beam(writer, START, END, LENGTH, width))


def share_right(found: Sequence[str], written: Sequence[Written]) -> float:
    """The share of dates that are exactly right."""
    return sum(text == str(one.day) for text, one in zip(found, written, strict=True)) / len(written)


def train(
    model: Translator,
    days: Sequence[date],
    check: Callable[[], float],
    rng: random.Random,
    steps: int,
    batch: int = 128,
) -> int:
    """Train until `check` finds everything right twice running, or nothing better six times, or for all `steps`.

    Returns:
        After how many steps it stopped.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    best, kept, since, perfect, step = -1.0, deepcopy(model.state_dict()), 0, 0, 0
    columns = "{task.description}", BarColumn(), "{task.completed}/{task.total}", TimeElapsedColumn()
    with Progress(*(TextColumn(c) if isinstance(c, str) else c for c in columns), console=console) as progress:
        task = progress.add_task("training", total=steps)
        for step, one in zip(range(1, steps + 1), batches(days, rng, batch), strict=False):
            scores = model(one.source, one.target[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), one.target[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.update(task, advance=1)
            if step % 100 and step < steps:
                continue
            right = check()
            since, perfect = (0 if right > best else since + 1), (perfect + 1 if right == 1 else 0)
            if right > best:
                best, kept = right, deepcopy(model.state_dict())
            progress.update(task, description=f"loss {loss.item():.3f}, {right:.1%} right")
            if perfect == 2 or since == 6:
                progress.update(task, total=step)
                break
    model.load_state_dict(kept)
    return step


# Looking.


@dataclass(frozen=True)
class Look:
    """Where the decoder looks while it writes a part of the date, over many dates.

    Args:
        share: of the weight that falls on what says that part in the source, mean over heads.
        even: what that would be if all characters were looked at alike.
        most: how often the character looked at most is one of those.
    """

    share: float
    even: float
    most: float


PARTS = {"year": ("y", slice(0, 4)), "month": ("m", slice(5, 7)), "day": ("d", slice(8, 10))}


@torch.no_grad()
def cross_attention(model: Translator, texts: Sequence[str], days: Sequence[date]) -> Tensor:
    """What each written character looked at, mean over heads, (B, LENGTH, S)."""
    source, target = as_sources(texts), as_targets(days)
    _, weights = model.decoder(
        model.embed(target[:, :-1]),
        model.encode(source),
        mask=masks.causal(),
        memory_mask=model.visible(source),
        need_weights=True,
    )
    return weights[-1].cross_attention


def looks(model: Translator, written: Sequence[Written]) -> dict[str, Look]:
    """Where the decoder looks while it writes year, month and day."""
    weights = cross_attention(model, [one.text for one in written], [one.day for one in written])  # (B, LENGTH, S)
    roles = [f" {one.roles} ".ljust(weights.shape[2]) for one in written]
    real = torch.tensor([len(one.text) + 2 for one in written])
    found: dict[str, Look] = {}
    for name, (letter, rows) in PARTS.items():
        says = torch.tensor([[role == letter for role in text] for text in roles])  # (B, S)
        part = weights[:, rows]  # (B, figures, S)
        most = says.gather(1, part.argmax(-1))  # (B, figures)
        share = (part * says[:, None]).sum(-1)
        found[name] = Look(share.mean().item(), (says.sum(1) / real).mean().item(), most.float().mean().item())
    return found


def draw(model: Translator, written: Sequence[Written], path: Path) -> None:
    """Save the cross-attention of some dates; frames show where a source says what is being written."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    from clearhead.plot import given

    figure, axes = plt.subplots(1, len(written), figsize=(4.4 * len(written), 4.2), layout="constrained")
    for ax, one in zip(axes, written, strict=True):
        weights = cross_attention(model, [one.text], [one.day])
        given([weights]).plot_map(0, 0, tokens=[*str(one.day), "end"], key_tokens=["start", *one.text, "end"], ax=ax)
        for letter, rows in PARTS.values():
            columns = [place + 1 for place, role in enumerate(one.roles) if role == letter]
            corner = (columns[0] - 0.5, rows.start - 0.5)
            frame = Rectangle(corner, len(columns), rows.stop - rows.start, fill=False, edgecolor="0.4", linewidth=1.2)
            ax.add_patch(frame)
        ax.set_title(f"{one.text} → {one.day}", loc="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# The whole.


def decode_four_ways(model: Translator, written: Sequence[Written], width: int) -> dict[str, Any]:
    """Write everything greedily and by beams, with caches and without: what is right, and what differs.

    Raises:
        RuntimeError: if a text comes out differently without caches.
    """
    texts, shares, different = [one.text for one in written], {}, {}
    for name, beams in (("exact", 1), ("beam_exact", width)):
        cached, uncached = (translate(model, texts, width=beams, cached=kind) for kind in (True, False))
        shares[name] = share_right(cached, written)
        different["greedy" if beams == 1 else "beam"] = sum(
            one != other for one, other in zip(cached, uncached, strict=True)
        )
    if any(different.values()):
        raise RuntimeError(f"of {len(texts)} texts, caches changed {different}")
    return shares | {"beam_width": width, "different_without_cache": different}


def report(results: dict[str, Any], model: Translator, held_out: Sequence[Written]) -> None:
    count, width = results["held_out"], results["beam_width"]
    console.print(f"held-out dates exactly right, of {count}: {results['exact']:.2%} greedily,", end=" ")
    console.print(f"{results['beam_exact']:.2%} by beams of {width}; the same with caches and without")
    table = Table(title="Where it looks while it writes, mean over heads and held-out dates")
    for column in ("writing the", "weight on it in the source", "if all were alike", "looks most at it"):
        table.add_column(column, justify="right")
    for name, look in results["looks"].items():
        table.add_row(name, *(f"{look[key]:.0%}" for key in ("share", "even", "most")))
    console.print(table)
    texts = EXAMPLES + [one.text for one in held_out[:6]]
    for text, found in zip(texts, translate(model, texts), strict=True):
        console.print(f"{found}  {text}", highlight=False)


def main(
    seed: Annotated[int, typer.Option(help="Of the dates, their formats and the model.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps at most.")] = 1000,
    held_out: Annotated[int, typer.Option(help="How many dates to test on.")] = 2000,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the figures.")] = Path("out"),
) -> None:
    """Learn to write dates as 1979-05-03; save where the model looks and how often it is right."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    training, *others = split_dates(seed, held_out=held_out)
    checked, tested = ([write(day, rng) for day in days] for days in others)
    model = Translator()
    given = [one.text for one in checked]
    trained = train(model, training, lambda: share_right(translate(model, given), checked), rng, steps)

    results: dict[str, Any] = {
        "seed": seed,
        "steps": trained,
        "held_out": len(tested),
        **decode_four_ways(model, tested, width=4),
        "looks": {name: asdict(look) for name, look in looks(model, tested).items()},
    }
    day = date(1979, 5, 3)
    shown = (
        (LANGUAGES["English"], "{weekday} {d} {month} {yyyy}", 1),
        (LANGUAGES["German"], "den {dth} {month} '{yy}", 3),
        (LANGUAGES["figures"], "{dd}.{mm}.{yy}", 3),
    )
    out.mkdir(parents=True, exist_ok=True)
    draw(model, [write_as(day, *how) for how in shown], out / "translate_dates.png")
    results["seconds"] = round(time.perf_counter() - started, 1)
    (out / "translate_dates.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    report(results, model, tested)
    console.print(f"{results['seconds']:.0f} s in all, {trained} steps. Saved {out / 'translate_dates.png'} and .json")


if __name__ == "__main__":
    typer.run(main)
