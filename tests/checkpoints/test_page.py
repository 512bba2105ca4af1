"""The page about loaders names every architecture."""

from __future__ import annotations

import re
from pathlib import Path

from clearhead.checkpoints._architectures import ARCHITECTURES

PAGE = Path(__file__).parents[2] / "docs" / "en" / "loaders.md"


def test_the_table_has_every_model() -> None:
    table = PAGE.read_text(encoding="utf-8").split("| `model_type` |")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(ARCHITECTURES)
