"""Attention rollout beside explicit products of L × L matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.errors import ArgumentError, ShapeError
from tests.support.allocations import Allocations
from tests.support.statistics_oracle import Oracle

BATCH, LENGTH, WIDTH, HEADS = 2, 11, 12, 6
DEPTH = 3


class Stack(nn.Module):
    """Layers whose masks differ; grouped heads in every second one."""

    def __init__(self, layer_masks: Sequence[masks.Mask | None] = (None, None, None)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            clearhead.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=HEADS - 3 * (number % 2)) for number in range(DEPTH)
        )
        self.masks = layer_masks

    def forward(self, x: Tensor) -> Tensor:
        for layer, mask in zip(self.layers, self.masks, strict=True):
            x = x + layer(x, mask=mask)
        return x


def record(model: nn.Module, *inputs: Tensor, **options: Any) -> clearhead.record:
    with torch.no_grad(), clearhead.record(model, ("entropy",), keep="queries_keys", **options) as rec:
        model(*inputs)
    return rec


def explicit(rec: clearhead.record, visible: Sequence[Tensor], residual: float) -> Tensor:
    """The whole L × L matrix (B, L, L) of one stack, in float64."""
    result = torch.eye(LENGTH, dtype=torch.float64).expand(BATCH, LENGTH, LENGTH)
    for number, seen in enumerate(visible):
        call = rec.kept_call(number)
        attention = Oracle(call.query, call.key, seen.expand(BATCH, HEADS, LENGTH, LENGTH)).p.mean(1)
        mixed = residual * torch.eye(LENGTH, dtype=torch.float64) + (1 - residual) * attention
        result = mixed @ result
    return result


PADDED = torch.arange(LENGTH).expand(BATCH, LENGTH) < torch.tensor([[LENGTH], [LENGTH - 4]])
EVERYTHING, FUTURE_HIDDEN = torch.ones(1, 1, LENGTH, LENGTH).bool(), torch.ones(1, 1, LENGTH, LENGTH).tril().bool()
PATTERNS: dict[str, tuple[tuple[masks.Mask | None, ...], tuple[Tensor, ...]]] = {
    "full": ((None,) * 3, (EVERYTHING,) * 3),
    "causal": ((masks.causal(),) * 3, (FUTURE_HIDDEN,) * 3),
    "padding": ((masks.keep(keys=PADDED),) * 3, (PADDED[:, None, None, :],) * 3),
    "each its own": (
        (masks.causal(), None, masks.keep(keys=PADDED)),
        (FUTURE_HIDDEN, EVERYTHING, PADDED[:, None, None, :]),
    ),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("residual", [0.0, 0.5, 0.9, 1.0])
def test_equals_products_of_matrices(pattern: str, residual: float) -> None:
    layer_masks, visible = PATTERNS[pattern]
    rec = record(Stack(layer_masks), torch.randn(BATCH, LENGTH, WIDTH))
    targets = [0, 7, -1]
    found = rec.rollout(targets, residual=residual)
    assert found.shape == (BATCH, 3, LENGTH)
    torch.testing.assert_close(found.double(), explicit(rec, visible, residual)[:, targets], rtol=0, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.ones(BATCH, 3), rtol=0, atol=1e-5)


def test_in_many_blocks(small_blocks: None) -> None:
    layer_masks, visible = PATTERNS["each its own"]
    rec = record(Stack(layer_masks), torch.randn(BATCH, LENGTH, WIDTH))
    every = list(range(LENGTH))
    torch.testing.assert_close(rec.rollout(every).double(), explicit(rec, visible, 0.5), rtol=0, atol=1e-6)


def test_in_float64() -> None:
    rec = record(Stack().double(), torch.randn(BATCH, LENGTH, WIDTH).double())
    found = rec.rollout(range(LENGTH))
    torch.testing.assert_close(found, explicit(rec, (EVERYTHING,) * 3, 0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("targets", [[4], (4,), torch.tensor([4]), torch.tensor(4), [4 - LENGTH]], ids=str)
def test_forms_of_targets(targets: Any) -> None:
    rec = record(Stack(), torch.randn(BATCH, LENGTH, WIDTH))
    torch.testing.assert_close(rec.rollout(targets), rec.rollout(range(LENGTH))[:, [4]])


def test_some_layers_by_number_or_name() -> None:
    rec = record(Stack(), torch.randn(BATCH, LENGTH, WIDTH))
    whole = rec.rollout(range(LENGTH), residual=0.25)
    first = rec.rollout(range(LENGTH), layers=["layers.0"], residual=0.25)
    rest = rec.rollout(range(LENGTH), layers=[1, 2], residual=0.25)
    torch.testing.assert_close(rest @ first, whole, rtol=0, atol=1e-6)


def test_a_sinks_share_goes_nowhere() -> None:
    class WithSinks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = clearhead.split_heads(x, HEADS)
            return clearhead.merge_heads(clearhead.attention(heads, heads, heads, sinks=torch.ones(HEADS)))

    rec = record(WithSinks(), torch.randn(BATCH, LENGTH, WIDTH))
    call = rec.kept_call(0)
    oracle = Oracle(call.query, call.key, EVERYTHING.expand(BATCH, HEADS, LENGTH, LENGTH), sinks=torch.ones(HEADS))
    found = rec.rollout(range(LENGTH), residual=0.0)
    torch.testing.assert_close(found.double(), oracle.p.mean(1), rtol=0, atol=1e-6)
    assert bool((found.sum(-1) < 1).all())


def test_a_transformer_encoder_of_pytorch() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, DEPTH).eval()
    rec = record(model, torch.randn(BATCH, LENGTH, WIDTH))
    torch.testing.assert_close(
        rec.rollout([3]).double(), explicit(rec, (EVERYTHING,) * DEPTH, 0.5)[:, [3]], rtol=0, atol=1e-6
    )


def test_no_matrix_of_all_tokens_is_built() -> None:
    length = 4001
    model = Stack((masks.causal(),) * DEPTH)
    rec = record(model, torch.randn(1, length, WIDTH))
    with Allocations() as allocations:
        found = rec.rollout([-1, 17])
    assert found.shape == (1, 2, length)
    # One block of scores in float64 is 8 MiB; the matrix of one head would be 64 MB, that of all heads 384.
    assert allocations.largest < length * length * 4 / 2, allocations.operation


@pytest.mark.parametrize("residual", [-0.1, 1.5])
def test_a_residual_is_a_share(residual: float) -> None:
    rec = record(Stack(), torch.randn(BATCH, LENGTH, WIDTH))
    with pytest.raises(ArgumentError, match=rf"residual: expected a share in \[0, 1\], got {residual}"):
        rec.rollout([0], residual=residual)


@pytest.mark.parametrize("targets", [[LENGTH], [0, -LENGTH - 1]], ids=str)
def test_targets_that_are_not_there(targets: list[int]) -> None:
    rec = record(Stack(), torch.randn(BATCH, LENGTH, WIDTH))
    with pytest.raises(ArgumentError, match=r"targets: expected token numbers below 11, got \["):
        rec.rollout(targets)


def test_no_layers() -> None:
    rec = record(Stack(), torch.randn(BATCH, LENGTH, WIDTH))
    with pytest.raises(ArgumentError, match="layers: expected at least one"):
        rec.rollout([0], layers=[])


def test_layers_over_other_batches_have_no_rollout() -> None:
    """Windows of an image are a larger batch of shorter sequences; two modules of one length may differ in it too."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.local, self.all = (clearhead.MultiHeadAttention(WIDTH, HEADS) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.all(self.local(x.repeat(3, 1, 1))[: len(x)])

    rec = record(Windows(), torch.randn(BATCH, LENGTH, WIDTH))
    with pytest.raises(
        ShapeError, match=r"layers: expected the same batch size B = 6 in every layer, got B = 2 in layer 1"
    ):
        rec.rollout([0])
    assert rec.rollout([0], layers=["all"]).shape == (BATCH, 1, LENGTH)


def test_cross_attention_has_no_rollout() -> None:
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 16, batch_first=True).eval()
    rec = record(model, torch.randn(BATCH, 7, WIDTH), torch.randn(BATCH, LENGTH, WIDTH))
    with pytest.raises(
        ShapeError, match=r"layers: expected self-attention over the same L = 7.*11 queries and 11 keys"
    ):
        rec.rollout([0])
    assert rec.rollout([0], layers=["encoder.layers.0.self_attn"]).shape == (BATCH, 1, 7)
