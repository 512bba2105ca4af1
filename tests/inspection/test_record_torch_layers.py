"""Recording `nn.Transformer` and its layers, with and without PyTorch's inference fast path, and in training."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from tests.support.statistics_oracle import compare
from tests.support.torch_oracle import explicit_bias

from .stacks import require_same_training
from .torch_calls import BATCH, EVEN_HEADS, EXACT, HEADS, KEYS, LENGTH, WIDTH, kinds, modes, oracle, padding, record

nested = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


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
    assert list(rec) == ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
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
    require_same_training(model, lambda: model(x).square().mean())


def test_training_under_autocast_keeps_its_gradients() -> None:
    """Casts of the weights that the record makes without gradients must not be cached for the model."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def loss() -> Tensor:
        return module(x, x, x, need_weights=False)[0].float().square().mean()

    require_same_training(module, loss)
