"""Comparisons and pictures in a real browser: views, linked tokens, patches under the pointer, and no request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clearhead.plot import given
from tests.support.models import vision_model

from .browsing import OpenPage, needs_chromium, text_of, token, wait_until
from .recorded import PICTURE, recorded

pytestmark = needs_chromium

HOSTILE = "</script><img src=x onerror=alert(1)>"
TEXTS = (["a", HOSTILE, "b", "c", "d", "e", "tired"], ["a", HOSTILE, "b", "c", "x", "d", "e", "wide"])
SHARED = ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 5, 6])


@pytest.fixture(scope="module", name="weights")
def _weights() -> list[torch.Tensor]:
    torch.manual_seed(8)
    return [torch.randn(2, len(text), len(text)).softmax(-1) for text in TEXTS]


@pytest.fixture(name="shown")
def _shown(open_page: OpenPage, weights: list[torch.Tensor]) -> Any:
    comparison = given(weights[:1]).compare(given(weights[1:]), tokens=TEXTS[0], other_tokens=TEXTS[1])
    return open_page(comparison.page(labels=(HOSTILE, "second")))


def view(shown: Any, number: int) -> Any:
    return shown.locator("#views button").nth(number)


def chosen_head(shown: Any) -> int:
    return int(text_of(shown, "head-title").rsplit(" ", 1)[1])


def test_the_difference_is_shown_first_in_its_colours(shown: Any, weights: list[torch.Tensor]) -> None:
    wait_until(shown, "document.querySelectorAll('#views button')[2]?.getAttribute('aria-pressed') === 'true'")
    assert shown.locator(".text span").count() == 6
    head = chosen_head(shown)
    first, second = (each[head][kept][:, kept] for each, kept in zip(weights, SHARED, strict=True))
    wait_until(shown, "document.getElementById('details').textContent.startsWith('first ')")
    assert text_of(shown, "reason") == "The colours show second − first: blue is less weight, brown is more."
    assert shown.locator("#views button span").all_inner_texts() == [f"first: {HOSTILE}", "second", "difference"]
    token(shown, 3).hover()
    change = (second - first)[3]
    at = int(change.abs().argmax())
    wait_until(shown, "document.querySelector('#details').textContent.includes('second ')")
    assert text_of(shown, "readout").startswith(f"c changes most at {TEXTS[0][at]}")
    number = f"{change[at].item():+.4f}".replace("-", "−")
    assert text_of(shown, "readout").endswith(number)
    assert f"first {first[3, at]:.4f} · second {second[3, at]:.4f}" in text_of(shown, "details")
    token(shown, 0).click()
    change = (second - first)[0]
    script = "mark => getComputedStyle(mark).backgroundColor.match(/\\d+/g).map(Number)"
    for place in (int(change.argmax()), int(change.argmin())):
        red, _, blue = token(shown, place).evaluate(script)[:3]
        assert (red > blue) == (change[place] > 0)


def test_views_keep_the_token(shown: Any, weights: list[torch.Tensor]) -> None:
    token(shown, 4).click()
    view(shown, 1).click()
    wait_until(shown, "document.querySelectorAll('.text span').length === 8")
    assert token(shown, 5).get_attribute("class") == "query", "d stands one place further on in the second text"
    best = weights[1][chosen_head(shown), 5].max()
    shown.mouse.move(1, 1)
    assert text_of(shown, "readout").endswith(f"{best:.4f}")
    token(shown, 4).click()  # x, which the first does not have
    view(shown, 0).click()
    wait_until(shown, "document.querySelectorAll('.text span').length === 7")
    assert view(shown, 0).get_attribute("aria-pressed") == "true"


def test_both_texts_are_aligned(shown: Any) -> None:
    shown.locator("#aligned").wait_for()
    columns = [each.locator("span").all_inner_texts() for each in shown.locator("#aligned > span").all()[1:]]
    both = [[name, name] for name in TEXTS[0][:-1]]
    assert columns == [*both[:4], ["", "x"], *both[4:], ["tired", "wide"]]
    assert shown.locator("#aligned .differs").all_inner_texts() == ["", "x", "tired", "wide"]
    view(shown, 1).click()
    wait_until(shown, "document.querySelectorAll('.text span').length === 8")
    for place in (".text .differs", "#rows .differs", "#columns .differs"):
        assert shown.locator(place).all_inner_texts() == ["x", "wide"]
    assert set(shown.locator("#list .differs").all_inner_texts()) == {"x", "wide"}


def test_the_ranking_chooses_a_head(shown: Any) -> None:
    ranked = shown.locator("#ranked-list button")
    assert ranked.count() == 2
    scores = [float(text.rsplit(" ", 1)[1]) for text in ranked.all_inner_texts()]
    assert scores == sorted(scores, reverse=True)
    before = chosen_head(shown)
    ranked.nth(1).click()
    assert chosen_head(shown) != before
    wait_until(shown, "document.querySelectorAll('#ranked-list button')[1].getAttribute('aria-pressed') === 'true'")


@pytest.fixture(name="picture")
def _picture(open_page: OpenPage) -> tuple[Any, Any]:
    rec = recorded(vision_model("vit"), PICTURE[None])
    return open_page(rec.page(image=PICTURE, layer=1, head=0, title="</title><script>alert(3)</script>")), rec


def patch_at(shown: Any, row: int, column: int) -> tuple[float, float]:
    box = shown.locator(".picture .over").bounding_box()
    return box["x"] + box["width"] * (column + 0.5) / 3, box["y"] + box["height"] * (row + 0.5) / 3


def test_a_large_picture_begins_with_the_class_token_and_has_its_patches_walked(picture: tuple[Any, Any]) -> None:
    shown, rec = picture
    assert text_of(shown, "readout").startswith("class → ")
    shown.mouse.move(*patch_at(shown, 2, 1))
    row = rec.weights(1, 0)[0, 8]
    assert text_of(shown, "readout").startswith("patch 2, 1 looks most at ")
    assert text_of(shown, "readout").endswith(f"{row.max():.4f}")
    script = "canvas => canvas.toDataURL()"
    before = shown.locator("#overview canvas").first.evaluate(script)
    shown.mouse.move(*patch_at(shown, 0, 2))
    assert shown.locator("#overview canvas").first.evaluate(script) != before, "thumbnails follow"
    shown.mouse.move(1, 1)
    assert text_of(shown, "readout").startswith("class → ")
    over, plain, cells = (
        shown.locator(each).bounding_box() for each in (".picture .over", ".picture .plain", "#cells")
    )
    assert over["width"] > 2 * plain["width"]
    assert over["width"] > cells["width"]
    assert over["y"] + over["height"] < cells["y"]
    assert text_of(shown, "facts").endswith("3 × 3 patches")
    assert "patches" in text_of(shown, "sum-text")
    shown.mouse.click(*patch_at(shown, 1, 1))
    shown.mouse.move(1, 1)
    assert text_of(shown, "readout").startswith("patch 1, 1 ")
    shown.locator(".picture .over").focus()
    shown.keyboard.press("ArrowDown")
    shown.keyboard.press("ArrowRight")
    assert text_of(shown, "readout").startswith("patch 2, 2 ")
    shown.locator(".text span").first.click()
    shown.mouse.move(1, 1)
    assert text_of(shown, "readout").startswith("class ")


def test_an_even_head_is_blank_and_another_is_not(picture: tuple[Any, Any], open_page: OpenPage) -> None:
    """The model of the fixture attends to everything about alike; the other one's scores are large."""
    colour = """(canvas) => {
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let most = 0;
        for (let at = 0; at < pixels.length; at += 4) {
            const planes = [...pixels.slice(at, at + 3)];
            most = Math.max(most, Math.max(...planes) - Math.min(...planes));
        }
        return most;
    }"""
    shown, rec = picture
    assert (rec.weights(1, 0) * 10 - 1).abs().max() < 0.1
    shown.mouse.click(*patch_at(shown, 0, 0))
    for canvas in ("#overview canvas", "#cells"):
        assert shown.locator(canvas).first.evaluate(colour) < 16
    assert "1× is the even weight, 1/10; colour follows the logarithm" in text_of(shown, "map-scale")
    lively = recorded(vision_model("vit", initializer_range=1.0), PICTURE[None])
    assert (lively.weights(1, 0) * 10).max() > 3
    other = open_page(lively.page(image=PICTURE, layer=1, head=0))
    assert other.locator("#cells").evaluate(colour) > 40


def test_an_even_head_is_said_to_look_at_all_patches_alike(open_page: OpenPage) -> None:
    """Its first weight is the even one, 1/10, which is no more than chance: neither a finding nor an answer."""
    model = vision_model("vit")
    for name, parameter in model.named_parameters():
        if "q_proj" in name or ".query." in name:
            torch.nn.init.zeros_(parameter)
    made = recorded(model, PICTURE[None]).page(image=PICTURE)
    even = "class looks at all patches about alike (at most 0.1000)"
    assert even in made.text.replace('<strong dir="auto">class</strong>', "class")
    shown = open_page(made)
    assert text_of(shown, "finding").endswith(even)
    assert "Blank patches get no more than the even weight, 0.1000." in text_of(shown, "map-scale")
    assert "patch 1, 2 is row 1, column 2, counted from 0" in shown.locator("#texts").inner_text()
    shown.locator("#to").focus()
    shown.locator("#to").select_option("3")
    assert shown.locator("#search-list li").count() == 0
    assert "no more than the even weight, 0.1000, are left out" in text_of(shown, "search-note")
    hint, picture, map_ = (shown.locator(name).bounding_box()["y"] for name in ("#sum-text", ".picture .over", "#map"))
    assert picture < hint < map_, "the hint about the map stands at the map"
