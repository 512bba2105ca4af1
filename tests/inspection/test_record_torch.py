"""Recording `nn.MultiheadAttention` and calls of `F.scaled_dot_product_attention`."""

from __future__ import annotations

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
    "float padding": ({}, {"key_padding_mask": torch.where(padding(KEYS), -torch.inf, 0.0).double()}),
    "bool mask": ({}, {"attn_mask": torch.ones(LENGTH, KEYS).triu(4).bool()}),
    "float mask per head": ({}, {"attn_mask": torch.linspace(-2, 2, BATCH * HEADS * LENGTH * KEYS).double()}),
    "causal hint": ({}, {"attn_mask": torch.ones(LENGTH, KEYS).triu(1).bool(), "is_causal": True}),
    "weights asked for": ({}, {"need_weights": True, "average_attn_weights": False}),
}


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


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
    shapes = (LENGTH, WIDTH), (KEYS, module.kdim), (KEYS, module.vdim)
    inputs = tuple(torch.randn(BATCH, *shape).double() for shape in shapes)
    if not module.batch_first:
        inputs = tuple(x.transpose(0, 1) for x in inputs)
    with torch.no_grad():
        expected = module(*inputs, **arguments)
        with record(module) as rec:
            torch.testing.assert_close(module(*inputs, **arguments), expected, rtol=0, atol=EXACT)
    masks = [arguments.get(name) for name in ("attn_mask", "key_padding_mask")]
    bias = explicit_bias((BATCH, HEADS, LENGTH, KEYS), *masks, arguments.get("is_causal", False))
    assert list(rec) == [""]
    compare(rec[""][0], oracle(module, inputs, bias, None), exact=EXACT)


@kinds
def test_without_a_batch(upgraded: bool) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double().eval()
    if upgraded:
        clearhead.upgrade(module)
    x = torch.randn(LENGTH, WIDTH).double()
    with torch.no_grad(), record(module) as rec:
        module(x, x, x, key_padding_mask=padding(LENGTH)[1])
    bias = explicit_bias((1, HEADS, LENGTH, LENGTH), None, padding(LENGTH)[1:], False)
    compare(rec[""][0], oracle(module, (x[None],) * 3, bias, None), exact=EXACT)


@modes
def test_a_hint_beside_another_mask(training: bool) -> None:
    """Without weights PyTorch trusts ``is_causal`` and ignores the mask. The record contains the same."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double().train(training)
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    arguments = {"attn_mask": ~ones(LENGTH, LENGTH), "is_causal": True, "need_weights": False}
    with torch.no_grad(), record(module) as rec:
        inside = module(x, x, x, **arguments)[0]
    expected = oracle(module, (x, x, x), explicit_bias((BATCH, HEADS, LENGTH, LENGTH), None, None, True), None)
    compare(rec[""][0], expected, exact=EXACT)
    mixed = expected.output().transpose(1, 2).flatten(2)
    torch.testing.assert_close(inside, module.out_proj(mixed), rtol=0, atol=EXACT)


@modes
def test_a_functional_caller(training: bool) -> None:
    """Subclasses and copies of the module call `F.multi_head_attention_forward` themselves."""
    inner = nn.MultiheadAttention(WIDTH, HEADS).double()
    parameters = (inner.in_proj_weight, inner.in_proj_bias, None, None, False, 0.0)
    projection = (inner.out_proj.weight, inner.out_proj.bias)

    class Foreign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            arguments = (x, x, x, WIDTH, HEADS, *parameters, *projection)
            return multi_head_attention_forward(*arguments, training=training, need_weights=False)[0]

    x, model = torch.randn(LENGTH, BATCH, WIDTH).double(), Foreign()
    with torch.no_grad(), record(model) as rec:
        model(x)
    bias = explicit_bias((BATCH, HEADS, LENGTH, LENGTH), None, None, False)
    compare(rec[""][0], oracle(inner, (x, x, x), bias, None), exact=EXACT)


class Call(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, *tensors: Tensor) -> Tensor:
        return scaled_dot_product_attention(*tensors, **self.options)


GENERATOR = torch.Generator().manual_seed(3)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


Q, K, V = random(2, 6, 5, 8), random(2, 6, 7, 8), random(2, 6, 7, 8)
BIAS, SEEN = random(5, 7), random(2, 1, 5, 7) > -0.5
BATCHES = random(2, 3, 6, 5, 8), random(2, 3, 6, 7, 8), random(2, 3, 6, 7, 8)
ALL = ones(2, 6, 5, 7)
#: Query, key and value; options; visible keys; arguments of the oracle.
SDPA: dict[str, tuple[tuple[Tensor, ...], dict[str, Any], Tensor, dict[str, Any]]] = {
    "scale": ((Q, K, V), {"scale": 0.1}, ALL, {"scale": 0.1}),
    "causal": ((Q, K, V), {"is_causal": True}, ALL.tril(), {}),
    "bool mask": ((Q, K, V), {"attn_mask": SEEN}, SEEN.expand(2, 6, 5, 7), {}),
    "float mask": ((Q, K, V), {"attn_mask": BIAS}, ALL, {"bias": BIAS}),
    "grouped": ((Q, K[:, ::3], V[:, ::3]), {"enable_gqa": True}, ALL, {}),
    "three dimensions": (tuple(x[0] for x in (Q, K, V)), {}, ALL[:1], {}),
    "five dimensions": (BATCHES, {}, ones(6, 6, 5, 7), {}),
}


@pytest.mark.parametrize("case", SDPA)
def test_scaled_dot_product_attention(case: str) -> None:
    tensors, options, visible, more = SDPA[case]
    model = Call(**options)
    outside = model(*tensors)
    with record(model) as rec:
        assert torch.equal(model(*tensors), outside)
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in tensors)
    compare(rec[""][0], Oracle(query, key, visible, value, **more), exact=EXACT)


@pytest.mark.parametrize("kind", ["function", "module"])
def test_under_autocast(kind: str) -> None:
    """The inputs are rounded as in the model. Scores and sums are not."""
    q, k, v = (torch.randn(2, 3, 37, 16) for _ in range(3))
    module = nn.MultiheadAttention(48, 3, batch_first=True)
    x = torch.randn(2, 37, 48)
    model, arguments = (Call(), (q, k, v)) if kind == "function" else (module, (x, x, x))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        if kind == "module":
            projected = torch.nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
            q, k, v = projected.unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
        with record(model) as rec:
            model(*arguments)
    compare(rec[""][0], Oracle(q.bfloat16(), k.bfloat16(), ones(2, 3, 37, 37), v.bfloat16()))
