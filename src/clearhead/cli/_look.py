"""``clearhead look``: run a pretrained model on a text and show where every head looks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from ..errors import ArgumentError, ClearheadError, explain_problem
from ._errors import UsageProblem, warn
from ._look_against import look_at_both, require_against
from ._look_image import look_at_image, require_image
from ._output import Outcome, deliver
from ._start import collecting_later

if TYPE_CHECKING:
    from ._demo import TextModel
    from ._seeing import Seen

PICTURES = (".png", ".svg", ".pdf")
TITLE = 400  # characters of the text, of which the picture shows fewer


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
    stat: Annotated[
        str | None,
        typer.Option(
            "--stat",
            metavar="NAME",
            help="What the overviews show per head: entropy, normalized_entropy, confidence, sink, distance, "
            "previous, max_logit or output_norm.",
            show_default="entropy, and maps",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="TEXT", help="Another text, to see beside the first.", show_default=False),
    ] = None,
    against_model: Annotated[
        str | None,
        typer.Option(
            "--against-model",
            metavar="NAME_OR_PATH",
            help="Another model of the same shape, to see beside the first.",
            show_default="--model",
        ),
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(
            "--image", help="A picture instead of a text, for a vision model named by --model.", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for attention.png and attention.html.")] = Path(),
    html: Annotated[
        Path | None, typer.Option("--html", help="Where to write the page.", show_default="attention.html in --out")
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Write no page.")] = False,
    png: Annotated[
        Path | None,
        typer.Option(
            "--png", help="Where to write the picture: .png, .svg or .pdf.", show_default="attention.png in --out"
        ),
    ] = None,
    no_png: Annotated[bool, typer.Option("--no-png", help="Write no picture.")] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="Also write every number as JSON; with - to the standard output, and nothing else there.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show where every head of a pretrained Transformer looks on a text.

    Prints an overview of all heads and one head token by token, and writes attention.png and attention.html. Without
    --layer and --head, the head shown large is the one where different words most clearly look at different words
    further away, rather than at special tokens or neighbours.

    A text that is longer than the model takes is read in windows, each sharing an eighth of its tokens with the next;
    numbers per head are means over all of them.

    With --against or --against-model both runs are shown, and their difference; the head shown large is the one that
    differs most.

    With --image, a vision model is run on a picture: what the class token and every patch look at, over the picture.
    """
    paths = {
        "png": _target("--png", png, no_png, out / "attention.png"),
        "html": _target("--html", html, no_html, out / "attention.html"),
    }
    if paths["png"] is not None and paths["png"].suffix.lower() not in PICTURES:
        raise UsageProblem(explain_problem("--png", expected=f"a name ending in {', '.join(PICTURES)}", got=str(png)))
    to_stdout = json is not None and str(json) == "-"
    if out.exists() and not out.is_dir():
        raise ArgumentError("--out", expected="a folder", got=f"a file, {out}")
    if image is not None:
        texts = {"TEXT": text, "--file": file, "--against": against, "--against-model": against_model}
        name = require_image(model, **texts)
        _show(lambda step: look_at_image(image, name, layer=layer, head=head, statistic=stat, step=step), paths, json)
        return
    content = _read_text(text, file)
    if against is not None or against_model is not None:
        require_against(against, against_model, stat)
        texts, models = (content, against or content), (model, against_model or model)
        _show(lambda step: look_at_both(texts, models, layer=layer, head=head, step=step), paths, json)
        return
    started = perf_counter()
    with collecting_later() as is_loaded, _progress() as step:
        step("loading the model")
        from . import _demo as demo
        from ._look_page import print_seen, seen_as_json
        from ._seeing import STATISTICS, parts_of, see
        from ._windows import cut_into_windows, unknown_note

        if stat is not None and stat not in STATISTICS:
            raise UsageProblem(explain_problem("--stat", expected=f"one of {', '.join(STATISTICS)}", got=stat))
        loaded = demo.load_text_model(model, notify=warn)
        is_loaded()
        loading = perf_counter() - started
        step("reading the text")
        windows = cut_into_windows(loaded, content)
        unknown = unknown_note(loaded, windows)
        if unknown:
            warn(unknown)
        running = "running it" if len(windows) == 1 else f"running it on {len(windows)} windows"
        advance = step(running, parts_of(loaded, windows))
        seen = see(
            loaded, windows, layer=layer, head=head, statistic=stat, keep_chosen=json is not None, next_part=advance
        )
        title = " ".join(content[:TITLE].split())
        written = _write_png(paths["png"], seen, title, stat, step)
        written += _write_html(paths["html"], loaded, seen, stat, [unknown] if unknown else [], step)
        if json is not None and not to_stdout:
            written += _written("--json", json, seen_as_json(loaded, seen))
    if to_stdout:
        print(seen_as_json(loaded, seen))
    else:
        print_seen(loaded, seen, statistic=stat, chosen=layer is not None and head is not None)
        print(*(f"wrote {path}" for path in written), sep="\n", end="\n" if written else "")
        print(f"took {perf_counter() - started:.1f} s, {loading:.1f} s of them to load the model")
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
                "--file", expected="UTF-8 text", got=f"other bytes at {error.start} in {file}"
            ) from error
        except OSError as error:
            got = f"{file}: {error.strerror or type(error).__name__}"
            raise ArgumentError("--file", expected="a file that can be read", got=got) from error
    if text is None or not text.strip():
        name = "TEXT" if file is None else f"--file {file}"
        raise UsageProblem(explain_problem(name, expected="some text", got="nothing but white space"))
    return text


def _target(option: str, path: Path | None, unwanted: bool, default: Path) -> Path | None:
    if path is not None and unwanted:
        raise UsageProblem(explain_problem(option, expected=f"{option} or --no-{option[2:]}", got="both"))
    return None if unwanted else path or default


class Step(Protocol):
    """Begins a step of the work, of so many equal parts if they can be counted; gives what to call after each."""

    def __call__(self, description: str, parts: int | None = None) -> Callable[[], None]: ...


def _show(make: Callable[[Step], Outcome], paths: dict[str, Path | None], json: Path | None) -> None:
    """Write the files that are wanted of an outcome, and print it; or only its numbers."""
    to_stdout = json is not None and str(json) == "-"
    with collecting_later(), _progress() as step:
        step("loading the model")
        outcome = make(step)
        written = deliver(outcome, {**paths, "json": None if to_stdout else json}, step)
    if to_stdout:
        print(outcome.as_json())
        return
    outcome.show()
    print(*(f"wrote {path}" for path in written), sep="\n", end="\n" if written else "")


def _write_png(path: Path | None, seen: Seen, title: str, stat: str | None, step: Step) -> list[Path]:
    if path is None:
        return []
    step("drawing the picture")
    from ..plot._ink import save_figure
    from ..plot._sheet import draw_sheet

    numbers = None if stat is None else (stat, seen.numbers[stat])
    figure = draw_sheet(seen.first, *seen.place, title=title, numbers=numbers)
    with _writing("--png", path):
        return [save_figure(figure, path)]


def _write_html(
    path: Path | None, loaded: TextModel, seen: Seen, stat: str | None, notes: Sequence[str], step: Step
) -> list[Path]:
    if path is None:
        return []
    step("writing the page")
    shown = {None: "maps", "previous": "offset -1"}.get(stat, stat) or "maps"
    page = seen.page.page((0, *seen.place), title=loaded.name, statistic=shown, notes=notes)
    with _writing("--html", path):
        return [page.save(path)]


def _written(option: str, path: Path, text: str) -> list[Path]:
    from ..plot._files import whole_file

    with _writing(option, path), whole_file(path) as part:
        part.write_text(text + "\n", encoding="utf-8")
    return [path]


@contextmanager
def _writing(option: str, path: Path) -> Generator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        got = f"{path}: {error.strerror or type(error).__name__}"
        raise ClearheadError(option, expected="a file that can be written", got=got) from error


@contextmanager
def _progress() -> Generator[Step]:
    """Show on stderr what is at work, if that is a terminal; a bar and the time left where its parts are counted."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # Parts take equal times, so that the mean of all that are done is the best guess of those that are left.
    bar = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=3600
    )
    with bar as progress:

        def begin(description: str, parts: int | None = None) -> Callable[[], None]:
            for done in progress.task_ids:
                progress.remove_task(done)
            task = progress.add_task(description, total=parts, left="" if parts is None else "left")
            return lambda: progress.advance(task)

        yield begin
