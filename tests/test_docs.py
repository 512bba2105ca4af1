"""The Python in the documentation runs, page by page, and what it asserts holds."""

from __future__ import annotations

import importlib
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib import pyplot

import clearhead
from clearhead import masks
from clearhead._statistics.definitions import STATISTICS
from clearhead.checkpoints import _namings
from clearhead.kernels import _choice
from tests.malformed import calls

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
EXTENDING = ROOT / "docs/extending.md"
PAGES = [page for page in (*READMES, *sorted(DOCS.parent.rglob("*.md"))) if blocks(page) and page != EXTENDING]
#: The module in which each block of the page about extending stands.
STANDS_IN = (
    *("clearhead.kernels._base", "clearhead.masks._positional", "tests.support.mask_cases"),
    *("tests.malformed.cases_masks", "clearhead._statistics.per_query", "tests.support.statistics_oracle"),
    *("clearhead.checkpoints._namings", "tests.checkpoints.lessons", "tests.checkpoints.test_lessons"),
)


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


def test_the_additions_of_the_page_about_extending_work_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CASES", {})
    made: dict[str, Any] = {}
    for (code, _), name in zip(blocks(EXTENDING), STANDS_IN, strict=True):
        around = vars(importlib.import_module(name))
        there = {**around, **made}
        exec(compile(code, str(EXTENDING), "exec"), there)
        made |= {name: value for name, value in there.items() if name not in around}

    entry, _ = blocks(EXTENDING)[STANDS_IN.index(_namings.__name__)]
    monkeypatch.setattr(_namings, "NAMINGS", (*_namings.NAMINGS, eval(entry.strip(), dict(vars(_namings)))))
    made["test_search_lesson"]()

    monkeypatch.setattr(masks, "every", made["every"], raising=False)
    assert made["every"](2).dense(3)[0, 0].int().tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    call = calls.CASES["masks.every"].make()
    call.function(**call.arguments)

    x = torch.randn(2, 3, 5, 4)
    monkeypatch.setattr(_choice, "KERNELS", (made["MyKernel"](), *_choice.KERNELS))
    with clearhead.use_kernel("mine"):
        found = clearhead.attention(x, x, x, masks.causal())
    with clearhead.use_kernel("reference"):
        torch.testing.assert_close(found, clearhead.attention(x, x, x, masks.causal()))

    monkeypatch.setitem(STATISTICS, "purity", made["Purity"])
    purity = clearhead.attention_statistics(x, x, statistics=("purity",)).purity
    oracle = SimpleNamespace(p=clearhead.attention_weights(x, x))
    torch.testing.assert_close(purity, made["purity"](oracle))


def test_the_page_about_masks_compares_all_five_conventions() -> None:
    page = (DOCS / "which-mask.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## \d\. ", page, flags=re.MULTILINE)
    assert len(parts) == 5
    for part in parts:
        code = "".join(found[2] for found in BLOCK.finditer(part.split("\n## ")[0]))
        assert "assert same(theirs, expected)" in code
        assert "assert same(ours(words, mask=" in code
