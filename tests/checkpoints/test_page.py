"""The page about loaders shows what is there."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from pathlib import Path

from clearhead.checkpoints._architectures import ARCHITECTURES
from tests.test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs" / "loaders.md"


def test_the_table_has_every_model() -> None:
    table = PAGE.read_text(encoding="utf-8").split("| `model_type` |")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(ARCHITECTURES)


def test_what_is_shown_is_what_is_printed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = textwrap.dedent(text.split("print(attend.loaded_from)\n```\n\n")[1].split("\n\n")[0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(blocks(PAGE)[0], str(PAGE), "exec"), {})
    assert printed.getvalue().strip() == shown.strip()
