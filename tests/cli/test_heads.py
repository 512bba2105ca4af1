"""``clearhead heads``: the heads of each kind, the page and the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clearhead.cli import main
from docs.draw import IMAGES
from docs.draw.pages import sentences
from tests.plot.pages import Elements

from .looking import look

DOCS = IMAGES.parent
TEXTS = "She put the book on the table, and the book fell off the table.\n\nThe animal was too tired, too tired.\n"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["heads", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_prints_kinds_and_writes_page_and_numbers(tmp_path: Path) -> None:
    """What the page about a census shows for the texts of lesson 6."""
    texts, page = tmp_path / "texts.txt", tmp_path / "heads.html"
    texts.write_text("\n".join(sentences()), encoding="utf-8")
    printed = run("--texts", str(texts), "--html", str(page), "--json", str(tmp_path / "out"), "--ablate", "1")
    for language in ("en", "zh"):
        text = (DOCS / language / "census.md").read_text(encoding="utf-8")
        shown = text.partition("```text\n")[2].partition("\nwrote heads.html\n```")[0].splitlines()
        assert len(shown) > 10
        assert [line for line in printed.splitlines() if line in shown] == shown
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert (index["texts"], len(index["heads"])) == (4, 72)
    strongest = max(index["heads"], key=lambda head: head["columns"]["ablation"])
    assert f"ablation        {strongest['layer']}.{strongest['head']} (" in printed
    assert strongest["columns"]["ablation"] > 0.05
    data = data_of(page)
    assert next(head for head in data["heads"] if (head["layer"], head["head"]) == (0, 2))["kinds"][0] == "previous"
    assert len(page.read_text(encoding="utf-8")) < 500_000


def data_of(page: Path) -> dict[str, Any]:
    return json.loads(Elements(page.read_text(encoding="utf-8")).texts["data"])


def test_the_pages_of_look_and_heads_link_to_each_other_and_say_where_a_link_leads_nowhere_yet(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(TEXTS, encoding="utf-8")
    one, other = tmp_path / "heads.html", tmp_path / "attention.html"
    printed = run("--texts", str(texts), "--html", str(one), "--link", "attention.html", "--map", "3.1")
    assert f"the link will work once {other} is there; clearhead look TEXT --html {other} writes it." in printed
    looked = look("A cat sat.", "--html", str(other), "--no-png", "--link", "heads.html")
    assert "the link will work" not in looked.output
    assert data_of(one)["link"] == "attention.html"
    assert data_of(other)["link"] == "heads.html"


def test_a_map_is_of_a_head_that_the_model_has(tmp_path: Path) -> None:
    for name, expected in (("3.12", "one of 72 heads in 6 layers, both from 0"), ("3", "layer.head, such as 3.1")):
        result = CliRunner().invoke(main, ["heads", "--repeat-random", "--map", name])
        assert result.exit_code == 2
        assert f"--map: expected {expected}, got {name}." in result.output


def test_chinese(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("猫坐在垫子上。\n", encoding="utf-8")
    run("--texts", str(texts), "--html", str(tmp_path / "heads.html"), "--lang", "zh")
    assert 'lang="zh"' in (tmp_path / "heads.html").read_text(encoding="utf-8")


def test_random_tokens_that_repeat(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """As many as the model takes, 64 here, each text with a first token that is no part of them."""
    run(str(model_folder("llama")), "--repeat-random", "--no-html", "--json", str(tmp_path))
    index = json.loads((tmp_path / "index.json").read_text())
    length = 1 + 2 * 31
    assert (index["texts"], index["tokens"]) == (32, 32 * length)
    for head in index["heads"]:
        metrics = head["metrics"]
        assert metrics["induction"]["count"] == metrics["duplicate"]["count"] >= 32 * 31  # the whole second half
        assert metrics["special"]["count"] == metrics["entropy"]["count"] == 32 * length
        assert 0 < metrics["induction"]["mean"] < 0.4  # a random model has no induction head


@pytest.mark.parametrize("arguments", [(), ("--texts", "texts.txt", "--repeat-random")])
def test_needs_one_kind_of_texts(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["heads", *arguments])
    assert result.exit_code == 2
    assert "either --texts FILE or --repeat-random" in result.output
