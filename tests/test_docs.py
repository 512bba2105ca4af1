"""The Python in the documentation runs, page by page, and what it asserts holds."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot

DOCS = Path(__file__).parent.parent / "docs" / "en"
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
#: Directly after a block: what it prints, where ``…`` stands for any text.
OUTPUT = re.compile(r"\s*^ *```text\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """The page's Python and the output after it; empty lines before the code keep the line numbers of the page."""
    text = page.read_text(encoding="utf-8")
    found: list[tuple[str, str | None]] = []
    for block in BLOCK.finditer(text):
        printed = OUTPUT.match(text, block.end())
        code = "\n" * text.count("\n", 0, block.start(2)) + textwrap.dedent(block[2])
        found.append((code, printed and textwrap.dedent(printed[1])))
    return found


FIGURE = re.compile(r"-?\d+\.\d+")


def assert_printed(found: str, shown: str) -> None:
    """Compare what was printed with what the page shows: text exactly, figures to 0.002, ``…`` any text."""
    found, shown = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (found, shown))
    pattern = ".*?".join(re.escape(part) for part in FIGURE.sub("#", shown).split("…"))
    assert re.fullmatch(pattern, FIGURE.sub("#", found), re.DOTALL), f"the page has\n{shown}\nprinted was\n{found}"
    if "…" not in shown:
        figures = [[float(figure) for figure in FIGURE.findall(text)] for text in (found, shown)]
        assert figures[0] == pytest.approx(figures[1], abs=0.002)


ROOT = DOCS.parents[1]
READMES = sorted(ROOT.glob("README*.md"))
PAGES = [page for page in (*READMES, *sorted(DOCS.parent.rglob("*.md"))) if blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": page.stem}
    pyplot.close("all")  # those of other pages: matplotlib warns of more than twenty
    try:
        for code, printed in blocks(page):
            capsys.readouterr()
            exec(compile(code, str(page), "exec"), namespace)
            if printed is not None:
                assert_printed(capsys.readouterr().out, printed)
    finally:
        torch.nn.attention.restore_flash_attention_impl()  # a page may activate one for the process


def test_the_page_about_masks_compares_all_five_conventions() -> None:
    page = (DOCS / "which-mask.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## \d\. ", page, flags=re.MULTILINE)
    assert len(parts) == 5
    for part in parts:
        code = "".join(found[2] for found in BLOCK.finditer(part.split("\n## ")[0]))
        assert "assert same(theirs, expected)" in code
        assert "assert same(ours(words, mask=" in code
