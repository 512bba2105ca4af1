"""Strided nested tensors in an upgraded `nn.TransformerEncoder`: what PyTorch's fast path gives, and training."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import ShapeError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

E, H, LENGTHS = 22, 2, (5, 3, 7)


def encoder(activation: str = "relu", norm_first: bool = False) -> nn.TransformerEncoder:
    torch.manual_seed(3)
    options: dict[str, Any] = {"activation": activation, "norm_first": norm_first, "dropout": 0.0}
    layer = nn.TransformerEncoderLayer(E, H, 13, batch_first=True, dtype=torch.float64, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    random = torch.Generator().manual_seed(5)
    return [torch.randn(length, E, generator=random, dtype=torch.float64) for length in lengths]


def close(found: Any, expected: Any, atol: float = 1e-10) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=1e-10, atol=atol)


def nested(parts: list[Tensor], **options: Any) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.strided, **options)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("part", ["encoder", "layer", "attention"])
def test_eval_gives_what_pytorchs_fast_path_gives(part: str, activation: str, norm_first: bool) -> None:
    theirs = encoder(activation, norm_first).eval()
    ours = deepcopy(theirs)
    clearhead.upgrade(ours)

    def run(model: nn.TransformerEncoder) -> Tensor:
        x = nested(sequences())
        first: Any = model.layers[0]
        if part == "attention":
            return first.self_attn(x, x, x, need_weights=False)[0]
        return model(x) if part == "encoder" else first(x)

    with torch.no_grad():
        result, expected = run(ours), run(theirs)
    assert result.is_nested
    assert result.layout is torch.strided
    close(result.unbind(), expected.unbind())


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_each_sequence_alone(training: bool) -> None:
    theirs = encoder("gelu").train(training)
    ours = deepcopy(theirs)
    clearhead.upgrade(ours)
    inputs = [x.requires_grad_() for x in sequences()]
    result = ours(nested(inputs))
    sum(item.square().sum() for item in result.unbind()).backward()
    alone = [x.requires_grad_() for x in sequences()]
    expected = [theirs(x[None])[0] for x in alone]
    torch.stack([item.square().sum() for item in expected]).sum().backward()
    close(result.unbind(), expected)
    close([x.grad for x in (*inputs, *ours.parameters())], [x.grad for x in (*alone, *theirs.parameters())], 1e-9)


@pytest.mark.parametrize("lengths", [(3, 0, 5), (5, 5)])
def test_an_empty_sequence_and_one_length_only(lengths: tuple[int, ...]) -> None:
    ours, parts = encoder().eval(), sequences(lengths)
    clearhead.upgrade(ours)
    with torch.no_grad():
        expected = [ours(x[None])[0] if len(x) else x for x in parts]
        close(ours(nested(parts)).unbind(), expected)


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_padded_with_zeros(average: bool) -> None:
    attend = clearhead.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    parts = sequences()
    x = nested(parts)
    weights = attend(x, x, x, average_attn_weights=average)[1]
    assert weights.shape == (3, 7, 7) if average else (3, H, 7, 7)
    for item, part in enumerate(parts):
        n = part.shape[0]
        own = attend(part, part, part, average_attn_weights=average)[1]
        assert torch.allclose(weights[item, ..., :n, :n], own, rtol=0, atol=1e-10)
        assert torch.allclose(weights[item].sum(), own.sum())


def test_what_cannot_run_is_refused_without_advice_to_upgrade() -> None:
    attend = clearhead.nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    x, padding = nested(sequences()), torch.zeros(3, 7, dtype=torch.bool)
    jagged = torch.nested.as_nested_tensor(sequences(), layout=torch.jagged)
    other = nested(sequences())
    for inputs, options, message in (
        ((x, x, x), {"key_padding_mask": padding}, "attn_mask, key_padding_mask: expected none with a nested query"),
        ((jagged, jagged, jagged), {}, "query, key, value: expected plain tensors, or .* nested, torch.jagged"),
        ((x, other, other), {}, "query, key, value: expected plain tensors, or for self-attention one nested tensor"),
    ):
        with pytest.raises(ShapeError, match=message) as raised:
            attend(*inputs, **options)
        assert "upgrade" not in str(raised.value)
    narrow = nested([torch.zeros(4, 3, dtype=torch.float64)])
    with pytest.raises(ShapeError, match=r"query: expected sequences of shape \(L, 22\), got \(4, 3\)"):
        attend(narrow, narrow, narrow)
    with pytest.raises(ShapeError, match="Build the module with batch_first=True"):
        clearhead.nn.MultiheadAttention(E, H, dtype=torch.float64)(x, x, x)
