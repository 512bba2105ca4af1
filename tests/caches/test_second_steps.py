"""Caches step after step, of other sizes than the step before: as a list of keys per head that is kept by hand.

Heads of one cache hold different keys once some are evicted, and query heads of a group read one of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import caches, masks
from clearhead.caches import CrossKVCache, EvictingKVCache, HeavyHitters, KVCache, SinksAndRecent, SlidingKVCache
from clearhead.positions import Rotary
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.exact import exact_attention
from tests.support.randomised import randomised

B, E, H, KV, D = 2, 14, 6, 3, 5
STEPS = {"one by one": (3, *(1,) * 8), "chunks": (4, 2, 1, 1, 3), "long last": (1, 2, 1, 7), "at once": (11,)}
RULES = {
    "causal": (masks.causal(), lambda gap: gap >= 0),
    "window": (masks.causal() & masks.sliding_window(3, 0), lambda gap: (gap >= 0) & (gap <= 3)),
    "none": (None, lambda gap: gap > -99),
}
POLICIES: dict[str, Any] = {
    "heavy": lambda: HeavyHitters(0.25),
    "heavy, the latest": lambda: HeavyHitters(0.75),
    "sinks": lambda: SinksAndRecent(2),
}


def attention(**options: Any) -> clearhead.MultiHeadAttention:
    made = clearhead.MultiHeadAttention(E, H, num_kv_heads=KV, head_dim=D, dtype=torch.float64, **options)
    return randomised(made, 0.7).requires_grad_(False)


class Held:
    """Positions, keys, values and received weights of one item and key/value head, in float64."""

    def __init__(self) -> None:
        self.positions = torch.zeros(0, dtype=torch.long)
        self.key = self.value = torch.zeros(0, D, dtype=torch.float64)
        self.received = torch.zeros(0, dtype=torch.float64)

    def add(self, positions: Tensor, key: Tensor, value: Tensor) -> None:
        self.positions = torch.cat((self.positions, positions))
        self.key, self.value = torch.cat((self.key, key)), torch.cat((self.value, value))
        self.received = torch.cat((self.received, torch.zeros(len(key), dtype=torch.float64)))

    def keep(self, policy: str, budget: int) -> None:
        if len(self.positions) <= budget:
            return
        latest = self.positions.argsort(descending=True).argsort()
        share = {"heavy": 0.25, "heavy, the latest": 0.75}.get(policy)
        if share is None:
            rank = self.positions.double().masked_fill(self.positions < 2, torch.inf)
        else:
            rank = self.received.masked_fill(latest < int(share * budget), torch.inf)
        kept = rank.masked_fill(latest == 0, torch.inf).topk(budget).indices.sort().values
        self.positions, self.key = self.positions[kept], self.key[kept]
        self.value, self.received = self.value[kept], self.received[kept]


@in_turn({"steps": STEPS, "policy": POLICIES}, {"rule": RULES, "budget": [3, 4]})
def test_evictions_by_hand(steps: str, policy: str, rule: str, budget: int) -> None:
    made, x = attention(scale=0.6, sinks=True), torch.randn(B, 11, E, dtype=torch.float64)
    cache = EvictingKVCache(B, KV, budget, D, policy=POLICIES[policy](), dtype=torch.float64)
    held, start = [[Held() for _ in range(KV)] for _ in range(B)], 0
    for count in STEPS[steps]:
        part, at = x[:, start : start + count], torch.arange(start, start + count)
        found = made(part, mask=RULES[rule][0], cache=cache)
        q = clearhead.split_heads(made.q_proj(part), H)
        k, v = (clearhead.split_heads(p(part), KV) for p in (made.k_proj, made.v_proj))
        inside = torch.zeros_like(q)
        for item in range(B):
            for head, own in enumerate(held[item]):
                own.add(at, k[item, head], v[item, head])
                heads = slice(head * (H // KV), (head + 1) * (H // KV))
                assert made.sinks is not None
                each = exact_attention(
                    q[item : item + 1, heads], own.key[None, None], own.value[None, None],
                    RULES[rule][1](at[:, None] - own.positions)[None, None], scale=0.6, sinks=made.sinks[heads],
                )  # fmt: skip
                inside[item, heads] = each.output[0]
                own.received = own.received + each.weights.sum((0, 1, 2))
                own.keep(policy, budget)
        require_near(found, made.out_proj(clearhead.merge_heads(inside)))
        for item in range(B):
            for head, own in enumerate(held[item]):
                slots = cache.positions[item, head].sort()
                assert slots.values.tolist() == own.positions.tolist()
        start += count


KINDS: dict[str, Any] = {
    "all": lambda: KVCache(B, KV, 40, D, dtype=torch.float64),
    "sliding": lambda: SlidingKVCache(B, KV, 5, D, max_crop=4, dtype=torch.float64),
    "evicting": lambda: EvictingKVCache(B, KV, 40, D, dtype=torch.float64),
}
#: What is done to a cache between steps: crops to a length, or lengths, and orders of items.
HISTORIES: dict[str, list[Any]] = {
    "crop": [7, -3, 5, -2, 1],
    "crop to nothing": [4, "reset", 9, -1, 3],
    "crop after a long text": [13, -4, 2, -3, 6],
    "items apart": [6, torch.tensor([4, 6]), 3, 2, torch.tensor([7, 9]), 1],
    "reordered": [5, [1, 0], 2, torch.tensor([6, 4]), [1, 1], 3],
    "positions": [("at", 3, 4), ("at", 9, 2), -2, ("at", 20, 3), 1],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("history", HISTORIES)
def test_histories_by_hand(kind: str, history: str) -> None:
    """Each item attends to the tokens that it still has, at their positions."""
    made, cache = attention(), KINDS[kind]()
    tokens: list[list[tuple[Tensor, int]]] = [[], []]
    window = 4 if kind == "sliding" else 99
    for step in HISTORIES[history]:
        if step == "reset":
            cache.reset()
            tokens = [[], []]
        elif isinstance(step, list):
            cache.reorder(torch.tensor(step))
            tokens = [list(tokens[item]) for item in step]
        elif isinstance(step, Tensor) or (isinstance(step, int) and step < 0):
            kept = step.tolist() if isinstance(step, Tensor) else [cache.length + step] * B
            cache.crop(step if isinstance(step, Tensor) else kept[0])
            tokens = [each[:n] for each, n in zip(tokens, kept, strict=True)]
        else:
            count = step if isinstance(step, int) else step[2]
            x = torch.randn(B, count, E, dtype=torch.float64)
            firsts = [each[-1][1] + 1 if each else 0 for each in tokens] if isinstance(step, int) else [step[1]] * B
            positions = None if isinstance(step, int) else step[1]
            found = made(x, mask=masks.causal(), cache=cache, positions=positions)
            for item, each in enumerate(tokens):
                each += [(x[item, n], firsts[item] + n) for n in range(count)]
                at = torch.tensor([place for _, place in each])
                all_tokens = torch.stack([token for token, _ in each])[None]
                gap = at[-count:, None] - at
                q = clearhead.split_heads(made.q_proj(x[item : item + 1]), H)
                k, v = (clearhead.split_heads(p(all_tokens), KV) for p in (made.k_proj, made.v_proj))
                inside = exact_attention(q, k, v, ((gap >= 0) & (gap <= window))[None, None])
                require_near(found[item], made.out_proj(clearhead.merge_heads(inside.output))[0])
        if kind != "all":
            require_keys_at_positions(cache, made, tokens)
    expected = [each[-1][1] + 1 for each in tokens]
    following = cache.next_positions(1)
    assert (following.flatten().tolist() if isinstance(following, Tensor) else [following] * B) == expected


def require_keys_at_positions(
    cache: Any, made: clearhead.MultiHeadAttention, tokens: list[list[tuple[Tensor, int]]]
) -> None:
    """Each slot holds the key of the token at its position; tokens that were overwritten or cropped have none."""
    for item, each in enumerate(tokens):
        places = cache.positions[item]  # (S,), or (Hkv, S)
        for head, own in enumerate(places.expand(KV, -1) if places.dim() == 1 else places):
            for slot in (own >= 0).nonzero()[:, 0].tolist():
                token = next(x for x, place in each if place == int(own[slot]))
                key = clearhead.split_heads(made.k_proj(token)[None, None], KV)[0, head, 0]
                require_near(cache.key[item, head, slot], key)


@pytest.mark.parametrize("order", [[1, 0], [1, 1], [0, 1, 1], [1]], ids=str)
def test_a_memory_in_another_order(order: list[int]) -> None:
    made, cache = attention(), CrossKVCache()
    x, memory = torch.randn(B, 3, E, dtype=torch.float64), torch.randn(B, 7, E, dtype=torch.float64)
    require_near(made(x, memory, cache=cache), made(x, memory))
    cache.reorder(torch.tensor(order))
    more = torch.randn(len(order), 2, E, dtype=torch.float64)
    require_near(made(more, cache=cache), made(more, memory[order]))
    keys = torch.arange(7) < torch.tensor([[3], [6]])
    require_near(
        made(more, mask=masks.keep(keys=keys[order]), cache=cache),
        made(more, memory[order], mask=masks.keep(keys=keys[order])),
    )
    cache.reset()
    other = torch.randn(len(order), 4, E, dtype=torch.float64)
    require_near(made(more, other, cache=cache), made(more, other))
    assert isinstance(cache, caches.Cache)


def test_blocks_go_on_where_a_cache_stopped() -> None:
    made, x = attention(), torch.randn(B, 11, E, dtype=torch.float64)
    mask, cache = masks.block_causal(4), KVCache(B, KV, 11, D, dtype=torch.float64)
    found = [made(part, mask=mask, cache=cache) for part in x.split([4, 4, 3], 1)]
    require_near(torch.cat(found, 1), made(x, mask=mask))


def test_a_tree_of_drafts_is_verified_and_cropped() -> None:
    """Each node as the last token of its own path, and the accepted path after it."""
    made, known = attention(position=Rotary(D, fraction=0.8)), 3
    x, nodes = torch.randn(B, known, E, dtype=torch.float64), torch.randn(B, 4, E, dtype=torch.float64)
    parents = [-1, 0, 0, 1]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3]]
    depths = torch.tensor([len(path) - 1 for path in paths])
    cache = KVCache(B, KV, 20, D, dtype=torch.float64)
    made(x, mask=masks.causal(), cache=cache)
    found = made(nodes, mask=masks.tree(torch.tensor(parents)), positions=known + depths, cache=cache)
    for node, path in enumerate(paths):
        alone = made(torch.cat((x, nodes[:, path]), 1), mask=masks.causal())
        require_near(found[:, node], alone[:, -1])
    cache.crop(known + 1)  # the root was accepted
    more = torch.randn(B, 2, E, dtype=torch.float64)
    expected = made(torch.cat((x, nodes[:, :1], more), 1), mask=masks.causal())
    require_near(made(more, mask=masks.causal(), cache=cache), expected[:, -2:])
