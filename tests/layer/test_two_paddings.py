"""Queries and keys with paddings of their own, every kind beside every other: as the formulas say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead._layer import layer, unpadding
from clearhead.masks import Mask
from clearhead.positions import Rotary
from clearhead.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.derivatives import derivatives
from tests.support.exact import Exact, exact_attention
from tests.support.randomised import randomised

B, L, S, E, H, KV, D = 5, 7, 11, 20, 6, 3, 4


@pytest.fixture(autouse=True)
def unpadded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls whose padding was removed: all that can be, however little it saves."""
    found: list[Any] = []
    unpad = unpadding.unpad

    def noted(*args: Any, **options: Any) -> Any:
        tokens = unpad(*args, **options)
        found.extend([] if tokens is None else [tokens])
        return tokens

    monkeypatch.setattr(unpadding, "_WORTH_UNPADDING", -(1 << 40))
    monkeypatch.setattr(layer, "unpad", noted)
    return found


def counts(size: int, first: int) -> Tensor:
    """Of each item, how many tokens are real: all, some, one and none."""
    return torch.tensor([size, 3, 0, size - 2, 1]).roll(first)


def ending(size: int, first: int) -> Tensor:
    """(B, size): the last tokens are real."""
    return torch.arange(size) >= (size - counts(size, first))[:, None]


def inside(size: int, first: int) -> Tensor:
    """(B, size): a run of tokens is real, with padding on either side."""
    start = torch.tensor([0, 2, 1, 1, size - 1]).roll(first)[:, None]
    return (torch.arange(size) >= start) & (torch.arange(size) < start + counts(size, first)[:, None])


def scattered(size: int, first: int) -> Tensor:
    return torch.rand(B, size, generator=torch.Generator().manual_seed(first)) < 0.6


def beginning(size: int, first: int) -> Tensor:
    return torch.arange(size) < counts(size, first)[:, None]


#: Real keys: a mask, and what it shows, (B, size).
KEYS: dict[str, Callable[[int], tuple[Mask | None, Tensor]]] = {
    "none": lambda size: (None, torch.ones(B, size, dtype=torch.bool)),
    "right": lambda size: (masks.lengths(counts(size, 0)), beginning(size, 0)),
    "right, as marks": lambda size: (masks.keep(keys=beginning(size, 2)), beginning(size, 2)),
    "left": lambda size: (masks.keep(keys=ending(size, 0)), ending(size, 0)),
    "left, dropped": lambda size: (masks.drop(keys=~ending(size, 1)), ending(size, 1)),
    "runs": lambda size: (masks.keep(keys=inside(size, 1)), inside(size, 1)),
    "scattered": lambda size: (masks.keep(keys=scattered(size, 3)), scattered(size, 3)),
    "one mark of all": lambda size: (masks.keep(keys=ending(size, 0)[1:2]), ending(size, 0)[1:2].expand(B, -1)),
    "floats": lambda size: (
        masks.bias(torch.zeros(B, 1, 1, size).masked_fill(~ending(size, 3)[:, None, None], -torch.inf)),
        ending(size, 3),
    ),
    "both sides": lambda size: (
        masks.lengths(counts(size, 3)) & masks.keep(keys=ending(size, 0)),
        beginning(size, 3) & ending(size, 0),
    ),
    "left twice": lambda size: (
        masks.keep(keys=ending(size, 0)) & masks.drop(keys=~inside(size, 2)),
        ending(size, 0) & inside(size, 2),
    ),
}
#: Real queries. Keys are as long as they are in every item.
QUERIES: dict[str, Callable[[int, int], tuple[Mask | None, Tensor]]] = {
    "none": lambda length, size: (None, torch.ones(B, length, dtype=torch.bool)),
    "lengths": lambda length, size: (
        masks.lengths(torch.full((B,), size), counts(length, 0)),
        beginning(length, 0),
    ),
    "other lengths": lambda length, size: (
        masks.lengths(torch.full((B,), size), counts(length, 3)),
        beginning(length, 3),
    ),
    "two lengths": lambda length, size: (
        masks.lengths(torch.full((B,), size), counts(length, 1))
        & masks.lengths(torch.full((B,), size), counts(length, 4)),
        beginning(length, 1) & beginning(length, 4),
    ),
}
RULES: dict[str, tuple[Mask | None, Callable[[Tensor], Tensor]]] = {
    "none": (None, lambda gap: gap > -99),
    "causal": (masks.causal(), lambda gap: gap >= 0),
    "window": (masks.sliding_window(2, 1), lambda gap: (gap <= 2) & (gap >= -1)),
    "causal window": (masks.sliding_window(3, 2) & masks.causal(), lambda gap: (gap <= 3) & (gap >= 0)),
}


class Growing:
    """A position part whose scores do not follow from differences of positions, as those of rotations do."""

    def __call__(self, query: Tensor, key: Tensor, positions: Tensor | int) -> tuple[Tensor, Tensor]:
        at = torch.arange(query.shape[2]) + positions if isinstance(positions, int) else positions
        factor = (1 + at.double() / 7)[..., None]
        factor = factor[:, None] if factor.dim() == 3 else factor
        return query * factor, key * factor


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "rotary": lambda: {"position": Rotary(D)},
    "absolute positions": lambda: {"position": Growing()},
    "norms, scale": lambda: {"q_norm": nn.RMSNorm(D).double(), "k_norm": nn.LayerNorm(D).double(), "scale": 0.9},
    "softcap, sinks": lambda: {"softcap": 1.5, "sinks": True},
    "no bias": lambda: {"bias": False, "out_bias": True},
}


@dataclass(frozen=True)
class Padded:
    """A padded call.

    Args:
        query, key, value: its inputs.
        mask: its mask.
        visible: bool (B, 1, L, S), what the mask shows.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    visible: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [*{id(x): x for x in (self.query, self.key, self.value)}.values()]


def padded(keys: str, queries: str, rule: str, inputs: str) -> Padded:
    length = S if inputs == "self" else L
    (of_keys, real_keys), (of_queries, real_queries) = KEYS[keys](S), QUERIES[queries](length, S)
    gap = torch.arange(length)[:, None] - torch.arange(S)
    visible = real_keys[:, None, None, :] & real_queries[:, None, :, None] & RULES[rule][1](gap)
    mask: Mask | None = None
    for part in (of_keys, of_queries, RULES[rule][0]):
        mask = part if mask is None else mask if part is None else mask & part
    query = torch.randn(B, length, E, dtype=torch.float64, requires_grad=True)
    key = query if inputs == "self" else torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    value = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True) if inputs == "values apart" else key
    return Padded(query, key, value, mask, visible)


def solved(module: clearhead.MultiHeadAttention, call: Padded) -> tuple[Tensor, Exact]:
    """The output in float64 with all padding, and the results of attention inside."""
    q = clearhead.split_heads(module.q_proj(call.query), H)
    k, v = (clearhead.split_heads(p(x), KV) for p, x in ((module.k_proj, call.key), (module.v_proj, call.value)))
    q, k = (x if norm is None else norm(x) for x, norm in ((q, module.q_norm), (k, module.k_norm)))
    if module.position is not None:
        q, k = module.position(q, k, 0)
    inside = exact_attention(q, k, v, call.visible, scale=module.scale, softcap=module.softcap, sinks=module.sinks)
    return module.out_proj(clearhead.merge_heads(inside.output)), inside


def made(part: str) -> clearhead.MultiHeadAttention:
    module = clearhead.MultiHeadAttention(E, H, num_kv_heads=KV, head_dim=D, dtype=torch.float64, **PARTS[part]())
    return randomised(module, 0.4)


@in_turn(
    {"keys": KEYS, "queries": QUERIES, "rule": RULES}, {"part": PARTS, "inputs": ["self", "cross", "values apart"]}
)
def test_outputs_and_gradients(keys: str, queries: str, rule: str, part: str, inputs: str) -> None:
    module = made(part)
    call = padded(keys, queries, rule, inputs if module.position is None else "self")
    expected, _ = solved(module, call)
    output = module(call.query, call.key, call.value, mask=call.mask)
    leaves = [*call.leaves, *module.parameters()]
    require_near(derivatives(output, leaves, unused=True), derivatives(expected, leaves, unused=True))


@in_turn({"keys": KEYS, "queries": QUERIES}, {"rule": RULES, "inputs": ["self", "cross"]})
def test_a_record_and_weights(keys: str, queries: str, rule: str, inputs: str) -> None:
    module, call = made("softcap, sinks"), padded(keys, queries, rule, inputs)
    expected, inside = solved(module, call)
    names = ("rows", "received", "output", "max_logit")
    with clearhead.record(
        module, names, query_mask=torch.ones(call.query.shape[:2]).bool(), keep="queries_keys"
    ) as rec:
        require_near(module(call.query, call.key, call.value, mask=call.mask), expected)
    found = rec[""][0]
    require_near(found.rows, inside.weights)
    require_near(rec.weights(0), inside.weights)
    require_near(found.received, inside.weights.sum(2))
    require_near(found.output, inside.output)
    torch.testing.assert_close(found.max_logit, inside.scores.amax((-1, -2)), rtol=0, atol=1e-9)
    output, weights = module(call.query, call.key, call.value, mask=call.mask, need_weights=True)
    require_near([output, weights], [expected, inside.weights.mean(1)])


@in_turn({"keys": KEYS}, {"queries": QUERIES, "rule": RULES, "inputs": ["self", "cross"]})
def test_one_module_in_call_after_call(keys: str, queries: str, rule: str, inputs: str, unpadded: list[Any]) -> None:
    """Other padding, other sizes and other items than in the call before."""
    module, first = made("plain"), padded(keys, queries, rule, inputs)
    others = [padded(other, queries, rule, inputs) for other in ("left", "right", "none")]
    removed: list[bool] = []
    for call in (first, *others, first):
        unpadded.clear()
        require_near(module(call.query, call.key, call.value, mask=call.mask), solved(module, call)[0])
        removed.append(len(unpadded) == 1)
    # A window counts positions from the beginnings of the items, so padding there stays.
    assert removed[1:-1] == [rule != "window", True, queries != "none"]
    assert removed[0] == removed[-1]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kdim", [None, 13])
@pytest.mark.parametrize("keys", ["right", "left", "runs", "scattered"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_drop_in(batch_first: bool, kdim: int | None, keys: str, causal: bool) -> None:
    """As PyTorch's own module. A left-padded item has queries that see no key, whose output is the bias."""
    sizes: dict[str, Any] = {"batch_first": batch_first, "kdim": kdim, "dtype": torch.float64}
    ours = randomised(clearhead.nn.MultiheadAttention(E, 5, **sizes), 0.4)
    theirs = nn.MultiheadAttention(E, 5, **sizes)
    theirs.load_state_dict(ours.state_dict())
    query = torch.randn(B, S, E, dtype=torch.float64)
    key = query if kdim is None else torch.randn(B, S, kdim, dtype=torch.float64)
    real = KEYS[keys](S)[1]
    rule = torch.ones(S, S, dtype=torch.bool).triu(1) if causal else None
    value = query
    inputs = [x if batch_first else x.transpose(0, 1) for x in (query, key, value)]
    inputs[1:] = [inputs[0] if x is query else given for x, given in zip((key, value), inputs[1:], strict=True)]
    options: dict[str, Any] = {"key_padding_mask": ~real, "need_weights": False, "attn_mask": rule, "is_causal": causal}
    modules: tuple[Any, Any] = ours, theirs.train()
    found, expected = (each(*inputs, **options)[0] for each in modules)
    visible = real[:, None] & (torch.ones(S, S).tril().bool() if causal else True)
    sees = visible.expand(B, S, S).any(-1)
    found, expected = (x if batch_first else x.transpose(0, 1) for x in (found, expected))
    require_near(found.where(sees[..., None], 0), expected.where(sees[..., None], 0))
    assert torch.equal(found[~sees], theirs.out_proj.bias.expand_as(found[~sees]))


@in_turn({"of_memory": KEYS}, {"of_text": ["right", "left", "runs", "scattered"], "causal": [True, False]})
def test_a_decoder_reads_a_padded_memory(of_memory: str, of_text: str, causal: bool) -> None:
    """Text and memory are padded, on one side or the other: the stack is what its layers are with dense masks."""
    torch.manual_seed(3)
    layers = [
        DecoderLayer(E, clearhead.MultiHeadAttention(E, 5), clearhead.MultiHeadAttention(E, 5), FeedForward(E, 7))
        for _ in range(2)
    ]
    stack = randomised(Decoder(layers).double(), 0.3)
    x, memory = torch.randn(B, L, E, dtype=torch.float64), torch.randn(B, S, E, dtype=torch.float64)
    text, of_keys = KEYS[of_text](L), KEYS[of_memory](S)
    rule = masks.causal() if causal else masks.sliding_window(2, 2)
    gap = torch.arange(L)[:, None] - torch.arange(L)
    seen = text[1][:, None, None] & (gap >= 0 if causal else gap.abs() <= 2)
    assert text[0] is not None
    found = stack(x, memory, mask=rule & text[0], memory_mask=of_keys[0])
    dense = masks.keep(seen), masks.keep(of_keys[1][:, None, None].expand(B, 1, L, S))
    require_near(found, stack(x, memory, mask=dense[0], memory_mask=dense[1]))


@in_turn({"keys": KEYS}, {"queries": QUERIES})
def test_an_encoder(keys: str, queries: str) -> None:
    layers = [EncoderLayer(E, made(part), FeedForward(E, 7)) for part in ("rotary", "plain", "softcap, sinks")]
    stack, call = randomised(Encoder(layers).double(), 0.3), padded(keys, queries, "causal", "self")
    dense = masks.keep(call.visible.expand(B, 1, S, S))
    require_near(stack(call.query, mask=call.mask), stack(call.query, mask=dense))


@in_turn({"keys": KEYS}, {"queries": QUERIES, "rule": RULES, "train": [True, False]})
def test_autocast(keys: str, queries: str, rule: str, train: bool) -> None:
    """bfloat16 inside, float32 outside, with gradients: as exact as bfloat16 is."""
    module, call = made("no bias").float().train(train), padded(keys, queries, rule, "self")
    exact = made("no bias")
    exact.load_state_dict(module.double().state_dict())
    module.float()
    expected, _ = solved(exact, call)
    x = call.query.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x, mask=call.mask)
    assert output.dtype == torch.bfloat16
    found = [output, *torch.autograd.grad(output.float().square().sum(), [x, *module.parameters()])]
    wanted = derivatives(expected, [call.query, *exact.parameters()], unused=True)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.isfinite().all()
        assert (ours.double() - theirs).norm() < 0.04 * theirs.norm() + 1e-3


@pytest.mark.parametrize("side", ["right", "left", "runs"])
def test_a_record_under_autocast_is_of_the_padded_batch(side: str, unpadded: list[Any]) -> None:
    module, call = made("no bias").float().eval(), padded(side, "lengths", "none", "self")
    x = call.query.detach().float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), clearhead.record(module) as rec:
        module(x, mask=call.mask)
    assert unpadded
    (found,) = rec[""].statistics
    assert found.entropy.shape == (B, module.num_heads, x.shape[1])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), clearhead.record(module) as dense:
        module(x, mask=masks.keep(call.visible.expand(B, 1, x.shape[1], -1)))
    torch.testing.assert_close(found.entropy, dense[""].statistics[0].entropy, rtol=0, atol=0.02)


@pytest.mark.parametrize("side", ["right", "left", "runs"])
def test_nan_in_either_padding(side: str) -> None:
    module, call = made("plain"), padded(side, "lengths", "none", "cross")
    real = QUERIES["lengths"](L, S)[1], KEYS[side](S)[1]
    pairs = zip((call.query, call.key), real, strict=True)
    inputs = [x.detach().masked_fill(~each[..., None], torch.nan).requires_grad_() for x, each in pairs]
    output, expected = module(*inputs, mask=call.mask), solved(module, call)[0]
    require_near(derivatives(output, inputs, unused=True), derivatives(expected, [call.query, call.key], unused=True))


def test_both_paddings_of_jagged_inputs() -> None:
    module = made("plain")
    queries, keys = [7, 0, 3, 5], [2, 5, 0, 11]
    rows = [[torch.randn(n, E, dtype=torch.float64) for n in sizes] for sizes in (queries, keys)]
    query, key = (torch.nested.nested_tensor(each, layout=torch.jagged) for each in rows)
    x, memory = (nn.utils.rnn.pad_sequence(each, batch_first=True) for each in rows)
    mask = masks.lengths(torch.tensor(keys), torch.tensor(queries))
    found, padded_result = module(query, key), module(x, memory, mask=mask)
    for n, item in enumerate(found.unbind()):
        if queries[n] == 0:
            continue
        require_near(item, padded_result[n, : queries[n]])
        alone = module(
            rows[0][n][None], F.pad(rows[1][n], (0, 0, 0, 1))[None], mask=masks.lengths(torch.tensor(keys[n : n + 1]))
        )
        require_near(item, alone[0])
