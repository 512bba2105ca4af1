"""Pages of every kind and size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.page_model import structured
from clearhead.plot import given

from .recorded import record_two
from .test_images import PICTURE, build, recorded

WORDS = ["The", "animal", "didn't", "cross", "the", "street", "because", "it", "was", "too", "tired"]


def text() -> Any:
    return given([torch.randn(3, 11, 11).softmax(-1) for _ in range(2)]).page(WORDS)


def from_right_to_left() -> Any:
    names = ["[CLS]", "السلام", "عليكم", "يا", "صديقي", "2024", "שלום", "😀", "街道", "العزيز", "[SEP]"]
    return given([torch.randn(3, 11, 11).softmax(-1) for _ in range(2)]).page(names)


def long() -> Any:
    return record_two(300).page([f"token{place}" for place in range(300)])


def compared() -> Any:
    first, second = (given([torch.randn(3, 11, 11).softmax(-1)]) for _ in range(2))
    return first.compare(second, tokens=WORDS, other_tokens=[*WORDS[:-1], "wide"]).page()


def image() -> Any:
    return recorded(build("vit"), PICTURE[None]).page(image=PICTURE)


def many(layers: int, heads: int, length: int) -> Callable[[], Any]:
    def make() -> Any:
        rec, tokens = structured(layers, heads, length)
        return rec.page(tokens)

    return make


PAGES: dict[str, Callable[[], Any]] = {
    "text": text,
    "right to left": from_right_to_left,
    "long": long,
    "comparison": compared,
    "image": image,
    "2 x 1": many(2, 1, 40),
    "24 x 32": many(24, 32, 130),
}
SLOW_PAGES: dict[str, Callable[[], Any]] = {
    "24 x 32, 2,000 tokens": many(24, 32, 2000),
    "80 x 64, 500 tokens": many(80, 64, 500),
    "3 x 128": many(3, 128, 130),
    "128 x 2": many(128, 2, 130),
}
