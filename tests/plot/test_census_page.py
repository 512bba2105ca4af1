"""The file of a census: its size, what it carries, and what stays without scripts."""

from __future__ import annotations

import base64
import json
import re
import zlib
from functools import cache
from typing import Any

import pytest

from clearhead.cli._errors import UsageProblem
from clearhead.cli._heads_page import Shown
from clearhead.plot import Page
from clearhead.plot._language import speaking

from .counted import HOSTILE, counted, page_of_counted
from .pages import Elements


@cache
def small() -> Page:
    return page_of_counted(counted(2, 4), shown=Shown(link="attention.html"))


def data_of(page: Page) -> dict[str, Any]:
    return json.loads(Elements(page.text).texts["data"])


def rows_of(page: Page) -> list[list[dict[str, Any]]]:
    """The strongest rows, head by head."""
    first, length = data_of(page)["items"][0]["description"]
    stream = zlib.decompress(base64.b64decode(Elements(page.text).texts["stream-0"]))
    return json.loads(stream[first : first + length])


def test_32_by_32_heads_and_10_000_texts_fit_in_5_mb() -> None:
    made = page_of_counted(counted(32, 32, texts=10_000, length=128), 128)
    rows = rows_of(made)
    assert [len(rows), *{len(of_head) for of_head in rows}] == [1024, 3]
    assert max(len(row["keys"]) for of_head in rows for row in of_head) == 16
    assert len(made.text.encode()) <= 5_000_000


def test_it_begins_with_the_heads_of_each_kind() -> None:
    text = small().text
    finding = text[text.index('id="finding"') :].partition("</p>")[0]
    assert finding.endswith("3 of 8 heads have a name: 2 induction, 1 previous.")
    kinds = text[text.index('class="kinds"') :].partition("</dl>")[0]
    assert re.findall(r"<dt>(\w+)<", kinds)[:4] == ["induction", "duplicate", "duplicate_later", "previous"]
    induction = kinds.partition("</dd>")[0]
    assert re.findall(r">([\d.]+&nbsp;\([\d.]+\))<", induction) == ["1.0&nbsp;(0.93)", "1.2&nbsp;(0.61)"]
    assert "the weight on the token after an earlier occurrence of the token" in induction
    assert kinds.count("none; the largest:") == 7
    assert text.index(finding) < text.index('id="scatter"')


def test_maps_are_of_the_named_heads_or_of_the_chosen_ones() -> None:
    mapped = [at for at, rows in enumerate(rows_of(small())) if any(row["map"] for row in rows)]
    assert mapped == [3, 4, 6]
    chosen = rows_of(page_of_counted(counted(2, 4), shown=Shown(chosen=[(0, 1)])))
    assert [at for at, rows in enumerate(chosen) if any(row["map"] for row in rows)] == [1]
    with pytest.raises(UsageProblem, match=r"--map: expected one of 8 heads in 2 layers, both from 0, got 2\.0"):
        page_of_counted(counted(2, 4), shown=Shown(chosen=[(2, 0)]))


def test_a_row_shows_its_query_and_its_largest_key_wherever_they_are() -> None:
    rows = rows_of(page_of_counted(counted(2, 4, length=128), 128))
    apart = 0
    for row in (row for of_head in rows for row in of_head):
        places = [token[1] for token in row["context"] if token]
        best = max(row["keys"], key=lambda key: key[2])
        assert row["position"] in places
        assert best[1] in places
        apart += None in row["context"][1:-1]
        if row["map"] and abs(best[1] - row["position"]) < 48:
            first, count = row["map"]["first"], len(row["map"]["tokens"])
            assert count == 48
            assert first <= min(best[1], row["position"]) <= max(best[1], row["position"]) < first + count
    assert apart > 0, "some keys are far from their query"


def test_tokens_are_text_and_nothing_is_loaded() -> None:
    elements = Elements(small().text)
    assert [tag for tag, _ in elements.tags].count("script") == 3
    assert not [tag for tag, _ in elements.tags if tag in ("img", "link", "iframe")]
    assert HOSTILE[:20] in json.dumps(rows_of(small()))
    assert "default-src 'none'" in small().text


def test_without_scripts_kinds_examples_and_all_means_remain() -> None:
    text = re.sub(r"<script.*?</script>", "", small().text, flags=re.DOTALL)
    examples = text[text.index("<noscript>") :].partition("</noscript>")[0]
    assert [re.search(r"(\d\.\d)&nbsp;", line)[1] for line in examples.split("<li>")[1:]] == ["1.0", "0.3"]  # type: ignore[index]
    assert examples.count("<strong>") == 2
    assert text.count("<tr>") == 1 + 8


def test_chinese() -> None:
    with speaking("zh"):
        text = page_of_counted(counted(2, 4)).text
    assert '<html lang="zh">' in text
    assert "8 个头里有 3 个归入了某一类：2 induction, 1 previous。" in text
    assert "放在前一个词元上的权重" in text
    assert "[[" not in text.split("<script")[0]
