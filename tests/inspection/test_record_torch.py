"""Recording `nn.MultiheadAttention` and whoever calls `F.scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention

import clearhead
from tests.support.statistics_oracle import Oracle, compare
from tests.support.torch_oracle import explicit_bias

from .torch_calls import BATCH, EXACT, HEADS, KEYS, LENGTH, WIDTH, kinds, modes, oracle, padding, record

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sequence first": ({"batch_first": False}, {}),
    "other widths": ({"kdim": 5, "vdim": 8}, {}),
    "no bias": ({"bias": False}, {}),
    "appended keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": padding(KEYS)}),
    "padding": ({}, {"key_padding_mask": padding(KEYS)}),
    "float padding": (
        {},
        {"key_padding_mask": torch.zeros(BATCH, KEYS).double().masked_fill(padding(KEYS), -torch.inf)},
    ),
    "bool mask": ({}, {"attn_mask": torch.ones(LENGTH, KEYS).triu(4).bool()}),
    "float mask per head": ({}, {"attn_mask": torch.linspace(-2, 2, BATCH * HEADS * LENGTH * KEYS).double()}),
    "causal hint": ({}, {"attn_mask": torch.ones(LENGTH, KEYS).triu(1).bool(), "is_causal": True}),
    "weights asked for": ({}, {"need_weights": True, "average_attn_weights": False}),
}


@modes
@kinds
@pytest.mark.parametrize("case", CASES)
def test_multihead_attention(case: str, upgraded: bool, training: bool) -> None:
    settings, arguments = CASES[case]
    arguments = {"need_weights": False, **arguments}
    if case == "float mask per head":
        arguments["attn_mask"] = arguments["attn_mask"].reshape(BATCH * HEADS, LENGTH, KEYS)
    module = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **settings}).double().train(training)
    if upgraded:
        clearhead.upgrade(module)
    inputs = (
        torch.randn(BATCH, LENGTH, WIDTH).double(),
        torch.randn(BATCH, KEYS, module.kdim).double(),
        torch.randn(BATCH, KEYS, module.vdim).double(),
    )
    if not module.batch_first:
        inputs = tuple(x.transpose(0, 1) for x in inputs)
    with torch.no_grad():
        expected = module(*inputs, **arguments)
        with record(module) as rec:
            found = module(*inputs, **arguments)
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
    hidden = explicit_bias(
        (BATCH, HEADS, LENGTH, KEYS),
        arguments.get("attn_mask"),
        arguments.get("key_padding_mask"),
        arguments.get("is_causal", False),
    )
    assert list(rec) == [""]
    compare(rec[""][0], oracle(module, inputs, hidden, None), exact=EXACT)


@kinds
def test_without_a_batch(upgraded: bool) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double().eval()
    if upgraded:
        clearhead.upgrade(module)
    x = torch.randn(LENGTH, WIDTH).double()
    with torch.no_grad(), record(module) as rec:
        module(x, x, x, key_padding_mask=padding(LENGTH)[1])
    hidden = explicit_bias((1, HEADS, LENGTH, LENGTH), None, padding(LENGTH)[1:], False)
    # The mask names this call's keys; queries and keys are one sequence.
    compare(rec[""][0], oracle(module, (x[None],) * 3, hidden, None), exact=EXACT)


@modes
def test_a_hint_beside_another_mask(training: bool) -> None:
    """Without weights PyTorch believes ``is_causal`` and drops the mask; the record shows what was computed."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double().train(training)
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    arguments = {"attn_mask": torch.zeros(LENGTH, LENGTH, dtype=torch.bool), "is_causal": True, "need_weights": False}
    with torch.no_grad(), record(module) as rec:
        inside = module(x, x, x, **arguments)[0]
    causal = explicit_bias((BATCH, HEADS, LENGTH, LENGTH), None, None, True)
    expected = oracle(module, (x, x, x), causal, None)
    compare(rec[""][0], expected, exact=EXACT)
    assert expected.value is not None
    mixed = (expected.p @ expected.value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(inside, module.out_proj(mixed), rtol=0, atol=EXACT)


@modes
def test_a_functional_caller(training: bool) -> None:
    """Subclasses and copies of the module call `F.multi_head_attention_forward` themselves."""
    inner = nn.MultiheadAttention(WIDTH, HEADS).double().train(training)

    class Foreign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return multi_head_attention_forward(
                x,
                x,
                x,
                WIDTH,
                HEADS,
                inner.in_proj_weight,
                inner.in_proj_bias,
                None,
                None,
                False,
                0.0,
                inner.out_proj.weight,
                inner.out_proj.bias,
                training=training,
                need_weights=False,
            )[0]

    x = torch.randn(LENGTH, BATCH, WIDTH).double()
    model = Foreign()
    with torch.no_grad(), record(model) as rec:
        model(x)
    nothing = explicit_bias((BATCH, HEADS, LENGTH, LENGTH), None, None, False)
    compare(rec[""][0], oracle(inner, (x, x, x), nothing, None), exact=EXACT)


class TimmAttention(nn.Module):
    """One linear map for all three, and a function imported before anybody recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(*self.split(x)).transpose(1, 2).flatten(2)


def test_a_vision_transformer() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), TimmAttention()) for _ in range(2))).double()
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    with torch.no_grad(), record(blocks) as rec:
        blocks(x)
    assert list(rec) == ["0.1", "1.1"]
    query, key, value = blocks[0][1].split(blocks[0][0](x))
    visible = torch.ones(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.bool)
    compare(rec["0.1"][0], Oracle(query, key, visible, value), exact=EXACT)


class Call(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, *tensors: Tensor) -> Tensor:
        return scaled_dot_product_attention(*tensors, **self.options)


def sdpa_cases() -> dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], Callable[[], Oracle]]]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.bool)

    q, k, v = random(2, 6, 5, 8), random(2, 6, 7, 8), random(2, 6, 7, 8)
    mask, bias = torch.rand(2, 1, 5, 7, generator=generator) > 0.3, random(5, 7)
    three = random(6, 5, 8), random(6, 7, 8), random(6, 7, 8)
    five = random(2, 3, 6, 5, 8), random(2, 3, 6, 7, 8), random(2, 3, 6, 7, 8)
    return {
        "scale": ((q, k, v), {"scale": 0.1}, lambda: Oracle(q, k, ones(2, 6, 5, 7), v, scale=0.1)),
        "causal": ((q, k, v), {"is_causal": True}, lambda: Oracle(q, k, ones(2, 6, 5, 7).tril(), v)),
        "bool mask": ((q, k, v), {"attn_mask": mask}, lambda: Oracle(q, k, mask.expand(2, 6, 5, 7), v)),
        "float mask": ((q, k, v), {"attn_mask": bias}, lambda: Oracle(q, k, ones(2, 6, 5, 7), v, bias)),
        "grouped": (
            (q, k[:, ::3], v[:, ::3]),
            {"enable_gqa": True},
            lambda: Oracle(q, k[:, ::3], ones(2, 6, 5, 7), v[:, ::3]),
        ),
        "three dimensions": (
            three,
            {},
            lambda: Oracle(*(x[None] for x in three[:2]), ones(1, 6, 5, 7), three[2][None]),
        ),
        "five dimensions": (
            five,
            {},
            lambda: Oracle(*(x.flatten(0, 1) for x in five[:2]), ones(6, 6, 5, 7), five[2].flatten(0, 1)),
        ),
    }


@pytest.mark.parametrize("case", list(sdpa_cases()))
def test_scaled_dot_product_attention(case: str) -> None:
    tensors, options, expected = sdpa_cases()[case]
    model = Call(**options)
    outside = model(*tensors)
    with record(model) as rec:
        inside = model(*tensors)
    assert torch.equal(inside, outside)
    compare(rec[""][0], expected(), exact=EXACT)


def test_half_precision_is_compared_with_float64_from_the_same_numbers() -> None:
    tensors = [torch.randn(2, 3, 37, 16).bfloat16() for _ in range(3)]
    model = Call()
    with record(model) as rec:
        model(*tensors)
    compare(rec[""][0], Oracle(tensors[0], tensors[1], torch.ones(2, 3, 37, 37, dtype=torch.bool), tensors[2]))


@pytest.mark.parametrize("kind", ["function", "module"])
def test_under_autocast(kind: str) -> None:
    """The inputs are rounded as the model rounds them; scores and sums are not."""
    q, k, v = (torch.randn(2, 3, 37, 16) for _ in range(3))
    module = nn.MultiheadAttention(48, 3, batch_first=True)
    x = torch.randn(2, 37, 48)
    model, arguments = (Call(), (q, k, v)) if kind == "function" else (module, (x, x, x))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        if kind == "module":
            weight, bias = module.in_proj_weight, module.in_proj_bias
            q, k, v = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
        with record(model) as rec:
            model(*arguments)
    visible = torch.ones(2, 3, 37, 37, dtype=torch.bool)
    compare(rec[""][0], Oracle(q.bfloat16(), k.bfloat16(), visible, v.bfloat16()))
