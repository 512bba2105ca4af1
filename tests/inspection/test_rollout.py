"""Attention rollout, compared with explicit products of L × L matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.errors import ShapeError
from tests.support.allocations import Allocations
from tests.support.statistics_oracle import Oracle

BATCH, LENGTH, WIDTH, HEADS = 2, 11, 12, 6


def stack(layer_masks: Sequence[masks.Mask | None] = (None,) * 3) -> nn.Module:
    """Layers with different masks. The second one has grouped heads."""
    kv_heads = zip((HEADS, HEADS // 2, HEADS), layer_masks, strict=True)
    layers = (clearhead.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=heads, mask=mask) for heads, mask in kv_heads)
    return nn.Sequential(*layers)


def record(model: nn.Module, *inputs: Tensor) -> clearhead.record:
    inputs = inputs or (torch.randn(BATCH, LENGTH, WIDTH, dtype=next(model.parameters()).dtype),)
    with torch.no_grad(), clearhead.record(model, ("entropy",), keep="queries_keys") as rec:
        model(*inputs)
    return rec


def explicit(rec: clearhead.record, visible: Sequence[Tensor], residual: float, **options: Any) -> Tensor:
    """The L × L matrix (B, L, L) of one stack, in float64."""
    identity = torch.eye(LENGTH, dtype=torch.float64)
    result = identity.expand(BATCH, LENGTH, LENGTH)
    for number, mask in enumerate(visible):
        call = rec.kept_call(number)
        attention = Oracle(call.query, call.key, mask.expand(BATCH, HEADS, LENGTH, LENGTH), **options).p.mean(1)
        result = (residual * identity + (1 - residual) * attention) @ result
    return result


def close(result: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=atol)


PADDED = torch.arange(LENGTH).expand(BATCH, LENGTH) < torch.tensor([[LENGTH], [LENGTH - 4]])
EVERYTHING, LOWER = torch.ones(1, 1, LENGTH, LENGTH).bool(), torch.ones(1, 1, LENGTH, LENGTH).tril().bool()
KEYS = PADDED[:, None, None, :]
PATTERNS: dict[str, tuple[tuple[masks.Mask | None, ...], tuple[Tensor, ...]]] = {
    "full": ((None,) * 3, (EVERYTHING,) * 3),
    "mixed": ((masks.causal(), None, masks.keep(keys=PADDED)), (LOWER, EVERYTHING, KEYS)),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("residual", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("blocks", ["few", "many"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
def test_equals_products_of_matrices(
    pattern: str, residual: float, blocks: str, dtype: torch.dtype, tolerance: float, request: pytest.FixtureRequest
) -> None:
    if blocks == "many":
        request.getfixturevalue("small_blocks")
    layer_masks, visible = PATTERNS[pattern]
    rec, targets = record(stack(layer_masks).to(dtype)), [0, 7, -1]
    result = rec.rollout(targets, residual=residual)
    close(result, explicit(rec, visible, residual)[:, targets], tolerance)
    close(result.sum(-1), torch.ones(BATCH, 3).double(), 1e-5)


@pytest.mark.parametrize("targets", [[4], (4,), torch.tensor([4]), torch.tensor(4), [4 - LENGTH]], ids=str)
def test_forms_of_targets(targets: Any) -> None:
    rec = record(stack())
    torch.testing.assert_close(rec.rollout(targets), rec.rollout(range(LENGTH))[:, [4]])


def test_some_layers_by_number_or_name() -> None:
    rec = record(stack())
    first = rec.rollout(range(LENGTH), layers=["0"], residual=0.25)
    others = rec.rollout(range(LENGTH), layers=[1, 2], residual=0.25)
    torch.testing.assert_close(others @ first, rec.rollout(range(LENGTH), residual=0.25), rtol=0, atol=1e-6)


def test_the_mass_of_a_sink_is_lost() -> None:
    class WithSinks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            heads = clearhead.split_heads(x, HEADS)
            return clearhead.merge_heads(clearhead.attention(heads, heads, heads, sinks=torch.ones(HEADS)))

    rec = record(WithSinks(1, 1))
    result = rec.rollout(range(LENGTH), residual=0.0)
    close(result, explicit(rec, (EVERYTHING,), 0.0, sinks=torch.ones(HEADS)))
    assert bool((result.sum(-1) < 1).all())


def test_no_matrix_of_all_tokens_is_built() -> None:
    length = 3001
    rec = record(stack((masks.causal(),) * 3), torch.randn(1, length, WIDTH))
    with Allocations() as allocations:
        assert rec.rollout([-1, 17]).shape == (1, 2, length)
    # One block of scores in float64 is 8 MiB. The matrix of one head would be 36 MB.
    assert allocations.largest < length * length * 4 / 2, allocations.operation


class Windows(nn.Module):
    """Windows of an image are a larger batch."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.all = (clearhead.MultiHeadAttention(WIDTH, HEADS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.local(x.repeat(3, 1, 1))[: len(x)])


def test_only_layers_over_the_same_tokens_have_a_rollout() -> None:
    rec = record(Windows())
    text = r"layers: expected the same batch size B = 6 in every layer, got B = 2 in layer 1"
    with pytest.raises(ShapeError, match=text):
        rec.rollout([0])
    assert rec.rollout([0], layers=["all"]).shape == (BATCH, 1, LENGTH)
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 16, batch_first=True).eval()
    rec = record(model, torch.randn(BATCH, 7, WIDTH), torch.randn(BATCH, LENGTH, WIDTH))
    with pytest.raises(ShapeError, match=r"layers: expected self-attention over the same L = 7.*11 queries and 11 k"):
        rec.rollout([0])
    assert rec.rollout([0], layers=["encoder.layers.0.self_attn"]).shape == (BATCH, 1, 7)


def test_another_default_device_changes_nothing() -> None:
    torch.manual_seed(0)
    rec = record(stack().eval())
    expected = rec.rollout([0, 3]), rec.weights(0, queries=[1])
    with torch.device("meta"):
        results = rec.rollout([0, 3]), rec.weights(0, queries=[1])
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=0, atol=0)
