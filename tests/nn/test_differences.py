"""Each documented difference from `torch.nn.MultiheadAttention`: what PyTorch does, what Clearhead does, side by side.

A test here that fails on PyTorch's half after an update of torch is good news: the difference is gone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead
from tests.support.randomised import randomised

E, H, N, L = 12, 2, 3, 5
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)


def pair(training: bool = False, **options: object) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """Clearhead's and PyTorch's with equal weights, and biases that are not zero."""
    ours = randomised(clearhead.nn.MultiheadAttention(E, H, batch_first=True, **options), 0.4)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, **options)
    theirs.load_state_dict(ours.state_dict())
    return ours.train(training), theirs.train(training)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, L, E)


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
def test_is_causal_alone_is_causal(x: Tensor, need_weights: bool) -> None:
    """pytorch#99282, #96941, #118972: PyTorch ignores the argument in eval, and the same call raises in training."""
    ours, theirs = pair(training=True)
    causal, everything = theirs(x, x, x, attn_mask=CAUSAL)[0], theirs(x, x, x)[0]
    assert not close(causal, everything)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(x, x, x, is_causal=True, need_weights=need_weights)
    assert close(ours(x, x, x, is_causal=True, need_weights=need_weights)[0], causal)
    with torch.no_grad():
        assert close(theirs.eval()(x, x, x, is_causal=True, need_weights=need_weights)[0], everything)
        assert close(ours.eval()(x, x, x, is_causal=True, need_weights=need_weights)[0], causal)


def test_is_causal_with_a_mask_means_both(x: Tensor) -> None:
    """pytorch#118972: with the hint PyTorch follows the mask alone or causality alone, by `need_weights`."""
    ours, theirs = pair(training=True)
    first_key_hidden = torch.zeros(L, L, dtype=torch.bool)
    first_key_hidden[1:, 0] = True
    mask_alone, causal_alone, both = (
        theirs(x, x, x, attn_mask=mask)[0] for mask in (first_key_hidden, CAUSAL, first_key_hidden | CAUSAL)
    )

    assert close(theirs(x, x, x, attn_mask=first_key_hidden, is_causal=True, need_weights=True)[0], mask_alone)
    assert close(theirs(x, x, x, attn_mask=first_key_hidden, is_causal=True, need_weights=False)[0], causal_alone)
    for need_weights in (True, False):
        answer = ours(x, x, x, attn_mask=first_key_hidden, is_causal=True, need_weights=need_weights)[0]
        assert close(answer, both)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_appended_keys_stay_visible_under_is_causal(x: Tensor, option: str) -> None:
    """pytorch#27461 is about the same keys: the hint hides them from all but the last queries."""
    ours, theirs = pair(training=True, **{option: True})
    meant, weights = theirs(x, x, x, attn_mask=CAUSAL)
    assert bool((weights[:, :, L] > 0).all())

    hinted = theirs(x, x, x, attn_mask=CAUSAL, is_causal=True, need_weights=False)[0]
    assert not close(hinted, meant)
    for need_weights in (True, False):
        assert close(ours(x, x, x, attn_mask=CAUSAL, is_causal=True, need_weights=need_weights)[0], meant)
        assert close(ours(x, x, x, is_causal=True, need_weights=need_weights)[0], meant)


def test_a_hidden_row_gives_the_output_bias_and_no_weights(x: Tensor) -> None:
    """pytorch#41508: NaN with weights and zeros without, for the same question."""
    ours, theirs = pair(training=True)
    hidden = torch.zeros(N, L, dtype=torch.bool)
    hidden[1] = True
    query = x.clone().requires_grad_()

    output, weights = theirs(query, x, x, key_padding_mask=hidden)
    assert bool(output[1].isnan().all())
    assert bool(weights[1].isnan().all())
    assert bool(torch.autograd.grad(output[[0, 2]].sum(), query)[0].isnan().any())
    assert close(theirs(query, x, x, key_padding_mask=hidden, need_weights=False)[0][1], theirs.out_proj.bias)

    for need_weights in (True, False):
        output, weights = ours(query, x, x, key_padding_mask=hidden, need_weights=need_weights)
        assert torch.equal(output[1], ours.out_proj.bias.expand(L, E))
        assert weights is None or bool((weights[1] == 0).all())
        for gradient in torch.autograd.grad(output.sum(), [query, *ours.parameters()]):
            assert bool(gradient.isfinite().all())


def test_returned_weights_are_those_before_dropout(x: Tensor) -> None:
    """pytorch#42929, #33360: in training PyTorch returns them with entries dropped and the rest scaled up."""
    ours, theirs = pair(training=True, dropout=0.5)
    dropped = theirs(x, x, x)[1]
    assert not close(dropped.sum(-1), torch.ones(N, L))

    weights = ours(x, x, x)[1]
    assert close(weights.sum(-1), torch.ones(N, L))
    assert close(weights, ours.eval()(x, x, x)[1])


@pytest.mark.parametrize("training", [True, False])
def test_hooks_on_out_proj_are_called(x: Tensor, training: bool) -> None:
    """pytorch#78109: PyTorch reads `out_proj.weight` and never calls `out_proj`."""
    calls: dict[str, int] = {"ours": 0, "theirs": 0}
    for name, module in zip(calls, pair(training), strict=True):

        def count(*_: object, name: str = name) -> None:
            calls[name] += 1

        module.out_proj.register_forward_hook(count)
        module(x, x, x)
    assert calls == {"ours": 1, "theirs": 0}


@torch.no_grad()
def test_the_encoder_layer_calls_what_it_was_given(x: Tensor) -> None:
    """pytorch#128413: the encoder layer's fast path goes round a replaced `out_proj` and round its attention."""
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval()
    before = layer(x)
    layer.self_attn.out_proj.__class__ = DoubledLinear
    assert close(layer(x), before)

    clearhead.upgrade(layer)
    assert not close(layer(x), before)


class DoubledLinear(nn.Linear):
    """A wrapper with the `weight` of a Linear, which computes more than that."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_nan_in_padded_keys_stays_there(x: Tensor, training: bool, need_weights: bool) -> None:
    """Padding may hold anything: 0 · NaN is NaN in PyTorch's product with the values."""
    ours, theirs = pair(training)
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[:, 3:] = True
    memory = x.clone()
    memory[:, 3:] = float("nan")
    meant = theirs(x, x, x, key_padding_mask=padding)[0]

    assert bool(theirs(x, memory, memory, key_padding_mask=padding, need_weights=need_weights)[0].isnan().any())
    output, weights = ours(x, memory, memory, key_padding_mask=padding, need_weights=need_weights)
    assert close(output, meant)
    assert weights is None or bool(weights.isfinite().all())
