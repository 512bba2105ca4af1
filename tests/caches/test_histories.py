"""Generated histories of a batch: each row continues as if it was alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clearhead import MultiHeadAttention, MultiHeadLatentAttention, masks
from clearhead.caches import EvictingKVCache, SinksAndRecent
from clearhead.errors import CacheError
from clearhead.positions import ALiBi, Rotary
from tests.support.closeness import require_near

from .decoding import ALL_CACHES, DIM, EMBED, HEADS, KV_HEADS, MAX_CROP, make_cache, module, rule

Attend = MultiHeadAttention | MultiHeadLatentAttention
CAUSAL = masks.causal()


def grouped(mask: masks.Mask | None) -> MultiHeadAttention:
    attend = module(mask=mask, softcap=3.0, sinks=True)
    nn.init.normal_(attend.sinks)  # type: ignore[arg-type]
    return attend


def latent() -> MultiHeadLatentAttention:
    torch.manual_seed(5)
    # Up to 5 rows are absorbed, more are expanded.
    sizes = {"kv_lora_rank": 13, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 5}
    return MultiHeadLatentAttention(EMBED, HEADS, **sizes, position=Rotary(4), dtype=torch.float64).eval()


MODULES: dict[str, Callable[[], Attend]] = {
    "grouped": lambda: grouped(None),
    "window": lambda: grouped(masks.sliding_window(3, 0)),
    "alibi": lambda: grouped(ALiBi(HEADS)),
    "latent": latent,
}
#: Five numbers, which each step reads as it needs them.
NUMBERS = st.tuples(*[st.integers(0, 7)] * 5)
STEPS = st.lists(
    st.tuples(st.sampled_from(["feed", "feed", "pad", "reorder", "crop", "crop rows", "reset"]), NUMBERS), max_size=7
)


class Rows:
    """A batch being decoded with a cache, and what each row was given: tokens (E,), ``None`` for padding."""

    def __init__(self, attend: Attend, kind: str) -> None:
        self.attend, self.random = attend, torch.Generator().manual_seed(2)
        self.rule = rule(kind)
        if isinstance(attend, MultiHeadLatentAttention):
            self.cache = make_cache(kind, 3, 1, attend.cache_head_dim, value_head_dim=0)
        else:
            self.cache = make_cache(kind, 3)
        self.rows: list[list[Tensor | None]] = [[], [], []]

    def do(self, step: str, n: tuple[int, ...]) -> None:
        if step in ("feed", "pad"):
            self.feed(1 + n[0], [n[1 + row % 4] if step == "pad" else 8 for row in range(len(self.rows))], n[4] % 3)
        elif step == "reorder":
            rows = [number % len(self.rows) for number in n[: 1 + n[4] % 4]]
            self.cache.reorder(torch.tensor(rows))
            self.rows = [list(self.rows[row]) for row in rows]
        elif step == "reset":
            self.cache.reset()
            self.rows = [[] for _ in self.rows]
        elif step == "crop":
            kept = max(self.cache.length - n[0] % (MAX_CROP + 2), 0)
            self.crop(kept, [kept] * len(self.rows))
        else:
            kept = [max(len(row) - n[b % 4] % (MAX_CROP + 2), 0) for b, row in enumerate(self.rows)]
            self.crop(torch.tensor(kept), kept)

    def feed(self, count: int, real: list[int], side: int) -> None:
        """`count` tokens, in row b `real[b]` at most, padding left, right or on both sides, and NaN in it."""
        x = torch.randn(len(self.rows), count, EMBED, generator=self.random, dtype=torch.float64)
        positions = torch.full(x.shape[:2], -1)
        for row, tokens in enumerate(self.rows):
            new = min(real[row], count)
            start = (count - new, 0, (count - new) // 2)[side]
            place = slice(start, start + new)
            first = sum(token is not None for token in tokens)
            positions[row, place] = torch.arange(first, first + new)
            tokens.extend(x[row, n] if positions[row, n] >= 0 else None for n in range(count))
        x[positions < 0] = torch.nan
        with torch.no_grad():
            told = None if bool((positions >= 0).all()) else positions
            output = self.attend(x, mask=CAUSAL, positions=told, cache=self.cache)
        self.judge(output, positions >= 0)

    def judge(self, output: Tensor, real: Tensor) -> None:
        for row, tokens in enumerate(self.rows):
            if real[row].any():
                alone = torch.stack([token for token in tokens if token is not None])[None]
                with torch.no_grad():
                    expected = self.attend(alone, mask=self.rule)[0, -int(real[row].sum()) :]
                require_near(output[row][real[row]], expected, 1e-13)

    def crop(self, length: int | Tensor, kept: list[int]) -> None:
        self.cache.crop(length)
        self.rows = [row[:n] for row, n in zip(self.rows, kept, strict=True)]

    def judge_positions(self) -> None:
        expected = [[sum(token is not None for token in row)] for row in self.rows]
        found: Any = self.cache.next_positions(1)
        assert (expected == [[found]] * len(self.rows)) if isinstance(found, int) else (found.tolist() == expected)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", ALL_CACHES)
@settings(max_examples=settings.default.max_examples // 3)  # type: ignore[union-attr]
@given(steps=STEPS)
@example([(step, (7, 0, 0, 0, 0)) for step in ("feed", "feed", "crop", "feed", "reset", "feed")])
def test_rows_go_on_as_if_alone(kind: str, name: str, steps: list[tuple[str, tuple[int, ...]]]) -> None:
    rows = Rows(MODULES[name](), kind)
    for step, numbers in steps:
        try:
            rows.do(step, numbers)
        except CacheError:
            assert "sliding" in kind, "only a ring can have forgotten"
        rows.judge_positions()


@pytest.mark.parametrize("budget", [2, 5])
def test_rows_know_where_they_are_after_evictions(budget: int) -> None:
    """The tokens before those that are cropped away may have been evicted long before."""
    cache = EvictingKVCache(3, KV_HEADS, budget, DIM, policy=SinksAndRecent(1))
    x = torch.randn(3, KV_HEADS, 13, DIM)
    cache.update(x, x, (torch.arange(13) - torch.tensor([[0], [2], [5]])).clamp(min=-1))
    cache.update(x[:, :, :1], x[:, :, :1])
    cache.crop(torch.tensor([9, 7, 14]))
    assert cache.next_positions(1).tolist() == [[9], [5], [9]]  # type: ignore[union-attr]
    cache.update(x[:, :, :4], x[:, :, :4])
    cache.crop(torch.tensor([10, 11, 15]))
    assert cache.next_positions(2).tolist() == [[10, 11], [9, 10], [10, 11]]  # type: ignore[union-attr]
