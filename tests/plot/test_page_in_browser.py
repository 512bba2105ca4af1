"""The page in a real browser: pointer, keyboard, words, selection, hostile tokens, and no request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clearhead.plot import Tokens, given, page

from .browsing import OpenPage, needs_chromium, text_of, token, wait_until

pytestmark = needs_chromium

NAMES = ["the", "</script><img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "str", "##eet", "街"]
TOKENS = Tokens(NAMES)
SIZE = len(NAMES)
WORDS = [0, 1, 2, 3, 3, 4]


@pytest.fixture(scope="module", name="weights")
def _weights() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(3, SIZE, SIZE).softmax(-1) for _ in range(2)]


@pytest.fixture(name="shown")
def _shown(open_page: OpenPage, weights: list[torch.Tensor]) -> Any:
    made = page(given(weights), TOKENS, layer=0, head=1, title="</title><script>alert(3)</script>")
    return open_page(made)


def written(weight: torch.Tensor) -> str:
    return f"{weight.item():.4f}"


def cell(shown: Any, query: int, key: int, count: int = SIZE) -> tuple[float, float]:
    """Where on the screen a cell of the map is."""
    box = shown.locator("#cells").bounding_box()
    return box["x"] + box["width"] * (key + 0.5) / count, box["y"] + box["height"] * (query + 0.5) / count


def test_the_pointer_reads_weights_rows_and_columns(shown: Any, weights: list[torch.Tensor]) -> None:
    shown.mouse.move(*cell(shown, 2, 3))
    assert text_of(shown, "readout") == f"{NAMES[2]} → str {written(weights[0][1, 2, 3])}"
    entropy = torch.special.entr(weights[0][1, 2]).sum()
    received = weights[0][1, :, 3].sum()
    assert f"entropy {entropy:.2f} nats" in text_of(shown, "details")
    assert f"receives {received:.2f} from 6 queries" in text_of(shown, "details")
    shown.mouse.move(1, 1)
    assert " looks most at " in text_of(shown, "finding")
    assert text_of(shown, "readout").split(" ")[-1] in text_of(shown, "finding"), "the same digits"
    assert " looks most at " not in text_of(shown, "readout"), "one sentence is enough"
    token(shown, 5).hover()
    order = weights[0][1, 5].argsort(descending=True).tolist()
    items = [item.splitlines() for item in shown.locator("#list li").all_inner_texts()]
    assert [item[0] for item in items] == [NAMES[key] for key in order]
    assert [item[1] for item in items] == [written(weights[0][1, 5, key]) for key in order]


def test_a_click_keeps_and_shades_a_row_or_shows_a_head(shown: Any, weights: list[torch.Tensor]) -> None:
    token(shown, 3).click()
    shown.mouse.move(1, 1)
    assert text_of(shown, "readout").startswith("str → ")
    assert f"str looks most at {text_of(shown, 'readout').split(' ')[2]} " in text_of(shown, "finding")
    assert token(shown, 3).get_attribute("class") == "query"
    shades = [token(shown, key).evaluate("mark => getComputedStyle(mark).backgroundColor") for key in range(SIZE)]
    lightness = [sum(map(int, shade[4:-1].split(","))) for shade in shades]
    row = weights[0][1, 3]
    assert lightness.index(min(lightness)) == int(row.argmax())
    assert lightness.index(max(lightness)) == int(row.argmin())
    shown.locator('[data-place="1-2"]').click()
    assert text_of(shown, "head-title") == "Layer 1, head 2"
    assert shown.locator('#overview button[aria-pressed="true"]').count() == 1
    token(shown, 0).hover()
    assert written(weights[1][2, 0].max()) in text_of(shown, "readout")


def test_dragging_sums_keys_and_averages_queries(shown: Any, weights: list[torch.Tensor]) -> None:
    token(shown, 0).click()
    token(shown, 3).hover()
    shown.mouse.down()
    token(shown, 5).hover()
    shown.mouse.up()
    total = written(weights[0][1, 0, 3:6].double().sum())
    assert text_of(shown, "sum-text") == f"{total} sum of 3 keys: the → str ##eet 街"
    assert shown.locator(".text span.selected").count() == 3
    shown.keyboard.press("Escape")
    assert shown.locator(".text span.selected").count() == 0
    before = shown.locator("#cells").bounding_box()
    shown.mouse.move(*cell(shown, 4, 5))
    shown.mouse.down()
    shown.mouse.move(*cell(shown, 2, 3), steps=3)
    shown.mouse.up()
    total = weights[0][1, 2:5, 3:6].double().sum(-1).mean()
    assert text_of(shown, "sum-text").startswith(f"{total:.4f} sum of 3 keys, mean over 3 queries: ")
    assert text_of(shown, "sum-text").endswith(" → str ##eet 街")
    assert shown.locator("#cells").bounding_box() == before, "the map moved under the pointer"


def test_words_are_put_together(shown: Any, weights: list[torch.Tensor]) -> None:
    shown.locator("#words").check()
    assert shown.locator(".text span").all_inner_texts() == [*NAMES[:3], "street", "街"]
    columns = weights[0][1].double() @ torch.nn.functional.one_hot(torch.tensor(WORDS)).double()
    merged = torch.stack(
        [columns[[query for query in range(SIZE) if WORDS[query] == word]].mean(0) for word in range(5)]
    )
    shown.mouse.move(*cell(shown, 3, 3, count=5))
    assert text_of(shown, "readout") == f"street → street {written(merged[3, 3])}"
    assert f"entropy {torch.special.entr(merged[3]).sum():.2f} nats" in text_of(shown, "details")
    shown.locator("#words").uncheck()
    assert token(shown, 4).inner_text() == "##eet"


def test_the_keyboard_reaches_all_and_walks_heads_cells_and_tokens(shown: Any, weights: list[torch.Tensor]) -> None:
    reached: list[str] = []
    name = "e => e.id || e.dataset.place || e.className"
    for _ in range(6):
        shown.keyboard.press("Tab")
        reached.append(shown.evaluate(f"({name})(document.activeElement)"))
    assert reached == ["words", "arcs", "theme", "text both", "from", "to"]
    shown.locator("#statistic").focus()
    for _ in range(3):
        shown.keyboard.press("Tab")
        reached.append(shown.evaluate(f"({name})(document.activeElement)"))
    assert reached[6:] == ["order", "0-1", "map"]
    shown.locator('[data-place="0-1"]').focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        shown.keyboard.press(key)
    assert text_of(shown, "head-title") == "Layer 1, head 2"
    shown.locator("#map").focus()
    for key in ["ArrowUp"] * SIZE + ["ArrowRight"] * 2:
        shown.keyboard.press(key)
    assert text_of(shown, "readout") == f"the → {NAMES[2]} {written(weights[1][2, 0, 2])}"
    shown.keyboard.press("Shift+ArrowDown")
    shown.keyboard.press("Shift+ArrowRight")
    assert written(weights[1][2, :2, 2:4].double().sum(-1).mean()) in text_of(shown, "sum-text")
    shown.locator(".text").focus()
    for key in ("ArrowRight", "ArrowRight", "Shift+ArrowRight"):
        shown.keyboard.press(key)
    assert shown.locator(".text .query").inner_text() == "str"


def test_tokens_are_text_and_the_overview_has_a_scale_and_statistics(shown: Any, weights: list[torch.Tensor]) -> None:
    ticks = [float(tick) for tick in shown.locator("#overview-scale .ticks span").all_inner_texts()]
    assert ticks == [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1]
    assert "square root" in text_of(shown, "overview-scale")
    assert shown.locator(".text span").all_inner_texts() == NAMES
    assert shown.locator("img").count() == 0
    assert shown.locator("script").count() == 3
    assert shown.title() == "</title><script>alert(3)</script>"
    shown.locator("#statistic").select_option("confidence")
    means = [[f"{head.amax(-1).mean():.2f}" for head in layer] for layer in weights]
    assert shown.locator("#overview button span").all_inner_texts() == [*means[0], *means[1]]
    assert f"confidence {means[0][1]}" in text_of(shown, "about")
    shown.locator("#statistic").select_option("entropy")
    assert "entropy in nats, one number per head" in text_of(shown, "overview-scale")


def test_colours_follow_the_scheme(shown: Any) -> None:
    lowest = """(() => {
        const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
        copy.drawImage(document.querySelector("#overview-scale .ramp"), 0, 0, 1, 1, 0, 0, 1, 1);
        return Math.max(...copy.getImageData(0, 0, 1, 1).data.slice(0, 3));
    })()"""
    shown.emulate_media(color_scheme="light")
    wait_until(shown, f"{lowest} > 250")
    shown.emulate_media(color_scheme="dark")
    wait_until(shown, f"{lowest} < 40")
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"


def test_a_phone_may_resize_the_page_while_it_loads(open_page: OpenPage) -> None:
    """Nothing is redrawn before the numbers are unpacked: `watched_page` would report the error."""
    words = [f"word{place}" for place in range(60)]
    made = given([torch.randn(8, 60, 60).softmax(-1) for _ in range(4)]).page(words)
    phone: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    for _ in range(5):
        opened = open_page(made, **phone)
        opened.wait_for_timeout(100)
        assert " looks most at " in text_of(opened, "finding")
