"""Search, order, finding, address, theme, print, files and a page without JavaScript, in a real browser."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.plot import Tokens, given, page

from .browsing import needs_chromium, text_of, token, wait_until, watched_page
from .pages import structured

pytestmark = needs_chromium

NAMES = ["[CLS]", "the", "animal", "was", "tired", "[SEP]"]
SIZE = len(NAMES)


@pytest.fixture(scope="module", name="weights")
def _weights() -> torch.Tensor:
    torch.manual_seed(5)
    return (2 * torch.randn(2, 3, SIZE, SIZE)).softmax(-1)


@pytest.fixture(scope="module", name="made")
def _made(weights: torch.Tensor) -> Any:
    return page(given(list(weights)), Tokens(NAMES), layer=0, head=1, title="model")


@pytest.fixture(name="path")
def _path(made: Any, tmp_path: Path) -> Path:
    return made.save(tmp_path / "page.html")


@pytest.fixture(name="shown")
def _shown(browser: Any, path: Path) -> Iterator[Any]:
    with watched_page(browser, path) as opened:
        yield opened


@pytest.fixture(scope="module", name="tiled")
def _tiled() -> tuple[Any, Any]:
    """More tokens than tiles, so that most heads do not hold every weight."""
    torch.manual_seed(5)
    rec, tokens = structured(3, 20, 200)
    return rec, rec.page(tokens)


def choose(shown: Any, name: str, value: str) -> None:
    shown.locator(f"#{name}").focus()
    shown.locator(f"#{name}").select_option(value)


def order_of(shown: Any) -> list[str]:
    return shown.evaluate("[...document.querySelectorAll('#overview button')].map(each => each.dataset.place)")


def heads_by(values: torch.Tensor) -> list[str]:
    """Places of heads, the largest of (layers, heads) first."""
    return [f"{place // values.shape[1]}-{place % values.shape[1]}" for place in values.flatten().argsort().flip(0)]


def test_the_finding_names_the_head_and_both_words(shown: Any, weights: torch.Tensor) -> None:
    token(shown, 3).click()
    best = int(weights[0, 1, 3].argmax())
    expected = f"In layer 0, head 1, was looks most at {NAMES[best]} ({weights[0, 1, 3, best]:.4f})"
    assert text_of(shown, "finding") == expected
    shown.locator('[data-place="1-2"]').click()
    assert text_of(shown, "finding").startswith("In layer 1, head 2, was looks most at ")
    assert shown.locator("h1").inner_text() == "the animal was tired"
    assert text_of(shown, "axes") == "key → query ↓"


def test_the_reason_is_true(browser: Any, shown: Any, tmp_path: Path) -> None:
    reasons = {}
    for place in order_of(shown):
        shown.locator(f'[data-place="{place}"]').click()
        reasons[place] = text_of(shown, "reason")
    assert all(re.match(r"This head looks (mostly )?at .*\.", reason) for reason in reasons.values())
    assert sorted("In no other head" in reason for reason in reasons.values()) == [False] * 5 + [True]
    alike = page(given([torch.full((3, 5, 5), 0.2)]), list("abcde")).save(tmp_path / "alike.html")
    with watched_page(browser, alike) as even:
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
    assert text_of(shown, "search-note") == "Choose both, or a cell of the map, to rank all heads."
    assert shown.locator("#search-list button").count() == 0
    assert text_of(shown, "search-lead") == ""
    assert order_of(shown) == sorted(order_of(shown)), "by layer, while nothing is asked"
    choose(shown, "to", str(pair[1]))
    assert text_of(shown, "search-lead") == "choose a head:"
    asked = weights[:, :, pair[0], pair[1]]
    found = shown.locator("#search-list button")
    assert [each.get_attribute("data-place") for each in found.all()] == [f"0-{place}" for place in heads_by(asked)]
    assert [float(each.split(": ")[1]) for each in found.all_inner_texts()] == pytest.approx(
        asked.flatten().sort(descending=True).values.tolist(), abs=6e-4
    )
    assert text_of(shown, "search-note") == "Ranked by exact weights."
    found.first.click()
    layer, head = heads_by(asked)[0].split("-")
    assert text_of(shown, "head-title") == f"Layer {layer}, head {head}"
    assert text_of(shown, "readout") == f"{NAMES[pair[0]]} → {NAMES[pair[1]]} {asked.max():.4f}"
    assert order_of(shown) == heads_by(asked)
    assert shown.locator("#overview [role=columnheader]").all_inner_texts() == ["rank"]


def test_where_tiles_answer_the_page_says_so(browser: Any, tiled: tuple[Any, Any], tmp_path: Path) -> None:
    rec, made = tiled
    with watched_page(browser, made.save(tmp_path / "tiled.html")) as shown:
        choose(shown, "from", "120")
        choose(shown, "to", "119")
        assert text_of(shown, "search-note").startswith("“About” is the mean weight of a tile")
        asked = torch.stack([rec.weights(name)[0, :, 120, 119] for name in rec])
        for each in shown.locator("#search-list button").all():
            _, layer, head = map(int, each.get_attribute("data-place").split("-"))
            value = each.inner_text().split(": ")[1]
            if not value.startswith("about "):
                assert float(value) == pytest.approx(asked[layer, head].item(), abs=6e-4)


def test_heads_are_sorted_and_walked_in_that_order(shown: Any, weights: torch.Tensor) -> None:
    choose(shown, "order", "entropy")
    ordered = heads_by(torch.special.entr(weights).sum(-1).mean(-1))
    assert order_of(shown) == ordered
    shown.locator(f'[data-place="{ordered[0]}"]').click()
    shown.keyboard.press("ArrowRight")
    assert shown.locator('#overview [aria-pressed="true"]').get_attribute("data-place") == ordered[1]


def test_heads_are_grouped_by_what_they_do(browser: Any, tiled: tuple[Any, Any], tmp_path: Path) -> None:
    with watched_page(browser, tiled[1].save(tmp_path / "tiled.html")) as shown:
        choose(shown, "order", "kinds")
        headings = [each.split(" · ") for each in shown.locator("#overview .heading").all_inner_texts()]
        counts = [int(count.split()[0]) for _, count in headings]
        assert sum(counts) == 60
        assert counts == sorted(counts, reverse=True)
        assert {"special tokens", "the token before", "tokens further away"} <= {kind for kind, _ in headings}
        first = order_of(shown)[0]
        assert f" at {headings[0][0]}" in shown.locator(f'[data-place="{first}"]').get_attribute("aria-label")
        shown.locator(f'[data-place="{first}"]').focus()
        for _ in range(30):
            shown.keyboard.press("ArrowDown")
        assert shown.locator('#overview [aria-pressed="true"]').get_attribute("data-place") != first


def test_every_thumbnail_can_be_hit(browser: Any, tiled: tuple[Any, Any], tmp_path: Path) -> None:
    with watched_page(browser, tiled[1].save(tmp_path / "tiled.html")) as shown:
        for width in (390, 1400):
            shown.set_viewport_size({"width": width, "height": 900})
            for place in ("0-0", "0-19", "2-0", "2-19", "1-10"):
                shown.locator(f'[data-place="{place}"]').click()
                layer, head = place.split("-")
                assert text_of(shown, "head-title") == f"Layer {layer}, head {head}"


def test_the_address_holds_layer_head_and_token(browser: Any, path: Path, shown: Any) -> None:
    shown.locator('[data-place="1-2"]').click()
    token(shown, 4).click()
    wait_until(shown, "location.hash === '#layer=1&head=2&token=4'")
    opened = browser.new_page()
    opened.goto(path.as_uri() + "#layer=1&head=0&token=2")
    opened.wait_for_selector("html[data-ready]")
    assert text_of(opened, "finding").startswith("In layer 1, head 0, animal looks most at ")
    opened.close()


@pytest.mark.parametrize(
    "address", ["#top", "#layer=9&head=0&token=0", "#layer=0&head=9&token=0", "#layer=1&head=1&token=1&x=<b>"]
)
def test_another_address_is_ignored(address: str, browser: Any, path: Path) -> None:
    opened = browser.new_page()
    opened.goto(path.as_uri() + address)
    opened.wait_for_selector("html[data-ready]")
    assert text_of(opened, "head-title") == "Layer 0, head 1"
    opened.close()


def test_special_tokens_are_left_out_and_the_page_says_so(shown: Any, weights: torch.Tensor) -> None:
    shown.locator("#special").check()
    token(shown, 2).click()
    row = weights[0, 1, 2].clone()
    row[[0, 5]] = 0
    row /= row.sum()
    said, weight = text_of(shown, "readout").rsplit(" ", 1)
    assert said == f"animal → {NAMES[int(row.argmax())]}"
    assert float(weight) == pytest.approx(row.max().item(), abs=2e-4)
    assert f"entropy {torch.special.entr(row).sum():.2f} nats" in text_of(shown, "details")
    assert "renormalised" in text_of(shown, "note")
    assert all(text_of(shown, name).count("(all tokens counted)") == 1 for name in ("reason", "about"))
    shown.locator("#special").uncheck()
    assert "(all tokens counted)" not in text_of(shown, "reason")
    assert text_of(shown, "note") == ""


def test_special_tokens_are_left_out_of_all_heads_the_ranking_and_the_file(
    shown: Any, weights: torch.Tensor, tmp_path: Path
) -> None:
    first_row = "() => document.querySelector('#overview canvas').toDataURL()"
    before = shown.evaluate(first_row)
    shown.locator("#special").check()
    assert shown.evaluate(first_row) != before
    for caption in ("overview-scale", "map-scale"):
        assert "special tokens left out" in text_of(shown, caption)
    left = weights.clone()
    left[..., [0, 5]] = 0
    left /= left.sum(-1, keepdim=True)
    choose(shown, "from", "2")
    choose(shown, "to", "4")
    found = [each.split(": ") for each in shown.locator("#search-list button").all_inner_texts()]
    best = left[:, :, 2, 4].flatten().sort(descending=True).values
    assert [float(weight) for _, weight in found] == pytest.approx(best.tolist(), abs=6e-4)
    assert "Special tokens are left out" in text_of(shown, "search-note")
    with shown.expect_download() as download:
        shown.locator("#save-csv").click()
    download.value.save_as(tmp_path / "saved.csv")
    rows = list(csv.reader((tmp_path / "saved.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0][0] == "query \\ key (special tokens left out, the others renormalised)"
    cells = torch.tensor([[float(cell) for cell in row[1:]] for row in rows[1:]])
    # The page holds weights to four decimals, before they are divided by what is left of their row.
    assert ((cells - left[0, 1]).abs() <= 1.2e-4 / (1 - weights[0, 1][:, [0, 5]].sum(-1, keepdim=True))).all()


def test_word_pieces_are_merged_after_special_tokens_are_left_out(browser: Any, tmp_path: Path) -> None:
    torch.manual_seed(9)
    names = ["[CLS]", "str", "##eet", "is", "wide", "[SEP]"]
    weights = torch.randn(1, 2, SIZE, SIZE).softmax(-1)
    made = page(given(list(weights)), Tokens(names), layer=0, head=1)
    with watched_page(browser, made.save(tmp_path / "page.html")) as shown:
        shown.locator("#special").check()
        shown.locator("#words").check()
        with shown.expect_download() as download:
            shown.locator("#save-csv").click()
        download.value.save_as(tmp_path / "saved.csv")
        assert "special tokens left out" in text_of(shown, "map-scale")
    left = weights[0, 1].clone()
    left[:, [0, 5]] = 0
    left /= left.sum(-1, keepdim=True)
    rows = torch.stack([left[0], left[1:3].mean(0), *left[3:]])
    merged = torch.cat([rows[:, :1], rows[:, 1:3].sum(-1, keepdim=True), rows[:, 3:]], -1)
    saved = list(csv.reader((tmp_path / "saved.csv").read_text(encoding="utf-8").splitlines()))
    assert [line[0] for line in saved[1:]] == ["[CLS]", "street", "is", "wide", "[SEP]"]
    found = torch.tensor([[float(cell) for cell in line[1:]] for line in saved[1:]])
    torch.testing.assert_close(found, merged, rtol=0, atol=4e-4)


def test_where_special_tokens_stay_the_page_says_so(browser: Any, tiled: tuple[Any, Any], tmp_path: Path) -> None:
    with watched_page(browser, tiled[1].save(tmp_path / "tiled.html")) as shown:
        choose(shown, "to", "119")
        shown.locator("#special").check()
        assert "Thumbnails, statistics of heads and the ranking count all tokens" in text_of(shown, "note")
        assert "Special tokens count here" in text_of(shown, "search-note")
        chosen = shown.locator('#overview [aria-pressed="true"]').get_attribute("data-place")
        shown.locator(f'[data-place="{"1-3" if chosen != "1-3" else "1-4"}"]').click()
        assert "Special tokens stay here: leaving them out needs every weight" in text_of(shown, "note")


def test_text_from_right_to_left_is_laid_out_so(browser: Any, tmp_path: Path) -> None:
    torch.manual_seed(6)
    names = ["[CLS]", "שלום", "עולם", "2024", "يا", "[SEP]"]
    made = page(given(list((2 * torch.randn(1, 2, SIZE, SIZE)).softmax(-1))), Tokens(names))
    with watched_page(browser, made.save(tmp_path / "page.html")) as shown:
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


def test_characters_without_a_font_are_named_once(browser: Any, shown: Any, tmp_path: Path) -> None:
    assert not shown.locator("#notes").is_visible()
    rare = "\U00012f90"  # of Cypro-Minoan, a script of which nearly no computer has a font
    names = ["a", "é", rare, "b" + rare, "c", "d"]
    made = page(given([torch.eye(SIZE)[None]]), names)
    with watched_page(browser, made.save(tmp_path / "boxes.html")) as boxes:
        assert text_of(boxes, "notes").startswith(f"No font of this computer has {rare}. Noto Sans CJK has Chinese")


def test_a_long_name_is_cut_between_characters_as_they_are_seen(browser: Any, tmp_path: Path) -> None:
    family = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
    made = page(given([torch.eye(2)[None]]), [family * 20, "b"])
    with watched_page(browser, made.save(tmp_path / "page.html")) as shown:
        assert shown.locator("#rows span").first.inner_text() == family * 15 + "…"


def test_the_theme_is_chosen_and_paper_is_light(shown: Any) -> None:
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


def test_on_a_phone_the_question_the_map_and_the_heads_follow_the_finding(shown: Any) -> None:
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
    for kind in ("csv", "svg"):
        with shown.expect_download() as download:
            shown.locator(f"#save-{kind}").click()
        assert download.value.suggested_filename == f"layer-0-head-1.{kind}"
        download.value.save_as(tmp_path / f"saved.{kind}")
    rows = list(csv.reader((tmp_path / "saved.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["query \\ key", *NAMES]
    assert [row[0] for row in rows[1:]] == NAMES
    found = torch.tensor([[float(cell) for cell in row[1:]] for row in rows[1:]])
    torch.testing.assert_close(found, weights[0, 1], rtol=0, atol=6e-5)
    svg = (tmp_path / "saved.svg").read_text(encoding="utf-8")
    assert svg.startswith("<svg xmlns=")
    assert svg.count("<text") == 2 * SIZE
    assert "data:image/png;base64," in svg


def test_tokens_with_the_same_name_are_told_apart_by_position(browser: Any, tmp_path: Path) -> None:
    made = page(given([torch.eye(4)[None, None].expand(1, 2, 4, 4)[0]]), ["the", "cat", "the", "mat"])
    with watched_page(browser, made.save(tmp_path / "page.html")) as shown:
        choose(shown, "to", "2")
        names = ["the (0)", "cat", "the (2)", "mat"]
        assert shown.locator("#to option").all_inner_texts() == names
        assert sorted(shown.locator("#list li > span:first-child").all_inner_texts()) == ["the (2)"]
        assert shown.locator("#rows span").all_inner_texts() == ["the", "cat", "the", "mat"]


def test_a_difference_says_at_once_what_changes_from_what_to_what(browser: Any, tmp_path: Path) -> None:
    first, second = torch.eye(3)[None, None].squeeze(0), torch.full((1, 3, 3), 1 / 3)
    labels = ("a name that is too long for a line", "short")
    made = given([first]).compare(given([second])).page(labels=labels)
    with watched_page(browser, made.save(tmp_path / "page.html")) as shown:
        wait_until(shown, "document.getElementById('details').textContent.startsWith('first ')")
        assert text_of(shown, "details").startswith("first 1.0000 · short 0.3333 · ")
        assert text_of(shown, "reason") == "The colours show second − first: blue is less weight, brown is more."
        buttons = shown.locator("#views button span").all_inner_texts()
        assert buttons == [f"first: {labels[0]}", "short", "difference"]


def test_a_comparison_shows_both_texts_aligned(browser: Any, tmp_path: Path) -> None:
    torch.manual_seed(8)
    texts = (["it", "was", "too", "tired"], ["it", "was", "far", "too", "wide"])
    records = [given([torch.randn(2, len(text), len(text)).softmax(-1)]) for text in texts]
    made = records[0].compare(records[1], tokens=texts[0], other_tokens=texts[1]).page()
    with watched_page(browser, made.save(tmp_path / "page.html")) as shown:
        shown.locator("#aligned").wait_for()
        columns = shown.locator("#aligned > span").all()[1:]
        lines = [each.locator("span").all_inner_texts() for each in columns]
        assert lines == [["it", "it"], ["was", "was"], ["", "far"], ["too", "too"], ["tired", "wide"]]
        assert shown.locator("#aligned .differs").all_inner_texts() == ["", "far", "tired", "wide"]
        shown.locator("#views button").nth(1).click()
        wait_until(shown, "document.querySelectorAll('.text span').length === 5")
        for place in (".text .differs", "#rows .differs", "#columns .differs"):
            assert shown.locator(place).all_inner_texts() == ["far", "wide"]
        assert set(shown.locator("#list .differs").all_inner_texts()) == {"far", "wide"}


def test_one_layer_one_head_and_one_token_are_not_plural(browser: Any, tmp_path: Path) -> None:
    made = page(given([torch.ones(1, 1, 1)]), ["a"], title="model").save(tmp_path / "one.html")
    with watched_page(browser, made) as shown:
        assert text_of(shown, "facts") == "model · 1 layer × 1 head · 1 token"
