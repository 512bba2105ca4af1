"""Recording plain PyTorch: `nn.MultiheadAttention`, `nn.Transformer*`, callers of `F.scaled_dot_product_attention`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention

import clearhead
from tests.nn.oracle import explicit_bias

from .oracle import Oracle, compare

BATCH, LENGTH, KEYS, WIDTH, HEADS = 2, 7, 11, 12, 3
EVEN_HEADS = 4  # PyTorch's inference fast path wants an even number
STATISTICS = ("entropy", "received", "max_logit", "confidence", "top_k", "sink", "distance", "offset", "head_average")
EXACT = 1e-10

modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
kinds = pytest.mark.parametrize("upgraded", [False, True], ids=["torch", "upgraded"])


def record(model: nn.Module, **options: Any) -> clearhead.record:
    return clearhead.record(model, (*STATISTICS, "output_norm"), **options)


def projected(module: nn.MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    """Query, key and value as (N, H, length, D), by hand from the module's parameters."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = [0, 0, 0] if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    batch_first = [x if module.batch_first else x.transpose(0, 1) for x in inputs]
    found = [x @ weight.T + bias for x, weight, bias in zip(batch_first, weights, biases, strict=True)]
    for place, learned in ((1, module.bias_k), (2, module.bias_v)):
        if learned is not None:
            found[place] = torch.cat([found[place], learned.expand(found[place].shape[0], 1, -1)], 1)
    if module.add_zero_attn:
        found[1:] = [torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in found[1:]]
    return [x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in found]


def oracle(module: nn.MultiheadAttention, inputs: tuple[Tensor, Tensor, Tensor], bias: Tensor, counted: Any) -> Oracle:
    """`bias` (N, H, L, S) holds every mask as numbers; appended keys are always visible."""
    query, key, value = projected(module, *inputs)
    bias = torch.nn.functional.pad(bias, (0, key.shape[2] - bias.shape[-1]))
    return Oracle(query, key, bias > -torch.inf, value, bias, counted=counted)


def padding(length: int) -> Tensor:
    """(N, length), True = padding, at the end of the second item."""
    return torch.arange(length) >= torch.tensor([[length], [length - 3]])


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


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, EVEN_HEADS, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2).double()


@modes
@kinds
@nested
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_transformer_encoder(padded: bool, upgraded: bool, training: bool) -> None:
    model = encoder(dropout=0.0).train(training)
    if upgraded:
        clearhead.upgrade(model)
    x, hidden = torch.randn(BATCH, LENGTH, WIDTH).double(), padding(LENGTH) if padded else None
    with torch.no_grad():
        outside = model(x, src_key_padding_mask=hidden)
        with record(model) as rec:
            inside = model(x, src_key_padding_mask=hidden)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool) if hidden is None else ~hidden
    torch.testing.assert_close(inside[valid], outside[valid], rtol=0, atol=EXACT)
    assert list(rec) == ["layers.0.self_attn", "layers.1.self_attn"]
    bias = explicit_bias((BATCH, EVEN_HEADS, LENGTH, LENGTH), None, hidden, False)
    compare(rec["layers.0.self_attn"][0], oracle(model.layers[0].self_attn, (x, x, x), bias, valid), exact=EXACT)


@modes
@kinds
def test_transformer(upgraded: bool, training: bool) -> None:
    model = nn.Transformer(WIDTH, EVEN_HEADS, 1, 1, 16, dropout=0.0, batch_first=True).double().train(training)
    if upgraded:
        clearhead.upgrade(model)
    source, target = torch.randn(BATCH, KEYS, WIDTH).double(), torch.randn(BATCH, LENGTH, WIDTH).double()
    masks = {
        "src_key_padding_mask": padding(KEYS),
        "memory_key_padding_mask": padding(KEYS),
        "tgt_key_padding_mask": padding(LENGTH).flip(0),
        "tgt_mask": torch.ones(LENGTH, LENGTH).triu(1).bool(),
    }
    with torch.no_grad():
        outside = model(source, target, **masks)
        with record(model) as rec:
            inside = model(source, target, **masks)
    torch.testing.assert_close(inside, outside, rtol=0, atol=EXACT)
    assert list(rec) == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]
    real = (~padding(KEYS), ~padding(LENGTH).flip(0), ~padding(LENGTH).flip(0))
    for found, counted in zip(rec.values(), real, strict=True):
        assert found.counted.tolist() == counted.tolist()
    bias = explicit_bias((BATCH, EVEN_HEADS, LENGTH, LENGTH), masks["tgt_mask"], masks["tgt_key_padding_mask"], False)
    attend = model.decoder.layers[0].self_attn
    compare(rec["decoder.layers.0.self_attn"][0], oracle(attend, (target,) * 3, bias, real[1]), exact=EXACT)


@modes
def test_transformer_decoder(training: bool) -> None:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).double().train(training)
    with torch.no_grad(), record(model) as rec:
        model(torch.randn(BATCH, LENGTH, WIDTH).double(), torch.randn(BATCH, KEYS, WIDTH).double())
    assert list(rec) == [f"layers.{n}.{kind}" for n in (0, 1) for kind in ("self_attn", "multihead_attn")]
    assert [found.key_length for found in rec.values()] == [LENGTH, KEYS, LENGTH, KEYS]


@pytest.fixture(name="fast_calls")
def _fast_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of PyTorch's fused inference functions, one for each time they ran."""
    seen: list[str] = []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        original = getattr(torch, name)

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            seen.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, name, counted)
    return seen


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_the_fast_path_is_off_inside_and_back_after(fails: bool, fast_calls: list[str]) -> None:
    model, x = encoder().eval(), torch.randn(BATCH, LENGTH, WIDTH).double()
    with torch.no_grad():
        model(x)
        assert fast_calls == ["_transformer_encoder_layer_fwd"] * 2
        with contextlib.suppress(ZeroDivisionError), record(model):
            model(x)
            if fails:
                _ = 1 / 0
        assert len(fast_calls) == 2, "off inside"
        model(x)
    assert len(fast_calls) == 4, "back after"


@nested
def test_the_nested_path_zeroes_padding_and_the_recorded_one_does_not() -> None:
    """What the docstring of `record` says; positions that are not padding agree."""
    model, x, hidden = encoder().eval(), torch.randn(BATCH, LENGTH, WIDTH).double(), padding(LENGTH)
    with torch.no_grad():
        outside = model(x, src_key_padding_mask=hidden)
        with record(model):
            inside = model(x, src_key_padding_mask=hidden)
        after = model(x, src_key_padding_mask=hidden)
    assert not outside[hidden].any()
    assert inside[hidden].any()
    torch.testing.assert_close(inside[~hidden], outside[~hidden], rtol=0, atol=EXACT)
    assert torch.equal(after, outside)


@kinds
def test_training_inside_has_the_gradients_of_training_outside(upgraded: bool) -> None:
    model, x = encoder(dropout=0.3).train(), torch.randn(BATCH, LENGTH, WIDTH).double()
    if upgraded:
        clearhead.upgrade(model)
    found: list[list[Tensor]] = []
    for recorded in (False, True):
        model.zero_grad()
        torch.manual_seed(5)
        if recorded:
            with record(model) as rec:
                model(x).square().mean().backward()
            assert not any(calls.entropy.requires_grad for calls in rec.values())
        else:
            model(x).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), "the same dropout and the same gradients"


def test_training_under_autocast_keeps_its_gradients() -> None:
    """Casts of the weights that the record makes without gradients must not be cached for the model."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    gradients: list[Tensor] = []
    for recorded in (False, True):
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if recorded:
                with record(module):
                    loss = module(x, x, x, need_weights=False)[0].float().square().mean()
            else:
                loss = module(x, x, x, need_weights=False)[0].float().square().mean()
        loss.backward()
        assert module.in_proj_weight.grad is not None
        gradients.append(module.in_proj_weight.grad.clone())
    assert torch.equal(*gradients)
