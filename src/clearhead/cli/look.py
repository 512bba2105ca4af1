"""``clearhead look``: run a pretrained model on a text and show where every head looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ArgumentError, ClearheadError, explain_problem
from .errors import UsageProblem, warn

if TYPE_CHECKING:
    from ..demo import HeadWeights, TextModel
    from ..plot.heads import HeadSummary

    Summaries = list[list[HeadSummary]]

__all__ = ["look"]


def look(
    text: Annotated[str | None, typer.Argument(help="The text to look at.", show_default=False)] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Read the text from this file (UTF-8) instead.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME_OR_PATH",
            help="A folder, or a name on the Hugging Face hub; safetensors only.",
            show_default="all-MiniLM-L6-v2",
        ),
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", help="The layer shown large, from 0.", show_default="a telling one")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", help="The head shown large, from 0.", show_default="a telling one")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for attention.png and attention.html.")] = Path(),
) -> None:
    """Show where every head of a pretrained Transformer looks on a text.

    Prints an overview of all heads and one head token by token, and writes attention.png and attention.html. Without
    --layer and --head, the head shown large is the one where different words most clearly look at different words
    further away, rather than at special tokens or neighbours.
    """
    content = _read_text(text, file)
    if out.exists() and not out.is_dir():
        raise ArgumentError(explain_problem("--out", expected="a folder", got=f"a file, {out}"))
    with _progress("loading the model", "running it", "drawing the picture", "writing the page") as next_step:
        from .. import demo
        from ..plot.heads import summarize

        loaded = demo.load_text_model(model, notify=warn)
        next_step()
        found = demo.read_heads(loaded, content)
        summaries = summarize(found.weights, found.special)
        place = _place(summaries, layer, head)
        next_step()
        paths = _write(loaded, found, place, content, out, next_step)
    _print(loaded, found, summaries, place, chosen=layer is not None and head is not None)
    print(*(f"wrote {path}" for path in paths), sep="\n")
    if found.dropped:
        cut = f"the text was cut to {len(found.tokens)} tokens; {found.dropped} more at its end are left out"
        warn(f"{cut} ({loaded.limit_reason}).")
    if not loaded.clearhead:
        warn(f"{loaded.name} does not let its attention be replaced; these weights are from its own attention.")


def _read_text(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        got = "neither" if text is None else "both"
        raise UsageProblem(explain_problem("TEXT", expected="either a text or --file PATH", got=got))
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ArgumentError(
                explain_problem("--file", expected="UTF-8 text", got=f"other bytes at {error.start} in {file}")
            ) from error
        except OSError as error:
            got = f"{file}: {error.strerror or type(error).__name__}"
            raise ArgumentError(explain_problem("--file", expected="a file that can be read", got=got)) from error
    if text is None or not text.strip():
        name = "TEXT" if file is None else f"--file {file}"
        raise UsageProblem(explain_problem(name, expected="some text", got="nothing but white space"))
    return text


def _place(summaries: Summaries, layer: int | None, head: int | None) -> tuple[int, int]:
    """The head to show large: what was chosen, and for the rest the head with the largest contrast."""
    if layer is not None and not 0 <= layer < len(summaries):
        raise UsageProblem(explain_problem("--layer", expected=_range(len(summaries)), got=str(layer)))
    layers = range(len(summaries)) if layer is None else [layer]
    most = max(len(summaries[index]) for index in layers)
    if head is not None and not 0 <= head < most:
        raise UsageProblem(explain_problem("--head", expected=_range(most), got=str(head)))
    places = [
        (index, number) for index in layers for number in range(len(summaries[index])) if head is None or number == head
    ]
    return max(places, key=lambda place: summaries[place[0]][place[1]].contrast)


def _range(count: int) -> str:
    return f"0 to {count - 1}, counted from 0"


def _write(
    loaded: TextModel,
    found: HeadWeights,
    place: tuple[int, int],
    content: str,
    out: Path,
    next_step: Callable[[], None],
) -> tuple[Path, Path]:
    from ..plot.html import write_page
    from ..plot.matplotlib import draw_heads, save_figure

    title = " ".join(content.split())
    try:
        out.mkdir(parents=True, exist_ok=True)
        figure = draw_heads(found.weights, found.tokens, *place, title=title)
        picture = save_figure(figure, out / "attention.png")
        next_step()
        page = out / "attention.html"
        write_page(page, found.weights, found.tokens, *place, special=found.special, title=loaded.name)
    except OSError as error:
        got = f"{out}: {error.strerror or type(error).__name__}"
        raise ClearheadError(explain_problem("--out", expected="a folder that can be written to", got=got)) from error
    return picture, page


def _print(
    loaded: TextModel, found: HeadWeights, summaries: Summaries, place: tuple[int, int], *, chosen: bool
) -> None:
    from rich.console import Console
    from rich.text import Text

    from ..plot.terminal import overview, top_keys

    # A terminal or pipe that is not UTF-8 shows "?" instead of failing.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    layer, head = place
    console = Console(highlight=False)
    heads = max(len(row) for row in summaries)
    console.print(
        Text(f"{loaded.name} · {len(summaries)} layers × {heads} heads · {len(found.tokens)} tokens", style="bold")
    )
    console.print()
    console.print(overview(summaries, layer=layer, head=head, width=console.width))
    console.print()
    console.print(Text(f"layer {layer}, head {head}: what each token looks at most", style="bold"))
    if not chosen:
        console.print(Text("Chosen for its clear looks at words further away; choose with --layer and --head.", "dim"))
    console.print(top_keys(found.weights, found.tokens, layer, head))
    console.print(Text("Weights show where a head reads; they do not explain what the model decides.", style="dim"))
    console.print()


@contextmanager
def _progress(*steps: str) -> Generator[Callable[[], None]]:
    """Show a bar on stderr while the steps go on, if that is a terminal; the first step begins at once."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(steps[0], total=len(steps))
        upcoming = iter(steps[1:])

        def next_step() -> None:
            progress.update(task, advance=1, description=next(upcoming))

        yield next_step
