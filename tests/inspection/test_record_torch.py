"""Recording `nn.MultiheadAttention`, calls of `F.scaled_dot_product_attention`, and `nn.Transformer`."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import clearhead
from tests.support.statistics_oracle import EVERY, Oracle, compare
from tests.support.torch_oracle import explicit_bias

from .conftest import require_same_training

BATCH, LENGTH, KEYS, WIDTH, HEADS = 2, 7, 11, 12, 3
EVEN_HEADS = 4  # PyTorch's inference fast path wants an even number
EXACT = 1e-10

modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
kinds = pytest.mark.parametrize("upgraded", [False, True], ids=["torch", "upgraded"])


def record(model: nn.Module, **options: Any) -> clearhead.record:
    return clearhead.record(model, EVERY, **options)


def projected(module: nn.MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    """Query, key and value as (N, H, length, D), by hand from the module's parameters."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = [0, 0, 0] if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    batch_first = [x if module.batch_first else x.transpose(0, 1) for x in inputs]
    tensors = [x @ weight.T + bias for x, weight, bias in zip(batch_first, weights, biases, strict=True)]
    for place, learned in ((1, module.bias_k), (2, module.bias_v)):
        if learned is not None:
            tensors[place] = torch.cat([tensors[place], learned.expand(tensors[place].shape[0], 1, -1)], 1)
    if module.add_zero_attn:
        tensors[1:] = [torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in tensors[1:]]
    return [x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in tensors]


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
    "no batch": ({}, {"key_padding_mask": padding(KEYS)[1]}),
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
    batch = 1 if case == "no batch" else BATCH
    inputs = tuple(torch.randn(batch, *shape).double() for shape in shapes)
    if not module.batch_first:
        inputs = tuple(x.transpose(0, 1) for x in inputs)
    given = [x[0] for x in inputs] if case == "no batch" else inputs
    with torch.no_grad():
        expected = module(*given, **arguments)
        with record(module) as rec:
            torch.testing.assert_close(module(*given, **arguments), expected, rtol=0, atol=EXACT)
    masks = [arguments.get(name) for name in ("attn_mask", "key_padding_mask")]
    bias = explicit_bias((batch, HEADS, LENGTH, KEYS), *masks, arguments.get("is_causal", False))
    assert list(rec) == [""]
    compare(rec[""][0], oracle(module, inputs, bias, None), exact=EXACT)


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


# Recording `nn.Transformer` and its layers, with and without PyTorch's inference fast path, and in training.


nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def encoder(upgraded: bool = False, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, EVEN_HEADS, 16, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, 2).double()
    if upgraded:
        clearhead.upgrade(model)
    return model


def tokens(length: int) -> Tensor:
    return torch.randn(BATCH, length, WIDTH).double()


@modes
@kinds
@nested
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_transformer_encoder(padded: bool, upgraded: bool, training: bool) -> None:
    """PyTorch's nested path zeroes padding, and the recorded path does not. Other positions agree."""
    model = encoder(upgraded, dropout=0.0).train(training)
    x, hidden = tokens(LENGTH), padding(LENGTH) if padded else None
    with torch.no_grad():
        outside = model(x, src_key_padding_mask=hidden)
        with record(model) as rec:
            inside = model(x, src_key_padding_mask=hidden)
        assert torch.equal(model(x, src_key_padding_mask=hidden), outside)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool) if hidden is None else ~hidden
    torch.testing.assert_close(inside[valid], outside[valid], rtol=0, atol=EXACT)
    if padded and not upgraded and not training:
        assert inside[~valid].any()
        assert not outside[~valid].any()
    assert list(rec) == ["layers.0.self_attn", "layers.1.self_attn"]
    bias = explicit_bias((BATCH, EVEN_HEADS, LENGTH, LENGTH), None, hidden, False)
    compare(rec["layers.0.self_attn"][0], oracle(model.layers[0].self_attn, (x, x, x), bias, valid), exact=EXACT)


@modes
@kinds
def test_transformer(upgraded: bool, training: bool) -> None:
    model = nn.Transformer(WIDTH, EVEN_HEADS, 1, 2, 16, dropout=0.0, batch_first=True).double().train(training)
    if upgraded:
        clearhead.upgrade(model)
    source, target = tokens(KEYS), tokens(LENGTH)
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
    decoder = [f"decoder.layers.{number}.{kind}" for number in (0, 1) for kind in ("self_attn", "multihead_attn")]
    assert list(rec) == ["encoder.layers.0.self_attn", *decoder]
    assert [calls.key_length for calls in rec.values()] == [KEYS, LENGTH, KEYS, LENGTH, KEYS]
    real = ~padding(LENGTH).flip(0)
    for calls, counted in zip(rec.values(), (~padding(KEYS), *[real] * 4), strict=True):
        assert calls.counted.tolist() == counted.tolist()
    bias = explicit_bias((BATCH, EVEN_HEADS, LENGTH, LENGTH), masks["tgt_mask"], masks["tgt_key_padding_mask"], False)
    attend = model.decoder.layers[0].self_attn
    compare(rec[decoder[0]][0], oracle(attend, (target,) * 3, bias, real), exact=EXACT)


@pytest.fixture(name="fast_calls")
def _fast_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of PyTorch's fused inference functions, one for each call."""
    calls: list[str] = []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        original = getattr(torch, name)

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, name, counted)
    return calls


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_the_fast_path_is_off_inside_and_back_after(fails: bool, fast_calls: list[str]) -> None:
    model, x = encoder().eval(), tokens(LENGTH)
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


@kinds
def test_training_under_autocast_keeps_its_gradients(upgraded: bool) -> None:
    """Casts of the parameters that the record makes without gradients must not be cached for the model."""
    model, x = encoder(upgraded, dropout=0.3).float().train(), torch.randn(BATCH, LENGTH, WIDTH)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def loss() -> Tensor:
        return model(x).float().square().mean()

    require_same_training(model, loss)
