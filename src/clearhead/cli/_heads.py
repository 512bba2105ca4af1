"""``clearhead heads``: what every head of a pretrained model does, over a corpus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

from .._statistics.recorded import RankedHead
from ..errors import ArgumentError, explain_problem
from ..inspection._census._result import Census
from ..inspection._census._run import census
from ..inspection._importance import head_ablation
from ..plot._language import say, speaking
from ..plot._tokens import Tokens
from . import _demo as demo
from ._demo import PretrainedModel
from ._errors import UsageProblem, warn
from ._heads_page import Corpus, Shown, page_of, require_heads
from ._output import print_with, require_writable, warn_of_link, write_files
from ._progress import Work, at_work
from ._running import about_the_model
from ._walkthrough import LANGUAGE, require_language
from ._windows import Window, cut_into_windows

REPEATED, REPEATS = 50, 32  # tokens that are repeated, and how many such texts
ABLATION = "ablation"  # the column of --ablate


def heads(
    model: Annotated[str | None, typer.Argument(help="A folder, or a name on the hub.", show_default=False)] = None,
    texts: Annotated[Path | None, typer.Option(help="A UTF-8 file; each line is a text.", show_default=False)] = None,
    repeat_random: Annotated[
        bool, typer.Option("--repeat-random", help="Random tokens, repeated once, instead of texts.")
    ] = False,
    special: Annotated[
        bool, typer.Option("--special/--no-special", help="Give texts their special tokens, such as [CLS].")
    ] = True,
    threshold: Annotated[
        float | None, typer.Option(help="The mean weight that names a head.", show_default="0.4", metavar="WEIGHT")
    ] = None,
    window: Annotated[int, typer.Option(help="The reach of the mass `window`, in tokens.")] = 5,
    ablate: Annotated[
        int,
        typer.Option(
            min=0,
            help="Run the first N texts without each head: how far the output moves.",
            metavar="N",
            show_default=False,
        ),
    ] = 0,
    html: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("heads.html"),
    no_html: Annotated[bool, typer.Option("--no-html", help="Write no page.")] = False,
    json: Annotated[Path | None, typer.Option(help="A folder for index.json and a file for each head.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A .safetensors file: an interrupted census continues there.")
    ] = None,
    whole: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="A head drawn whole, such as 3.1; repeatable.", show_default="named heads", metavar="HEAD"
        ),
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="The address of a page of `clearhead look` to link to.", metavar="ADDRESS")
    ] = None,
    lang: Annotated[str, typer.Option(help=LANGUAGE)] = "en",
) -> None:
    """Count what every head of a pretrained Transformer attends to, over many texts, and name the heads.

    Prints the heads of each kind. Writes a page with all heads as points and as a grid, and the texts in which each was
    strongest.

    --repeat-random is the usual test of induction heads: a causal model reads random tokens twice, and an induction
    head attends from a token to the one that followed it the first time.
    """
    require_language(lang)
    if (texts is not None) == repeat_random:
        got = "both" if repeat_random else "neither"
        raise UsageProblem(explain_problem("--texts", expected="either --texts FILE or --repeat-random", got=got))
    page = None if no_html else html
    chosen = [_read_head(name) for name in whole or ()]
    if chosen and (sizes := demo.configured_sizes(model, "text")) is not None:
        require_heads(chosen, [sizes[1]] * sizes[0])  # raises before the model is loaded
    require_writable({"html": page, "json": json and json / "index.json", "checkpoint": checkpoint})
    warn_of_link(link, page, "clearhead look TEXT")
    with speaking(lang):
        with at_work() as work:
            loaded = demo.load_text_model(model, notify=warn)
            work.loaded()
            if not loaded.recordable:
                raise ArgumentError(f"model {loaded.name}", expected="attention that can be replaced", got="its own")
            work.step(say("reading the texts"))
            corpus = _repeated(loaded) if texts is None else _read(loaded, texts, special)
            found = _count(loaded, corpus, work, window, checkpoint)
            if ablate:
                found = found.with_column(ABLATION, _ablation(loaded, corpus.texts[:ablate], work))
            if json is not None:
                found.write(json)
            if page is not None:
                work.step(say("writing the page"))
                made = page_of(loaded, found, corpus, Shown(threshold, chosen, link))
                write_files([("html", page, made.text.encode())])
        print_with(lambda console: _show(console, loaded, found, threshold, [page, json]))


def _read_head(name: str) -> tuple[int, int]:
    """Layer and head of ``--map``."""
    match = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", name)
    if match is None:
        raise UsageProblem(explain_problem("--map", expected="layer.head, such as 3.1", got=name))
    return int(match[1]), int(match[2])


def _count(loaded: PretrainedModel, corpus: Corpus, work: Work, window: int, checkpoint: Path | None) -> Census:
    batches = list(corpus.batches())
    step = work.step(say("counting"), len(batches))
    with about_the_model(loaded):
        return census(
            loaded.model,
            batches,
            special=loaded.reader.all_special_ids,
            window=window,
            checkpoint=checkpoint,
            progress=lambda *_: step(),
        )


def _ablation(loaded: PretrainedModel, texts: Sequence[dict[str, Tensor]], work: Work) -> dict[str, Tensor]:
    """The mean distance by which the output of a token moves without each head, relative to its norm."""
    step = work.step(say("running without each head"), len(texts))

    def outputs() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for text in texts:
            with torch.no_grad():
                yield text, loaded.model(**text)[0]
            step()

    def moved(model: torch.nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        text, whole = batch
        return ((model(**text)[0] - whole).norm(dim=-1) / whole.norm(dim=-1)).mean()

    with about_the_model(loaded):
        return head_ablation(loaded.model, outputs(), moved, progress=False)


def _read(loaded: PretrainedModel, path: Path, special: bool) -> Corpus:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("--texts", expected="a UTF-8 file", got=f"{path}: {error}") from error
    windows = [window for line in filter(str.strip, lines) for window in cut_into_windows(loaded, line)]
    if not windows:
        raise ArgumentError("--texts", expected="at least one text", got="empty lines")
    if special:
        return Corpus([window.inputs for window in windows], [window.tokens for window in windows])
    inputs, tokens = zip(*map(_without_special, windows), strict=True)
    return Corpus(inputs, tokens)


def _without_special(window: Window) -> tuple[dict[str, Tensor], Tokens]:
    kept = torch.tensor([not special for special in window.tokens.special])
    names = [name for name, keep in zip(window.tokens.names, kept.tolist(), strict=True) if keep]
    return {name: x[:, kept] for name, x in window.inputs.items()}, Tokens(names, [False] * len(names))


def _repeated(loaded: PretrainedModel) -> Corpus:
    """Random tokens, each sequence twice, after the token with which the model's texts begin."""
    special = set(loaded.reader.all_special_ids)
    ordinary = torch.tensor([number for number in range(len(loaded.reader)) if number not in special])
    drawn = torch.Generator().manual_seed(0)
    length = min(REPEATED, (loaded.max_tokens - 1) // 2)
    ids = ordinary[torch.randint(len(ordinary), (REPEATS, length), generator=drawn)]
    twice = torch.cat((ids, ids), 1)
    first = loaded.reader.bos_token_id
    if first is not None:
        twice = torch.cat((torch.full((REPEATS, 1), first), twice), 1)
    rows = [{"input_ids": row[None], "attention_mask": torch.ones(1, len(row), dtype=torch.long)} for row in twice]
    names = [loaded.reader.convert_ids_to_tokens(row.tolist()) for row in twice]
    return Corpus(rows, [Tokens(list(map(str, row))) for row in names])


def _show(console: Console, loaded: PretrainedModel, found: Census, threshold: float | None, paths: list[Any]) -> None:
    facts = say(
        "{0} heads · {1} tokens in {2} texts", len(found.rank_heads("entropy")), f"{found.tokens:,}", found.texts
    )
    console.print(Text(f"{loaded.name} · {facts}", style="bold"))
    names = list(found.layers)

    def print_row(title: str, ranked: list[RankedHead], more: str = "") -> None:
        listed = ", ".join(f"{names.index(head.layer)}.{head.head} ({head.weight:.2f})" for head in ranked[:8])
        console.print(Text.assemble((f"{title:<16}", "bold"), f"{listed or '–'}{more}"), soft_wrap=True)

    for kind, ranked in found.kinds(threshold).items():
        print_row(kind, ranked, say(" and {0} more", len(ranked) - 8) if len(ranked) > 8 else "")
    console.print(Text(say("Layer and head, from 0, and the mean weight on such keys."), style="dim"))
    for column in found.columns:
        print_row(column, found.rank_heads(column))
    if ABLATION in found.columns:
        console.print(Text(say("The part of its norm by which the output moves without the head."), style="dim"))
    for path in filter(None, paths):
        console.print(say("wrote {0}", path), markup=False, soft_wrap=True)
