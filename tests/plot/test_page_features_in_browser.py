"""Search, order, finding, address, theme, print, files and a page without JavaScript, in a real browser."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.seeing.page_model import structured
from clearhead.plot import Tokens, given, page

from .browsing import OpenPage, needs_chromium, text_of, token, wait_until

pytestmark = needs_chromium

NAMES = ["[CLS]", "the", "animal", "was", "tired", "[SEP]"]
SIZE = len(NAMES)


@pytest.fixture(scope="module", name="weights")
def _weights() -> torch.Tensor:
    torch.manual_seed(5)
    return (2 * torch.randn(2, 3, SIZE, SIZE)).softmax(-1)


@pytest.fixture(name="path")
def _path(weights: torch.Tensor, tmp_path: Path) -> Path:
    made = page(given(list(weights)), Tokens(NAMES), layer=0, head=1, title="model")
    return made.save(tmp_path / "page.html")


@pytest.fixture(name="shown")
def _shown(open_page: OpenPage, path: Path) -> Any:
    return open_page(path)


def choose(shown: Any, name: str, value: str) -> None:
    shown.locator(f"#{name}").focus()
    shown.locator(f"#{name}").select_option(value)


def saved(shown: Any, kind: str, folder: Path) -> str:
    """The text of a file that the page saves, whose name is that of the first head."""
    with shown.expect_download() as download:
        shown.locator(f"#save-{kind}").click()
    assert download.value.suggested_filename == f"layer-0-head-1.{kind}"
    download.value.save_as(folder / f"saved.{kind}")
    return (folder / f"saved.{kind}").read_text(encoding="utf-8")


def saved_weights(shown: Any, folder: Path) -> tuple[list[str], list[str], torch.Tensor]:
    """The first line of the saved CSV file, the names of its queries, and its weights."""
    first, *rows = csv.reader(saved(shown, "csv", folder).splitlines())
    return first, [row[0] for row in rows], torch.tensor([[float(cell) for cell in row[1:]] for row in rows])


def order_of(shown: Any) -> list[str]:
    return shown.evaluate("[...document.querySelectorAll('#overview button')].map(each => each.dataset.place)")


def heads_by(values: torch.Tensor) -> list[str]:
    """Places of heads, the largest of (layers, heads) first."""
    return [f"{place // values.shape[1]}-{place % values.shape[1]}" for place in values.flatten().argsort().flip(0)]


def test_the_finding_names_the_head_and_both_words_and_heads_are_sorted(shown: Any, weights: torch.Tensor) -> None:
    token(shown, 3).click()
    best = int(weights[0, 1, 3].argmax())
    expected = f"In layer 0, head 1, was looks most at {NAMES[best]} ({weights[0, 1, 3, best]:.4f})"
    assert text_of(shown, "finding") == expected
    shown.locator('[data-place="1-2"]').click()
    assert text_of(shown, "finding").startswith("In layer 1, head 2, was looks most at ")
    assert shown.locator("h1").inner_text() == "the animal was tired"
    assert text_of(shown, "axes") == "key → query ↓"
    assert not shown.locator("#notes").is_visible()
    choose(shown, "order", "entropy")
    ordered = heads_by(torch.special.entr(weights).sum(-1).mean(-1))
    assert order_of(shown) == ordered
    shown.locator(f'[data-place="{ordered[0]}"]').click()
    shown.keyboard.press("ArrowRight")
    assert shown.locator('#overview [aria-pressed="true"]').get_attribute("data-place") == ordered[1]


def test_the_reason_is_true(open_page: OpenPage, shown: Any) -> None:
    reasons = {}
    for place in order_of(shown):
        shown.locator(f'[data-place="{place}"]').click()
        reasons[place] = text_of(shown, "reason")
    assert all(re.match(r"This head looks (mostly )?at .*\.", reason) for reason in reasons.values())
    assert sorted("Shown because" in reason for reason in reasons.values()) == [False] * 5 + [True]
    even = open_page(page(given([torch.full((3, 5, 5), 0.2)]), list("abcde")))
    assert text_of(even, "reason") == "No head stands out: all of them look everywhere about alike."


def test_a_hint_disappears_after_its_first_use(shown: Any) -> None:
    for name, target in (("query", token(shown, 2)), ("head", shown.locator('[data-place="0-2"]'))):
        hint = shown.locator(f'[data-hint="{name}"]')
        assert hint.is_visible()
        target.click()
        assert not hint.is_visible()
    assert "Drag over" in text_of(shown, "sum-text")
    shown.locator(".text").focus()
    shown.keyboard.press("Shift+ArrowRight")
    shown.keyboard.press("Escape")
    assert text_of(shown, "sum-text") == ""


@pytest.mark.parametrize("pair", [(2, 4), (5, 0)])
def test_a_question_ranks_heads_by_exact_weights(pair: tuple[int, int], shown: Any, weights: torch.Tensor) -> None:
    choose(shown, "order", "asked")
    choose(shown, "from", str(pair[0]))
    large = shown.locator('#overview [aria-pressed="true"]').get_attribute("data-place")
    most = int(weights[*map(int, large.split("-")), pair[0]].argmax())
    assert shown.locator("#to").input_value() == str(most), "an answer before the question is whole"
    assert order_of(shown) == heads_by(weights[:, :, pair[0], most])
    choose(shown, "to", str(pair[1]))
    assert text_of(shown, "search-lead") == "choose a head:"
    asked = weights[:, :, pair[0], pair[1]]
    buttons = shown.locator("#search-list button")
    assert [each.get_attribute("data-place") for each in buttons.all()] == [f"0-{place}" for place in heads_by(asked)]
    assert [float(each.split(": ")[1]) for each in buttons.all_inner_texts()] == pytest.approx(
        asked.flatten().sort(descending=True).values.tolist(), abs=6e-4
    )
    assert text_of(shown, "search-note") == "Ranked by exact weights."
    buttons.first.click()
    layer, head = heads_by(asked)[0].split("-")
    assert text_of(shown, "head-title") == f"Layer {layer}, head {head}"
    assert text_of(shown, "readout") == f"{NAMES[pair[0]]} → {NAMES[pair[1]]} {asked.max():.4f}"
    assert order_of(shown) == heads_by(asked)
    assert shown.locator("#overview [role=columnheader]").all_inner_texts() == ["rank"]


def test_a_page_of_tiles_says_what_they_answer_and_groups_its_heads(open_page: OpenPage) -> None:
    """It has more tokens than tiles, so that most heads do not hold every weight."""
    torch.manual_seed(5)
    rec, tokens = structured(3, 20, 200)
    tiled = open_page(rec.page(tokens))
    choose(tiled, "from", "120")
    choose(tiled, "to", "119")
    assert text_of(tiled, "search-note").startswith("“About” is the mean weight of a tile")
    asked = torch.stack([rec.weights(name)[0, :, 120, 119] for name in rec])
    for each in tiled.locator("#search-list button").all():
        _, layer, head = map(int, each.get_attribute("data-place").split("-"))
        value = each.inner_text().split(": ")[1]
        if not value.startswith("about "):
            assert float(value) == pytest.approx(asked[layer, head].item(), abs=6e-4)
    tiled.locator("#special").check()
    assert "Thumbnails, statistics of heads and the ranking count all tokens" in text_of(tiled, "note")
    assert "Special tokens count here" in text_of(tiled, "search-note")
    chosen = tiled.locator('#overview [aria-pressed="true"]').get_attribute("data-place")
    tiled.locator(f'[data-place="{"1-3" if chosen != "1-3" else "1-4"}"]').click()
    assert "Special tokens stay here: leaving them out needs every weight" in text_of(tiled, "note")
    tiled.locator("#special").uncheck()
    for width in (390, 1400):
        tiled.set_viewport_size({"width": width, "height": 900})
        for place in ("0-0", "0-19", "2-0", "2-19", "1-10"):
            tiled.locator(f'[data-place="{place}"]').click()
            layer, head = place.split("-")
            assert text_of(tiled, "head-title") == f"Layer {layer}, head {head}"
    choose(tiled, "order", "kinds")
    headings = [each.split(" · ") for each in tiled.locator("#overview .heading").all_inner_texts()]
    counts = [int(count.split()[0]) for _, count in headings]
    assert sum(counts) == 60
    assert counts == sorted(counts, reverse=True)
    assert {"special tokens", "the token before", "tokens further away"} <= {kind for kind, _ in headings}
    first = order_of(tiled)[0]
    assert f" at {headings[0][0]}" in tiled.locator(f'[data-place="{first}"]').get_attribute("aria-label")
    tiled.locator(f'[data-place="{first}"]').focus()
    for _ in range(30):
        tiled.keyboard.press("ArrowDown")
    assert tiled.locator('#overview [aria-pressed="true"]').get_attribute("data-place") != first


def test_the_address_holds_layer_head_and_token_and_another_is_ignored(browser: Any, path: Path, shown: Any) -> None:
    shown.locator('[data-place="1-2"]').click()
    token(shown, 4).click()
    wait_until(shown, "location.hash === '#layer=1&head=2&token=4'")
    first = "In layer 0, head 1, "
    for place, finding in {
        "layer=1&head=0&token=2": "In layer 1, head 0, animal looks most at ",
        "top": first,
        "layer=9&head=0&token=0": first,
        "layer=0&head=9&token=0": first,
        "layer=1&head=1&token=1&x=<b>": first,
    }.items():
        opened = browser.new_page()
        opened.goto(f"{path.as_uri()}#{place}")
        opened.wait_for_selector("html[data-ready]")
        assert text_of(opened, "finding").startswith(finding)
        opened.close()


def without_special(weights: torch.Tensor) -> torch.Tensor:
    """Weights of 0 for the first and the last key, the others renormalised."""
    left = weights[..., 1:-1] / weights[..., 1:-1].sum(-1, keepdim=True)
    return torch.nn.functional.pad(left, (1, 1))


def test_special_tokens_are_left_out_everywhere(shown: Any, weights: torch.Tensor, tmp_path: Path) -> None:
    left = without_special(weights)
    row = left[0, 1, 2]
    shown.locator("#special").check()
    token(shown, 2).click()
    said, weight = text_of(shown, "readout").rsplit(" ", 1)
    assert said == f"animal → {NAMES[int(row.argmax())]}"
    assert float(weight) == pytest.approx(row.max().item(), abs=2e-4)
    assert f"entropy {torch.special.entr(row).sum():.2f} nats" in text_of(shown, "details")
    assert "renormalised" in text_of(shown, "note")
    assert all(text_of(shown, name).count("(all tokens counted)") == 1 for name in ("reason", "about"))
    shown.locator("#special").uncheck()
    assert "(all tokens counted)" not in text_of(shown, "reason")
    assert text_of(shown, "note") == ""
    first_row = "() => document.querySelector('#overview canvas').toDataURL()"
    before = shown.evaluate(first_row)
    shown.locator("#special").check()
    assert shown.evaluate(first_row) != before
    for caption in ("overview-scale", "map-scale"):
        assert "special tokens left out" in text_of(shown, caption)
    choose(shown, "from", "2")
    choose(shown, "to", "4")
    answers = [each.split(": ") for each in shown.locator("#search-list button").all_inner_texts()]
    best = left[:, :, 2, 4].flatten().sort(descending=True).values
    assert [float(weight) for _, weight in answers] == pytest.approx(best.tolist(), abs=6e-4)
    assert "Special tokens are left out" in text_of(shown, "search-note")
    first, _, cells = saved_weights(shown, tmp_path)
    assert first[0] == "query \\ key (special tokens left out, the others renormalised)"
    # The page holds weights to four decimals, before they are divided by what is left of their row.
    assert ((cells - left[0, 1]).abs() <= 1.2e-4 / (1 - weights[0, 1][:, [0, 5]].sum(-1, keepdim=True))).all()


def test_word_pieces_are_merged_after_special_tokens_are_left_out(open_page: OpenPage, tmp_path: Path) -> None:
    torch.manual_seed(9)
    weights = torch.randn(1, 2, SIZE, SIZE).softmax(-1)
    made = page(given(list(weights)), Tokens(["[CLS]", "str", "##eet", "is", "wide", "[SEP]"]), layer=0, head=1)
    shown = open_page(made)
    shown.locator("#special").check()
    shown.locator("#words").check()
    _, names, cells = saved_weights(shown, tmp_path)
    assert "special tokens left out" in text_of(shown, "map-scale")
    left = without_special(weights[0, 1])
    rows = torch.stack([left[0], left[1:3].mean(0), *left[3:]])
    merged = torch.cat([rows[:, :1], rows[:, 1:3].sum(-1, keepdim=True), rows[:, 3:]], -1)
    assert names == ["[CLS]", "street", "is", "wide", "[SEP]"]
    torch.testing.assert_close(cells, merged, rtol=0, atol=4e-4)


def test_text_from_right_to_left_is_laid_out_so(open_page: OpenPage) -> None:
    torch.manual_seed(6)
    names = ["[CLS]", "שלום", "עולם", "2024", "يا", "[SEP]"]
    shown = open_page(page(given(list((2 * torch.randn(1, 2, SIZE, SIZE)).softmax(-1))), Tokens(names)))
    places = [token(shown, place).bounding_box()["x"] for place in range(SIZE)]
    assert places == sorted(places, reverse=True)
    labels = [each.bounding_box()["x"] for each in shown.locator("#columns span").all()]
    assert labels == sorted(labels)
    assert "The map has the first key on the left" in text_of(shown, "note")
    token(shown, 1).click()
    shown.locator(".text").focus()
    shown.keyboard.press("ArrowLeft")
    assert shown.locator(".text .query").inner_text() == names[2]
    left = [each.bounding_box()["x"] for each in shown.locator("#list li > span:first-child").all()]
    assert len(set(left)) == 1


def test_names_may_be_equal_long_or_without_a_font(open_page: OpenPage) -> None:
    rare = "\U00012f90"  # of Cypro-Minoan, a script of which nearly no computer has a font
    family = "\U0001f469\u200d\U0001f469\u200d\U0001f467"  # seen as one character
    names = ["the", "é", "the", rare, "b" + rare, family * 20]
    shown = open_page(page(given([torch.eye(SIZE).expand(2, SIZE, SIZE)]), names))
    notes = text_of(shown, "notes")
    assert notes.startswith(f"No font of this computer has {rare}")  # and the family, where there are no emoji
    assert notes.count(rare) == 1
    assert ". Noto Sans CJK has Chinese" in notes
    choose(shown, "to", "2")
    assert shown.locator("#to option").all_inner_texts()[:3] == ["the (0)", "é", "the (2)"]
    token(shown, 2).click()
    assert shown.locator("#list li > span:first-child").all_inner_texts() == ["the (2)"]
    assert shown.locator("#rows span").all_inner_texts() == [*names[:-1], family * 15 + "…"]


def test_the_theme_is_chosen_paper_is_light_and_a_phone_has_one_column(shown: Any) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    shown.emulate_media(color_scheme="light")
    shown.locator("#theme").select_option("dark")
    assert shown.evaluate(background) == "rgb(18, 22, 28)"
    shown.emulate_media(media="print")
    assert shown.evaluate(background) == "rgb(255, 255, 255)"
    lightest = """(() => {
        const context = document.querySelector("#cells").getContext("2d");
        const shades = context.getImageData(0, 0, 300, 300).data.filter((_, at) => at % 4 < 3);
        return shades.reduce((most, shade) => Math.max(most, shade), 0);
    })()"""
    wait_until(shown, f"{lightest} > 230")
    for control in ("controls", "zoom", "save", "search", "statistic", "order"):
        assert not shown.locator(f"#{control}").is_visible()
    for kept in ("finding", "cells", "entropy", "received", "overview"):
        assert shown.locator(f"#{kept}").is_visible()
    shown.emulate_media(media="screen")
    shown.locator("#theme").select_option("light")
    assert shown.evaluate(background) == "rgb(255, 255, 255)"
    shown.set_viewport_size({"width": 390, "height": 800})
    tops = [shown.locator(each).bounding_box()["y"] for each in (".text", "#finding", "#search", "#map", "#overview")]
    assert tops == sorted(tops)


def test_without_javascript_the_finding_and_the_picture_remain(browser: Any, path: Path, weights: torch.Tensor) -> None:
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(path.as_uri())
    assert opened.locator("h1").inner_text() == "the animal was tired"
    assert opened.locator("#finding").inner_text().startswith("In layer 0, head 1, ")
    best = weights[0, 1].amax(-1)
    assert any(f"({value:.4f})" in opened.locator("#finding").inner_text() for value in best)
    assert opened.locator("figure svg").is_visible()
    assert "layer 0, head 1" in opened.locator("figure svg").get_attribute("aria-label")
    for control in ("button", "select", "input", "canvas"):
        assert not any(each.is_visible() for each in opened.locator(control).all())
    context.close()


def test_the_head_is_saved_as_csv_and_the_map_as_svg(shown: Any, weights: torch.Tensor, tmp_path: Path) -> None:
    first, names, cells = saved_weights(shown, tmp_path)
    assert first == ["query \\ key", *NAMES]
    assert names == NAMES
    torch.testing.assert_close(cells, weights[0, 1], rtol=0, atol=6e-5)
    svg = saved(shown, "svg", tmp_path)
    assert svg.startswith("<svg xmlns=")
    assert svg.count("<text") == 2 * SIZE
    assert "data:image/png;base64," in svg


def test_one_layer_one_head_and_one_token_are_not_plural(open_page: OpenPage) -> None:
    shown = open_page(page(given([torch.ones(1, 1, 1)]), ["a"], title="model"))
    assert text_of(shown, "facts") == "model · 1 layer × 1 head · 1 token"
