"""``clearhead look``: run a pretrained model on a text and show where every head looks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import ArgumentError, explain_problem
from ..plot._language import say, speaking
from . import _demo as demo
from ._choice import SHOWN, Choice
from ._errors import UsageProblem, warn
from ._look_against import look_at_both, require_against
from ._look_image import look_at_image, require_image
from ._look_text import look_at_text
from ._output import Look, deliver, print_with, require_writable, warn_of_link
from ._progress import Work, at_work
from ._walkthrough import LANGUAGE, require_language

PICTURES = (".png", ".svg", ".pdf")


def _option(name: str, text: str, default: str | bool = False, metavar: str | None = None) -> Any:
    """An option, its help, and the help's words for its default."""
    return typer.Option(name, help=text, show_default=default, metavar=metavar)


AUTOMATIC = "chosen automatically"
MODEL = "NAME_OR_PATH"
STATISTICS = f"The number that the overview shows for each head: one of {', '.join(SHOWN)}."


def look(
    text: Annotated[
        str | None, typer.Argument(help="The text to look at; - reads the standard input.", show_default=False)
    ] = None,
    file: Annotated[Path | None, _option("--file", "Read the text from this file (UTF-8) instead.")] = None,
    model: Annotated[
        str | None,
        _option("--model", "A folder, or a name on the Hugging Face hub; safetensors only.", demo.DEFAULT_NAME, MODEL),
    ] = None,
    layer: Annotated[int | None, _option("--layer", "The layer shown large, from 0.", AUTOMATIC)] = None,
    head: Annotated[int | None, _option("--head", "The head shown large, from 0.", AUTOMATIC)] = None,
    stat: Annotated[
        str | None, _option("--stat", STATISTICS, "entropy; in pictures a map of each head", "NAME")
    ] = None,
    against: Annotated[str | None, _option("--against", "Another text, shown side by side.", metavar="TEXT")] = None,
    against_model: Annotated[
        str | None,
        _option("--against-model", "Another model with as many layers and heads, shown side by side.", "none", MODEL),
    ] = None,
    image: Annotated[
        Path | None, _option("--image", "An image instead of a text. Name a vision model with --model.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for attention.png and attention.html.")] = Path(),
    html: Annotated[Path | None, _option("--html", "Where to write the page.", "attention.html in --out")] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Write no page.")] = False,
    png: Annotated[
        Path | None, _option("--png", "Where to write the picture: .png, .svg or .pdf.", "attention.png in --out")
    ] = None,
    no_png: Annotated[bool, typer.Option("--no-png", help="Write no picture.")] = False,
    json: Annotated[
        Path | None, _option("--json", "Also write all numbers as JSON. With -, print them and nothing else.")
    ] = None,
    link: Annotated[
        str | None, _option("--link", "The address of a page of `clearhead heads` to link to.", metavar="ADDRESS")
    ] = None,
    lang: Annotated[str, typer.Option(help=LANGUAGE)] = "en",
) -> None:
    """Show where every head of a pretrained Transformer looks on a text.

    Prints what one head shows, what all heads do, and that head token by token. Writes attention.png and
    attention.html. Choose the head with --layer and --head. Otherwise the command prefers a head in which different
    words look at different, distant words. It avoids heads that look at special tokens or neighbours.

    A text that is too long for the model is read in windows. Neighbouring windows share an eighth of their tokens.
    Numbers for a head are means over all windows. max_logit and raw_max_logit are the largest of all windows.

    --against and --against-model show two runs and their difference. The head shown large is the one that differs most.

    --image runs a vision model. It shows, over the image, what the class token and every patch look at.
    """
    require_language(lang)
    paths = {
        "png": _target("--png", png, no_png, out / "attention.png"),
        "html": _target("--html", html, no_html, out / "attention.html"),
        "json": None if json is None or str(json) == "-" else json,
    }
    if paths["png"] is not None and paths["png"].suffix.lower() not in PICTURES:
        raise UsageProblem(explain_problem("--png", expected=f"a name ending in {', '.join(PICTURES)}", got=str(png)))
    if out.exists() and not out.is_dir():
        raise ArgumentError("--out", expected="a folder", got=f"a file, {out}")
    source: Callable[[Choice, Work], Look]
    if image is not None:
        texts = {"TEXT": text, "--file": file, "--against": against, "--against-model": against_model, "--link": link}
        source = partial(look_at_image, image, require_image(model, **texts))
    else:
        content = _read_text(text, file)
        source = partial(look_at_text, content, model, link)
        if against is not None or against_model is not None:
            require_against(against, against_model, {"--stat": stat, "--link": link})
            source = partial(look_at_both, (content, against or content), (model, against_model or model))
    choice = Choice(layer, head, stat)
    if layer is not None or head is not None:
        sizes = demo.configured_sizes(model, "text" if image is None else "vision")
        if sizes is not None:
            choice.places([sizes[1]] * sizes[0])  # raises before the model is loaded
    require_writable(paths)
    warn_of_link(link, paths["html"], "clearhead heads --texts FILE")
    with speaking(lang):
        _show(partial(source, choice), paths, to_stdout=json is not None and paths["json"] is None)


def _read_text(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        got = "neither" if text is None else "both"
        raise UsageProblem(explain_problem("TEXT", expected="either a text or --file PATH", got=got))
    name = "TEXT" if file is None else f"--file {file}"
    if text == "-":
        text, name = _standard_input(), "-"
    elif file is not None:
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
        raise UsageProblem(explain_problem(name, expected="some text", got="nothing but white space"))
    return text


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError("-", expected="UTF-8 text", got=f"other bytes at {error.start} of the input") from error


def _target(option: str, path: Path | None, unwanted: bool, default: Path) -> Path | None:
    if path is not None and unwanted:
        raise UsageProblem(explain_problem(option, expected=f"{option} or --no-{option[2:]}", got="both"))
    return None if unwanted else path or default


def _show(make: Callable[[Work], Look], paths: dict[str, Path | None], *, to_stdout: bool) -> None:
    """Write the files that are wanted of a look, and print it; or only its numbers."""
    with at_work() as work:
        look = make(work)
        written = deliver(look, paths, work.step)
    if to_stdout:
        print(look.as_json())
        for warning in look.warnings:
            warn(warning)
        return

    def show(console: Console) -> None:
        look.show(console)
        for path in written:
            console.print(say("wrote {0}", path), markup=False, soft_wrap=True)
        seconds = (f"{work.seconds():.1f}", f"{work.loading:.1f}")
        console.print(say("took {0} s, {1} s of them to load the model", *seconds))

    print_with(show)
    for warning in look.warnings:
        warn(warning)
