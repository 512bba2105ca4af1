"""Few query rows on the native kernel, which walks along keys and values instead of cutting them into tiles."""

from __future__ import annotations

import pytest
import torch

from clearhead import masks
from tests.support.native import needs_native, threads
from tests.support.native_cases import Case, close_to_exact

#: Beyond the length from which the backward pass takes the keys in parts, and no multiple of a part.
MANY = 4099

pytestmark = needs_native


def scattered(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5))


MANY_KEYS: dict[str, Case] = {
    "one query": Case(length=1, group=1, count=MANY),
    "heads that share keys": Case(length=3, group=5, kv_heads=3, batch=1, count=MANY),
    "causal": Case(length=7, count=MANY, mask=lambda *_: masks.causal("bottom_right")),
    "keys that nobody sees": Case(length=11, count=MANY, mask=lambda *_: masks.causal()),
    "window": Case(
        length=7, count=MANY, mask=lambda *_: masks.sliding_window(1031, 5), options={"query_positions": 3001}
    ),
    "lengths": Case(length=5, count=MANY, mask=lambda *_: masks.lengths(torch.tensor([MANY, 2053]))),
    "bool": Case(length=5, count=MANY, mask=lambda b, h, n, s: masks.keep(scattered(b, h, n, s) < 0.7)),
    "bias": Case(length=3, count=MANY, mask=lambda b, h, n, s: masks.bias(scattered(h, n, s))),
    "soft-cap and sinks": Case(length=3, count=MANY, options={"softcap": 2.0}, sinks=True),
}


@pytest.mark.parametrize("dim", [13, 80, 131])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 11, 12, 13])
def test_any_number_of_rows(length: int, dim: int, instructions: str) -> None:
    close_to_exact(Case(length=length, group=1, count=67, dim=dim, value_dim=dim), "native")


@pytest.mark.parametrize("name", MANY_KEYS)
def test_many_keys(name: str, instructions: str) -> None:
    close_to_exact(MANY_KEYS[name], "native")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_share_the_keys_of_one_head(count: int) -> None:
    with threads(count):
        close_to_exact(Case(length=3, batch=1, count=MANY), "native")
