"""`upgrade(model, unpad=True)` lets stacks of `clearhead.transformer` run in the loop of encoders, in inference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead._native import extension
from clearhead.transformer import Encoder, EncoderLayer, FeedForward, SwiGLU
from tests.integrations.architectures import relative_error
from tests.integrations.conftest import Rows

pytestmark = pytest.mark.skipif(extension is None, reason="the loop needs the native kernel")


def stack(feed_forward: Callable[[], nn.Module], norm: Any = nn.LayerNorm, **options: Any) -> Encoder:
    attention = {
        name: options.pop(name) for name in ("num_kv_heads", "softcap", "sinks", "mask", "scale") if name in options
    }
    last = norm(24) if options.get("norm_first") else None
    layers = [
        EncoderLayer(24, clearhead.MultiHeadAttention(24, 4, **attention), feed_forward(), norm=norm, **options)
        for _ in range(3)
    ]
    built = Encoder(layers, norm=last).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return built


STACKS: dict[str, Callable[[], Encoder]] = {
    "post-norm": lambda: stack(lambda: FeedForward(24, 48)),
    "pre-norm": lambda: stack(lambda: FeedForward(24, 48, activation=nn.GELU()), norm_first=True),
    "like Llama": lambda: stack(lambda: SwiGLU(24, 32), nn.RMSNorm, norm_first=True, num_kv_heads=2),
    "soft-cap and sinks": lambda: stack(lambda: FeedForward(24, 48, bias=False), softcap=3.0, sinks=True, scale=0.5),
    "a window": lambda: stack(lambda: FeedForward(24, 48, activation=torch.tanh), mask=masks.sliding_window(2, 1)),
    "an epsilon": lambda: stack(lambda: FeedForward(24, 48), partial(nn.LayerNorm, eps=0.3)),
}
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "lengths": lambda: masks.lengths(torch.tensor([7, 3])),
    "causal": lambda: masks.causal(),
    "a tensor": lambda: torch.rand(2, 1, 7, 7) < 0.8,
    "a bias": lambda: masks.bias(torch.randn(1, 4, 7, 7)),
}


def upgraded(model: Any, **options: Any) -> Any:
    ours = copy.deepcopy(model)
    clearhead.upgrade(ours, unpad=True, **options)
    return ours


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", STACKS)
@torch.no_grad()
def test_stacks_agree_with_their_own_code(rows: Rows, kind: str, mask: str) -> None:
    model, x, hidden = STACKS[kind](), torch.randn(2, 7, 24), MASKS[mask]()
    ours = upgraded(model)
    kept = x.clone()
    actual = ours(x, mask=hidden)
    assert rows.lean
    assert relative_error(actual, model(x, mask=hidden)) <= 1e-5
    assert torch.equal(x, kept)


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "weights": lambda model, x: model(x, need_weights=True)[0],
    "positions": lambda model, x: model(x, positions=3),
    "cache": lambda model, x: model(x, mask=masks.causal(), cache=model.make_cache(2, 9)),
    "gradients": torch.enable_grad()(lambda model, x: model(x)),
    "without a batch": lambda model, x: model(x[0]),
}


@pytest.mark.parametrize("call", CALLS)
@torch.no_grad()
def test_other_calls_run_the_layers_own_code(rows: Rows, call: str) -> None:
    model, x = STACKS["post-norm"](), torch.randn(2, 7, 24)
    ours = upgraded(model)
    assert relative_error(CALLS[call](ours, x), CALLS[call](model, x)) <= 1e-6
    assert not rows.dtypes


@torch.no_grad()
def test_changed_parts_and_downgrade(rows: Rows) -> None:
    model, x = STACKS["a window"](), torch.randn(2, 7, 24)
    ours = upgraded(model)
    ours(x)
    for change in (
        lambda module: setattr(module.layers[0].feed_forward, "activation", torch.relu),
        lambda module: setattr(module.layers[1].self_attention, "softcap", 0.5),
        lambda module: module.layers[1].feed_forward.linear1.weight.data.mul_(2),
    ):
        before = ours(x)
        change(ours), change(model)
        assert relative_error(ours(x), model(x)) <= 1e-5
        assert relative_error(ours(x), before) > 1e-3
    assert len(set(rows.dtypes)) == 1
    report = clearhead.downgrade(ours)
    assert "forward" not in vars(ours)
    assert report.action == "downgraded"
    assert torch.equal(ours(x), model(x))


@torch.no_grad()
def test_bfloat16_and_the_report(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.integrations._upgrade.gains_by_bfloat16", lambda: True)
    model, x = STACKS["pre-norm"](), torch.randn(2, 7, 24)
    ours = copy.deepcopy(model)
    report = clearhead.upgrade(ours, unpad=True, dtype=torch.bfloat16)
    assert "1 stack(s) in a loop" in str(report)
    assert "in torch.bfloat16" in str(report)
    error = relative_error(ours(x), model(x))
    assert 1e-5 < error < 2e-2
    assert rows.dtypes == [torch.bfloat16]
    other = Encoder([nn.TransformerEncoderLayer(24, 4, batch_first=True)])
    assert "run by their own code: they are not EncoderLayers" in str(clearhead.upgrade(other, unpad=True))
