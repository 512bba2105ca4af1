"""What latent attention refuses, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from clearhead import masks
from clearhead._latent import MultiHeadLatentAttention
from clearhead.errors import ArgumentError, DTypeError, MaskTypeError, ShapeError

from .by_hand import NOPE, RANK, ROPE, VALUE, B, E, H, module, tokens

SIZES: dict[str, Any] = {
    "embed_dim": E,
    "num_heads": H,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}


@pytest.mark.parametrize("name", [*SIZES, "q_lora_rank"])
def test_sizes_that_are_none(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: expected an int ≥ 1, got 0."):
        MultiHeadLatentAttention(**(SIZES | {name: 0}))
    with pytest.raises(DTypeError, match=f"{name}: expected an int ≥ 1, got 2.0."):
        MultiHeadLatentAttention(**(SIZES | {name: 2.0}))


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"q_norm": nn.Identity()}, ArgumentError, "q_norm: expected None without q_lora_rank, got Identity."),
        ({"kv_norm": 3}, DTypeError, "kv_norm: expected a torch.nn.Module, got int."),
        ({"dropout": 1.5}, ArgumentError, "dropout: expected a probability in [0, 1], got 1.5"),
        ({"scale": float("nan")}, ArgumentError, "scale: expected a finite number, got nan"),
        ({"position": masks.causal()}, MaskTypeError, "position: expected what rotates q and k, got causal()."),
        ({"mask": torch.ones(3, 3).bool()}, MaskTypeError, "mask: expected a clearhead Mask, got Tensor."),
    ],
)
def test_parts_that_do_not_fit(options: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error) as raised:
        MultiHeadLatentAttention(**SIZES, **options)
    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize(
    ("inputs", "error", "problem"),
    [
        ((torch.randn(2, 3, 5),), ShapeError, "query: expected (B, length, 17), or (length, 17) without a batch, got "),
        ((tokens(), torch.randn(B, 3, 5)), ShapeError, "key: expected (B, length, 17), or (length, 17) without"),
        ((tokens(), tokens()[:1]), ShapeError, "query, key: expected equal batch sizes B, or no batch, got query (2, "),
        ((tokens(), tokens(), tokens()), ArgumentError, "value: expected the same tensor as key, or None, got another"),
        ((tokens(), None, tokens()), ArgumentError, "value: expected the same tensor as key, or None, got a tensor, "),
        ((tokens(), tokens(4)), ShapeError, "key: expected the query's length 11: a position part rotates both"),
        ((tokens().float(),), DTypeError, "query: expected the module's dtype torch.float64, got torch.float32."),
        (
            (torch.nested.nested_tensor([torch.randn(n, E) for n in (3, 2)], layout=torch.jagged),),
            ShapeError,
            "query: expected a padded tensor (B, length, 17), got a nested one. Use torch.nested.to_padded_tensor(",
        ),
        (("words",), DTypeError, "query: expected a torch.Tensor, got str."),
    ],
)
def test_inputs_that_do_not_fit(inputs: tuple[Any, ...], error: type[Exception], problem: str) -> None:
    with pytest.raises(error) as raised:
        module()(*inputs)
    assert str(raised.value).startswith(problem)
