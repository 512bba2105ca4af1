"""``clearhead heads``: the heads of each kind, the page and the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clearhead.cli import main

TEXTS = "She put the book on the table, and the book fell off the table.\n\nThe animal was too tired, too tired.\n"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["heads", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_prints_kinds_and_writes_page_and_numbers(tmp_path: Path) -> None:
    texts, page = tmp_path / "texts.txt", tmp_path / "heads.html"
    texts.write_text(TEXTS, encoding="utf-8")
    written = ("--html", str(page), "--json", str(tmp_path / "out"))
    printed = run("--texts", str(texts), *written, "--link", "a.html", "--ablate", "1")
    assert "previous        0.2 (1.00)" in printed
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert (index["texts"], len(index["heads"])) == (2, 72)
    strongest = max(index["heads"], key=lambda head: head["columns"]["ablation"])
    assert f"ablation        {strongest['layer']}.{strongest['head']} (" in printed
    assert strongest["columns"]["ablation"] > 0.05
    text = page.read_text(encoding="utf-8")
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    head = next(head for head in data["heads"] if (head["layer"], head["head"]) == (0, 2))
    assert data["other"] == "a.html"
    assert head["kinds"][0] == "previous"
    assert head["rows"][0]["map"]["size"] > 10
    assert text.count("<script") == 2
    assert len(text) < 500_000


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
