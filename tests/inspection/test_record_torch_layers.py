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
def test_training_inside_has_the_gradients_of_training_outside(upgraded: bool) -> None:
    model, x = encoder(upgraded, dropout=0.3).train(), tokens(LENGTH)
    require_same_training(model, lambda: model(x).square().mean())


def test_training_under_autocast_keeps_its_gradients() -> None:
    """Casts of the parameters that the record makes without gradients must not be cached for the model."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def loss() -> Tensor:
        return module(x, x, x, need_weights=False)[0].float().square().mean()

    require_same_training(module, loss)
