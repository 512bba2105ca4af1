"""Arcs from a word to what it looks at: where they begin and end, how thick they are, and when they are drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clearhead.plot import Tokens, given, page

from .browsing import OpenPage, crowded, needs_chromium, token
from .recorded import record_pair

pytestmark = needs_chromium

WORDS = "the animal did not cross the street because it was too tired to go"
NAMES = ["[CLS]", *WORDS.split(" "), "[SEP]"]
SIZE = len(NAMES)
FROM_RIGHT = ["[CLS]", *(("שלום", "עולם", "יפה")[place % 3] for place in range(SIZE - 2)), "[SEP]"]

#: Of every arc its first and last point on the screen, its width, and how many lines it consists of.
ARCS = """[...document.querySelectorAll("#arcs-picture path")].map((path) => {
    const matrix = path.getScreenCTM();
    const ends = [0, path.getTotalLength()].map((at) => path.getPointAtLength(at).matrixTransform(matrix));
    const lines = path.getAttribute("d").split("M").length - 1;
    return { ends: ends.map(({ x, y }) => [x, y]), width: Number(path.getAttribute("stroke-width")), lines };
})"""

INSIDE = """(() => {
    const box = document.querySelector(".text").getBoundingClientRect();
    return [...document.querySelectorAll("#arcs-picture path")].every((path) => {
        const { left, right, top } = path.getBoundingClientRect();
        return left >= box.left - 1 && right <= box.right + 1 && top >= box.top;
    });
})()"""

#: Tokens that an arc runs over.
OVER_TOKENS = """[...document.querySelectorAll("#arcs-picture path")].flatMap((path) => {
    const matrix = path.getScreenCTM();
    const points = Array.from({ length: 99 }, (_, at) => path.getPointAtLength((path.getTotalLength() * at) / 98));
    return points.map((point) => point.matrixTransform(matrix)).flatMap(({ x, y }) =>
        [...document.querySelectorAll(".text span")].filter((token) => {
            const { left, right, top, bottom } = token.getBoundingClientRect();
            return x > left && x < right && y > top + 1 && y < bottom - 1;
        }).map((token) => token.textContent));
})"""


@pytest.fixture(name="weights")
def _weights() -> torch.Tensor:
    torch.manual_seed(4)
    return (2 * torch.randn(1, 2, SIZE, SIZE)).softmax(-1)


@pytest.fixture(name="shown", params=[NAMES], ids=["left to right"])
def _shown(request: pytest.FixtureRequest, open_page: OpenPage, weights: torch.Tensor) -> Any:
    return open_page(page(given(list(weights)), Tokens(request.param), layer=0, head=1))


def test_arcs_lead_to_the_largest_weights(shown: Any, weights: torch.Tensor) -> None:
    assert shown.evaluate(ARCS) == []
    shown.locator("#arcs").focus()
    shown.keyboard.press("Space")
    token(shown, 3).click()
    assert shown.evaluate(OVER_TOKENS) == []
    row = weights[0, 1, 3].sort(descending=True)
    arcs = shown.evaluate(ARCS)
    assert [arc["width"] for arc in arcs] == pytest.approx((1 + 5 * row.values[:8]).tolist(), abs=1e-3)
    for arc, key in zip(arcs, row.indices, strict=False):
        for place, end in zip((3, int(key)), arc["ends"], strict=True):
            box = token(shown, place).bounding_box()
            assert abs(end[0] - box["x"] - box["width"] / 2) < 6
            assert abs(end[1] - box["y"]) < 1
    shown.locator(".text").focus()
    shown.keyboard.press("ArrowRight")
    moved = shown.evaluate(ARCS)
    assert len(moved) == 8
    assert moved != arcs, "arcs follow the keyboard"
    shown.locator("#arcs").uncheck()
    assert shown.evaluate(ARCS) == []


@pytest.mark.parametrize("shown", [NAMES, FROM_RIGHT], ids=["left to right", "right to left"], indirect=True)
def test_arcs_fit_phones_screens_and_paper(shown: Any) -> None:
    shown.set_viewport_size({"width": 390, "height": 900})
    shown.locator("#arcs").check()
    token(shown, 4).click()
    lines = [arc["lines"] for arc in shown.evaluate(ARCS)]
    assert {1, 2} == set(lines)
    assert shown.evaluate(INSIDE)
    assert shown.evaluate(OVER_TOKENS) == []
    assert crowded(shown) == []
    shown.set_viewport_size({"width": 1400, "height": 900})
    shown.wait_for_timeout(200)
    assert {arc["lines"] for arc in shown.evaluate(ARCS)} == {1}
    heights = "(() => { const box = document.querySelector('.text'); return box.scrollHeight - box.clientHeight; })()"
    assert shown.evaluate(heights) == 0, "nothing to scroll"
    shown.emulate_media(media="print")
    shown.wait_for_timeout(200)
    assert shown.locator("#arcs-picture").is_visible()
    assert len(shown.evaluate(ARCS)) == 8
    assert crowded(shown) == []


def test_arcs_lead_from_one_text_to_the_other(open_page: OpenPage) -> None:
    made = page(record_pair(), list("abcde"), key_tokens=list("stuvwxy"), layer="decoder.layers.0.multihead_attn")
    shown = open_page(made)
    shown.locator("#arcs").check()
    shown.locator(".text.queries span").nth(1).click()
    above, below = (shown.locator(f".text.{side} span").nth(1).bounding_box() for side in ("queries", "keys"))
    arcs = shown.evaluate(ARCS)
    assert len(arcs) == 7
    for arc in arcs:
        assert [end[1] for end in arc["ends"]] == pytest.approx([above["y"] + above["height"], below["y"]], abs=1)
