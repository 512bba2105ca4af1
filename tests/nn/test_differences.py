"""Each documented difference from `torch.nn.MultiheadAttention`: what PyTorch does, what Clearhead does, side by side.

A test here that fails on PyTorch's half after an update of torch is good news: the difference is gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import clearhead

E, H, N, L = 12, 2, 3, 5
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)


def pair(training: bool = False, **options: object) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """Clearhead's and PyTorch's with equal weights, and biases that are not zero."""
    ours = clearhead.nn.MultiheadAttention(E, H, batch_first=True, **options).train(training)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, **options).train(training)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.4)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, L, E)


@pytest.fixture
def inference() -> Iterator[None]:
    """Eval mode and `no_grad`: where PyTorch's module goes its fast path."""
    with torch.no_grad():
        yield


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-5)


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("need_weights", [True, False])
def test_is_causal_alone_is_causal_in_eval(x: Tensor, need_weights: bool) -> None:
    """pytorch#99282, #96941: in eval the argument is not looked at."""
    ours, theirs = pair()
    causal = theirs(x, x, x, attn_mask=CAUSAL)[0]
    everything = theirs(x, x, x)[0]
    assert not close(causal, everything)

    assert close(theirs(x, x, x, is_causal=True, need_weights=need_weights)[0], everything)
    assert close(ours(x, x, x, is_causal=True, need_weights=need_weights)[0], causal)


@pytest.mark.parametrize("need_weights", [True, False])
def test_is_causal_alone_is_causal_in_training(x: Tensor, need_weights: bool) -> None:
    """pytorch#118972: the same call that eval answers raises in training."""
    ours, theirs = pair(training=True)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        theirs(x, x, x, is_causal=True, need_weights=need_weights)

    output, weights = ours(x, x, x, is_causal=True, need_weights=need_weights)
    assert close(output, theirs(x, x, x, attn_mask=CAUSAL)[0])
    assert weights is None or bool((weights.triu(1) == 0).all())


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


def test_one_hidden_head_leaves_the_others_alone(x: Tensor) -> None:
    """pytorch#160064: with weights, one masked head makes the whole output NaN."""
    ours, theirs = pair(training=True)
    hidden = torch.zeros(N, H, L, L, dtype=torch.bool)
    hidden[:, 1] = True

    assert bool(theirs(x, x, x, attn_mask=hidden.flatten(0, 1))[0].isnan().all())
    without_weights = theirs(x, x, x, attn_mask=hidden.flatten(0, 1), need_weights=False)[0]
    output, weights = ours(x, x, x, attn_mask=hidden.flatten(0, 1), average_attn_weights=False)
    assert close(output, without_weights)
    assert torch.allclose(weights.sum(-1), torch.tensor([1.0, 0.0])[None, :, None].expand(N, H, L))


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


def test_pruning_out_proj_follows_its_weight(x: Tensor) -> None:
    """pytorch#69353: a pruned weight is computed by a hook, so PyTorch goes on with the one from before the step."""
    moved: list[bool] = []
    for module in pair(training=True):
        prune.l1_unstructured(module.out_proj, "weight", amount=0.5)
        before = module(x, x, x)[0]
        with torch.no_grad():
            module.out_proj.weight_orig.mul_(2)  # what an optimizer would do
        moved.append(not torch.equal(before, module(x, x, x)[0]))
    assert moved == [True, False]


@pytest.mark.usefixtures("inference")
def test_the_encoder_layer_calls_what_it_was_given(x: Tensor) -> None:
    """pytorch#128413: the encoder layer's fast path goes round a replaced `out_proj` and round its attention."""
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval()
    before = layer(x)
    layer.self_attn.out_proj = DoubledLinear(layer.self_attn.out_proj)
    assert close(layer(x), before)

    clearhead.upgrade(layer)
    assert not close(layer(x), before)


class DoubledLinear(nn.Module):
    """Stands for any wrapper of a Linear: it has a `weight`, but what it computes is more than that."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    @property
    def bias(self) -> Tensor | None:
        return self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32], ids=str)
def test_masks_per_item_and_per_head(x: Tensor, mask_dtype: torch.dtype) -> None:
    """pytorch#64706, #116472: PyTorch wants every head written out, (N·H, L, S)."""
    ours, theirs = pair(training=True)
    hidden = torch.rand(N, 1, L, L) < 0.4
    hidden[..., 0] = False
    mask = hidden if mask_dtype == torch.bool else torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
    meant = theirs(x, x, x, attn_mask=mask.expand(N, H, L, L).flatten(0, 1))[0]

    with pytest.raises(RuntimeError, match="3D attn_mask"):
        theirs(x, x, x, attn_mask=mask[:, 0])
    with pytest.raises(AssertionError, match="2-D or 3-D"):
        theirs(x, x, x, attn_mask=mask.expand(N, H, L, L))
    assert close(ours(x, x, x, attn_mask=mask[:, 0])[0], meant)
    assert close(ours(x, x, x, attn_mask=mask.expand(N, H, L, L))[0], meant)


def test_mixed_mask_dtypes_do_not_warn(x: Tensor) -> None:
    """pytorch#95702: PyTorch warns, also about masks that its own encoder converted."""
    ours, theirs = pair(training=True)
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[0, 3:] = True
    bias = torch.randn(L, L)
    with pytest.warns(UserWarning, match="Support for mismatched"):
        meant = theirs(x, x, x, attn_mask=bias, key_padding_mask=padding)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert close(ours(x, x, x, attn_mask=bias, key_padding_mask=padding)[0], meant)


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
