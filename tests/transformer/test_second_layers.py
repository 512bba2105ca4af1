"""Stacks whose layers differ: the output of the layers one by one, each with masks of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.masks import Mask
from clearhead.positions import ALiBi, Rotary
from clearhead.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward
from tests.masks.test_second_use import B, L, S, marks, numbers, relative_bias
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.randomised import randomised

E = 24


def attention(**options: Any) -> clearhead.MultiHeadAttention:
    sizes: dict[str, Any] = {"num_heads": 6} | options
    return clearhead.MultiHeadAttention(E, **sizes, dtype=torch.float64)


LAYERS: dict[str, Sequence[dict[str, Any]]] = {
    "windows": [{"mask": masks.sliding_window(n, n % 2)} for n in (1, 4, 1, 2)],
    "heads": [{"num_heads": n, "head_dim": 5} for n in (6, 2, 3, 6)],
    "key/value heads": [{"num_kv_heads": n} for n in (6, 2, 1, 3)],
    "scores": [{"scale": 0.7}, {"softcap": 2.0}, {"sinks": True}, {}],
    "rotary": [{"position": Rotary(4)}, {}, {"position": Rotary(4, base=50.0)}, {}],
    "own marks": [{"mask": masks.keep(keys=marks(B, L, seed=n))} for n in (1, 2, 3, 1)],
    "own bias": [{"mask": ALiBi(6)}, {"mask": masks.bias(numbers(1, 6, L, L))}, {}, {"mask": relative_bias()}],
}
STACK_MASKS: dict[str, Callable[[], Mask]] = {
    "causal": masks.causal,
    "lengths": lambda: masks.causal() & masks.lengths(torch.tensor([L, 4]), torch.tensor([L, 4])),
    "left padding": lambda: masks.causal() & masks.keep(keys=torch.arange(L) >= torch.tensor([[0], [5]])),
    "rows": lambda: masks.keep(marks(L, L)) | masks.sliding_window(0, 0),
    "computed": lambda: masks.mask_mod(lambda b, h, q, k: (q + k + b) % 3 > 0),
    "bias": lambda: masks.bias(numbers(B, 1, L, L)),
}


@in_turn({"layers": LAYERS, "name": STACK_MASKS}, {"positions": [None, 3, torch.arange(L) * 2]})
def test_an_encoder_of_different_layers(layers: str, name: str, positions: Any) -> None:
    if positions is not None and name == "lengths":
        positions = None  # they are counted in positions
    stack = Encoder([EncoderLayer(E, attention(**each), FeedForward(E, 7)) for each in LAYERS[layers]]).double()
    stack, x = randomised(stack, 0.4), numbers(B, L, E)
    once = x
    for layer in stack.layers:
        once = layer(once, mask=STACK_MASKS[name](), positions=positions)
    expected = once if stack.norm is None else stack.norm(once)
    for _ in range(2):
        require_near(stack(x, mask=STACK_MASKS[name](), positions=positions), expected)


MEMORY_MASKS: dict[str, Callable[[], Mask | None]] = {
    "none": lambda: None,
    "keys": lambda: masks.keep(keys=marks(B, S)),
    "left": lambda: masks.keep(keys=torch.arange(S) >= torch.tensor([[7], [0]])),
    "lengths": lambda: masks.lengths(torch.tensor([3, S])),
    "rows": lambda: masks.keep(marks(L, S)),
}


@in_turn({"of_memory": MEMORY_MASKS, "name": STACK_MASKS}, {"layers": LAYERS})
def test_a_decoder_of_different_layers(of_memory: str, name: str, layers: str) -> None:
    """The mask of the memory has other sizes than that of the text, in the same layers."""
    of_text, memory = [attention(**each) for each in LAYERS[layers]], numbers(B, S, E, seed=2)
    # Rotary positions and masks of a layer's own are for its text.
    options = [{n: x for n, x in each.items() if n not in ("mask", "position")} for each in LAYERS[layers]]
    made = [
        DecoderLayer(E, own, attention(**each), FeedForward(E, 7))
        for own, each in zip(of_text, reversed(options), strict=True)
    ]
    stack, x = randomised(Decoder(made).double(), 0.4), numbers(B, L, E)
    once = x
    for layer in stack.layers:
        once = layer(once, memory, mask=STACK_MASKS[name](), memory_mask=MEMORY_MASKS[of_memory]())
    expected = once if stack.norm is None else stack.norm(once)
    for _ in range(2):
        require_near(stack(x, memory, mask=STACK_MASKS[name](), memory_mask=MEMORY_MASKS[of_memory]()), expected)


class Halving(nn.Module):
    """A layer of the user's own that attends from every other token, and so has other sizes than its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = attention()

    def forward(self, x: Tensor, *, mask: Mask | None = None, positions: Any = None, cache: Any = None) -> Tensor:
        at = torch.arange(x.shape[1])[::2] + (positions or 0)
        key, value = (clearhead.split_heads(p(x), 6) for p in (self.self_attention.k_proj, self.self_attention.v_proj))
        query = clearhead.split_heads(self.self_attention.q_proj(x[:, ::2]), 6)
        found = clearhead.attention(query, key, value, mask, query_positions=at, key_positions=positions or 0)
        return x.index_add(1, torch.arange(x.shape[1])[::2], self.self_attention.out_proj(clearhead.merge_heads(found)))


@pytest.mark.parametrize("rule", ["causal", "window", "computed"])
def test_a_stack_with_layers_of_other_sizes(rule: str) -> None:
    make = {
        "causal": masks.causal,
        "window": lambda: masks.sliding_window(3, 2),
        "computed": STACK_MASKS["computed"],
    }[rule]
    layers = [
        EncoderLayer(E, attention(), FeedForward(E, 7)),
        Halving(),
        EncoderLayer(E, attention(), FeedForward(E, 7)),
    ]
    for positions in (None, 2):
        stack, x = randomised(Encoder([*layers, Halving()]).double(), 0.4), numbers(B, L, E)
        once = x
        for layer in stack.layers:
            once = layer(once, mask=make(), positions=positions)
        require_near(stack(x, mask=make(), positions=positions), once if stack.norm is None else stack.norm(once))
