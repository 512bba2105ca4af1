"""Long texts, several texts and several kinds of attention in a real browser."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.plot import page

from .browsing import OpenPage, needs_chromium, text_of, wait_until
from .pages import Contents
from .recorded import record_pair, record_two

pytestmark = needs_chromium

LENGTH = 300


@pytest.fixture(scope="module", name="rec")
def _rec() -> Any:
    torch.manual_seed(5)
    return record_two(LENGTH)


@pytest.fixture(name="shown")
def _shown(open_page: OpenPage, rec: Any) -> Any:
    return open_page(page(rec, [f"t{place}" for place in range(LENGTH)], layer=1, head=0))


def view(shown: Any) -> list[int]:
    """First and last query and key in view."""
    numbers = text_of(shown, "part").replace("queries ", "").replace("keys ", "")
    if not numbers:
        return [0, LENGTH - 1, 0, LENGTH - 1]
    return [int(number) for part in numbers.split(", ") for number in part.split("–")]


def at(shown: Any, query: int, key: int) -> tuple[float, float]:
    """Where on the screen a cell of the map is."""
    top, bottom, left, right = view(shown)
    box = shown.locator("#cells").bounding_box()
    down, across = (query - top + 0.5) / (bottom - top + 1), (key - left + 0.5) / (right - left + 1)
    return box["x"] + box["width"] * across, box["y"] + box["height"] * down


def test_an_exact_crop_gives_every_weight_and_labels_have_room(shown: Any, rec: Any) -> None:
    weights = rec.weights(1, 0)[0]
    for query, key in ((0, 0), (141, 260), (299, 7)):
        shown.mouse.move(*at(shown, query, key))
        exact = weights[query, key].item()
        expected = f"{exact:.4f}" if exact >= 0.00005 else "< 0.0001"
        assert text_of(shown, "readout") == f"t{query} → t{key} {expected}"
    box = shown.locator(".text").bounding_box()
    mark = shown.locator(".text .query").bounding_box()
    assert box["y"] <= mark["y"] <= box["y"] + box["height"]
    for query in (100, 101, 102):
        shown.mouse.move(*at(shown, query, 50))
        assert shown.locator("#rows .active").inner_text() == f"t{query}"
        labels = [label.bounding_box() for label in shown.locator("#rows span:not(.covered)").all()]
        tops = sorted(box["y"] for box in labels)
        assert min(after - before for before, after in pairwise(tops)) > 12


def test_a_double_click_zooms_and_the_keyboard_zooms_back(shown: Any) -> None:
    shown.mouse.dblclick(*at(shown, 100, 200))
    shown.mouse.dblclick(*at(shown, 100, 200))
    top, bottom, left, right = view(shown)
    assert bottom - top + 1 == right - left + 1 == LENGTH // 4
    assert top <= 100 <= bottom
    assert left <= 200 <= right
    shown.mouse.move(*at(shown, top, left))
    assert text_of(shown, "readout").startswith(f"t{top} → t{left} ")
    shown.locator("#map").focus()
    shown.keyboard.press("-")
    assert view(shown)[1] - view(shown)[0] + 1 == LENGTH // 2
    shown.keyboard.press("0")
    assert text_of(shown, "part") == ""
    shown.keyboard.press("+")
    assert view(shown)[1] - view(shown)[0] + 1 == LENGTH // 2


def test_the_wheel_zooms_with_ctrl_and_moves_what_is_zoomed(shown: Any) -> None:
    shown.mouse.move(*at(shown, 150, 150))
    shown.keyboard.down("Control")
    for _ in range(3):
        shown.mouse.wheel(0, -100)
    shown.keyboard.up("Control")
    shown_queries = "(document.getElementById('part').textContent.match(/\\d+/g) || [0, 999]).map(Number)"
    wait_until(shown, f"(([first, last]) => last - first < {LENGTH // 6})({shown_queries})")  # all three have arrived
    before = view(shown)
    shown.mouse.wheel(0, 120)
    wait_until(shown, f"!document.getElementById('part').textContent.startsWith('queries {before[0]}–')")
    after = view(shown)
    assert after[0] > before[0]
    assert after[2:] == before[2:]


def test_arrow_keys_move_the_view_along(shown: Any) -> None:
    shown.locator('.text [data-place="10"]').click()
    shown.locator("#map").focus()
    for _ in range(4):
        shown.keyboard.press("+")
    last = view(shown)[1]
    for _ in range(last - 10 + 5):
        shown.keyboard.press("ArrowDown")
    assert view(shown)[1] == last + 5
    assert text_of(shown, "readout").startswith(f"t{last + 5} → ")


def test_the_selection_can_be_zoomed_to(shown: Any, rec: Any) -> None:
    shown.mouse.move(*at(shown, 40, 60))
    shown.mouse.down()
    shown.mouse.move(*at(shown, 79, 99), steps=3)
    shown.mouse.up()
    mean = rec.weights(1, 0)[0, 40:80, 60:100].double().sum(-1).mean().item()
    shown_sum = float(text_of(shown, "sum-text").split(" sum of 40 keys, mean over 40 queries: ")[0])
    assert shown_sum == pytest.approx(mean, abs=2e-3)
    shown.locator("#sum-zoom").click()
    assert view(shown) == [40, 79, 60, 99]


def test_tiles_say_that_they_are_tiles_and_their_sums_are_about_right(shown: Any, rec: Any) -> None:
    shown.locator('[data-place="0-2"]').click()
    assert "Tiles of several tokens" in text_of(shown, "note")
    assert text_of(shown, "note").endswith("Exact weights are here for layer 1, head 0.")
    weights = rec.weights(0, 2)[0]
    best = int(weights[120].argmax())
    shown.mouse.move(*at(shown, 120, best))
    assert text_of(shown, "readout") == f"t120 → t{best} {weights[120, best]:.4f}"
    least = int(weights[120].argmin())
    shown.mouse.move(*at(shown, 120, least))
    assert f"t120 → t{least} about " in text_of(shown, "readout")
    assert "its tile, keys" in text_of(shown, "readout")
    assert "weight of a tile: of 3 keys together, averaged over 3 queries" in text_of(shown, "overview-scale")
    shown.mouse.move(*at(shown, 0, 50))
    shown.mouse.down()
    shown.mouse.move(*at(shown, 299, 149), steps=3)
    shown.mouse.up()
    mean = weights[:, 50:150].double().sum(-1).mean().item()
    said = text_of(shown, "sum-text")
    assert said.startswith("about ")
    assert float(said.split()[1]) == pytest.approx(mean, abs=0.02)


def test_a_pooled_page_is_exact_for_the_chosen_head_and_tells_tiles_of_others(
    open_page: OpenPage, rec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page with room for little more than the chosen head."""
    monkeypatch.setattr("clearhead.plot._page_maker.ROOM", 80_000)
    pooled = open_page(page(rec, [f"t{place}" for place in range(LENGTH)], layer=1, head=0))
    chosen = rec.weights(1, 0)[0, 141]
    for key, written in ((int(chosen.argmax()), f"{chosen.max():.4f}"), (int(chosen.argmin()), "< 0.0001")):
        pooled.mouse.move(*at(pooled, 141, key))
        assert text_of(pooled, "readout") == f"t141 → t{key} {written}"
    entropy = torch.special.entr(chosen.double()).sum()
    assert f"query 141 · entropy {entropy:.2f} nats" in text_of(pooled, "details")
    pooled.locator('[data-place="0-2"]').click()
    weights = rec.weights(0, 2)[0].double()
    side = Contents((tmp_path / "page.html").read_text(encoding="utf-8")).layer(0, 0, 0)["grid"][0]
    assert side < 128
    readout = text_of(pooled, "readout")
    assert " and its neighbours look most at " in readout
    query = int(readout.split()[0][1:])
    first, last = (int(number) for number in readout.rstrip(")").split("(keys ")[1].split("–"))
    rows = [row for row in range(LENGTH) if row * side // LENGTH == query * side // LENGTH]
    mass = weights[rows, first : last + 1].sum(-1).mean().item()
    assert float(readout.split(" (keys ")[0].split()[-1]) == pytest.approx(mass, abs=0.02)
    columns = torch.arange(LENGTH) * side // LENGTH
    masses = torch.zeros(side).double().index_add_(0, columns, weights[rows].mean(0))
    assert mass == pytest.approx(masses.max().item(), abs=0.02), "the largest tile of the row"
    assert "entropy about " in text_of(pooled, "details")
    listed = [float(item.splitlines()[1]) for item in pooled.locator("#list li").all_inner_texts()]
    assert listed == sorted(listed, reverse=True)
    assert len(listed) == 8
    shaded = pooled.evaluate("[...document.querySelectorAll('.text span')].filter(s => s.style.background).length")
    assert shaded >= last - first + 1
    pooled.locator("#arcs").check()
    arcs = pooled.locator("#arcs-picture path").all()
    assert len(arcs) == 8, "to the middle of each tile"


def test_very_long_texts_are_laid_out_in_parts(open_page: OpenPage) -> None:
    """Every token is there, found by the keyboard and shown; the part that is not in view costs nothing."""
    torch.manual_seed(5)
    length = 2500
    shown = open_page(page(record_two(length), [f"t{place}" for place in range(length)], layer=1, head=0))
    assert shown.locator(".text span").count() == length
    assert shown.locator(".text > div").count() > 1
    for place in (length - 1, 0, 1234):
        token = shown.locator(f'.text [data-place="{place}"]')
        token.scroll_into_view_if_needed()
        token.hover()
        assert text_of(shown, "readout").startswith(f"t{place} looks most at ")
        token.click()
        assert shown.locator(".text .query").inner_text() == f"t{place}"
    shown.locator(".text").focus()
    shown.keyboard.press("ArrowRight")
    box, mark = (shown.locator(each).bounding_box() for each in (".text", ".text .query"))
    assert shown.locator(".text .query").inner_text() == "t1235"
    assert box["y"] <= mark["y"] <= box["y"] + box["height"]


def test_two_texts_and_three_kinds_of_attention(open_page: OpenPage) -> None:
    rec = record_pair()
    shown = open_page(page(rec, list("abcde"), key_tokens=list("stuvwxy")))
    assert shown.locator("#sections button").all_inner_texts() == [
        "encoder self-attention", "decoder self-attention", "cross-attention",
    ]  # fmt: skip
    assert text_of(shown, "facts") == "Attention · 3 attention layers × 2 heads · 7 and 5 tokens"
    shown.get_by_role("button", name="cross-attention").click()
    assert text_of(shown, "head-title") == "Cross-attention, layer 0, head 0"
    assert shown.locator(".text.queries span").all_inner_texts() == list("abcde")
    shown.locator(".text.queries span").nth(1).click()
    shown.locator(".text.keys span").nth(6).hover()
    weights = rec.weights("decoder.layers.0.multihead_attn", 0)[0]
    assert text_of(shown, "readout") == f"b → y {weights[1, 6]:.4f}"
    shown.mouse.down()
    shown.locator(".text.keys span").nth(4).hover()
    shown.mouse.up()
    said = text_of(shown, "sum-text").removesuffix(" sum of 3 keys: b → w x y")
    assert float(said) == pytest.approx(weights[1, 4:].sum().item(), abs=2e-4)


def test_a_frame_works_fits_its_page_and_takes_the_notebooks_theme(open_page: OpenPage, tmp_path: Path) -> None:
    rec = record_two(4, batch=2)
    made = page(rec, [list("abcd"), list("wxyz")], labels=["first", "second"], layer=0, head=1)
    cell = f"<!doctype html><body style='background: #111'><p>a cell</p>{made._repr_html_()}</body>"
    (tmp_path / "notebook.html").write_text(cell, encoding="utf-8")
    notebook = open_page(tmp_path / "notebook.html", ready="iframe")
    notebook.emulate_media(color_scheme="light")
    frame = notebook.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for()
    frame.locator("html[data-theme=dark]").wait_for()
    notebook.evaluate("document.body.style.background = 'white'")
    frame.locator("html[data-theme=light]").wait_for()
    frame.locator("#theme").select_option("dark")
    notebook.evaluate("document.body.style.background = '#222'")
    frame.locator("#theme").select_option("")
    frame.locator("html[data-theme=dark]").wait_for()
    frame.locator("#item").select_option("second")
    assert frame.locator("#reason").inner_text().startswith("In this text, this head looks ")
    frame.locator('.text [data-place="1"]').get_by_text("x", exact=True).hover()
    best = rec.weights(0, 1)[1, 1]
    frame.locator("#readout").get_by_text("x looks most at").wait_for()
    said = " ".join(frame.locator("#readout").inner_text().split())
    assert said == f"x looks most at {'wxyz'[int(best.argmax())]} {best.max():.4f}"
    for width in (700, 1400):
        notebook.set_viewport_size({"width": width, "height": 1400})
        notebook.wait_for_timeout(300)
        inside = frame.locator("html").evaluate("page => [page.scrollHeight, page.clientHeight]")
        assert inside[0] == inside[1], "nothing to scroll"
        last = frame.locator("footer").bounding_box()
        outer = notebook.locator("iframe").bounding_box()
        assert 0 <= outer["y"] + outer["height"] - last["y"] - last["height"] < 60, "no empty space below"
