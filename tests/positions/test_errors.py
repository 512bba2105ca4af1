"""What position parts refuse, and that they say the argument, what was expected, what came and what to do."""

from __future__ import annotations

import re

import pytest
import torch

import clearhead
from clearhead import masks
from clearhead.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from clearhead.positions import (
    ALiBi,
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    RelativeBias,
    Rotary,
    YarnScaling,
)

MADE = {
    "odd head_dim": (
        lambda: Rotary(7),
        ArgumentError,
        "head_dim: expected an even number of features to turn, in pairs, got 7 of head_dim = 7. Choose",
    ),
    "odd fraction": (lambda: Rotary(22, fraction=0.5), ArgumentError, "fraction: expected an even number of features"),
    "nothing to turn": (lambda: Rotary(22, fraction=0.01), ArgumentError, "got 0 of head_dim = 22"),
    "fraction above one": (lambda: Rotary(8, fraction=1.2), ArgumentError, "fraction: expected a share in (0, 1]"),
    "fraction of zero": (lambda: Rotary(8, fraction=0), ArgumentError, "fraction: expected a finite number > 0, got 0"),
    "head_dim of zero": (lambda: Rotary(0), ArgumentError, "head_dim: expected an int ≥ 1, got 0."),
    "head_dim of another type": (lambda: Rotary(8.0), DTypeError, "head_dim: expected an int ≥ 1, got float."),
    "base of one": (lambda: Rotary(8, base=1), ArgumentError, "base: expected a finite number > 1, got 1."),
    "scaling from a dictionary": (
        lambda: Rotary(8, scaling={"factor": 2.0}),
        DTypeError,
        "scaling: expected a Scaling such as LinearScaling(factor=2.0), or None, got dict. rotary_from_config reads",
    ),
    "scaling by a number": (lambda: Rotary(8, scaling=2.0), DTypeError, "or None, got float."),
    "dynamic scaling of one pair": (
        lambda: Rotary(2, scaling=DynamicNTKScaling(2.0, 8)),
        ArgumentError,
        "whose exponent size / (size − 2) needs at least two pairs. Enlarge head_dim or fraction",
    ),
    "factor below one": (lambda: LinearScaling(0.9), ArgumentError, "factor: expected a finite number ≥ 1, got 0.9."),
    "factor of infinity": (lambda: YarnScaling(float("inf"), 8), ArgumentError, "factor: expected a finite number ≥ 1"),
    "no original length": (
        lambda: DynamicNTKScaling(2.0, 0),
        ArgumentError,
        "original_length: expected an int ≥ 1, got 0.",
    ),
    "betas exchanged": (
        lambda: YarnScaling(2.0, 8, beta_fast=1, beta_slow=32),
        ArgumentError,
        "beta_fast: expected at least beta_slow = 32, got 1.",
    ),
    "frequency factors exchanged": (
        lambda: Llama3Scaling(2.0, 8, 4.0, 1.0),
        ArgumentError,
        "high_freq_factor: expected more than low_freq_factor = 4, got 1.",
    ),
    "attention factor of zero": (
        lambda: YarnScaling(2.0, 8, attention_factor=0.0),
        ArgumentError,
        "attention_factor: expected a finite number > 0, got 0.0.",
    ),
    "no heads": (lambda: ALiBi(0), ArgumentError, "num_heads: expected an int ≥ 1, got 0."),
    "heads of another type": (lambda: ALiBi(True), DTypeError, "num_heads: expected an int ≥ 1, got bool."),
    "no heads of a table": (lambda: RelativeBias(0), ArgumentError, "num_heads: expected an int ≥ 1, got 0."),
    "odd buckets": (
        lambda: RelativeBias(2, num_buckets=7),
        ArgumentError,
        "num_buckets: expected an even number ≥ 4, half for each direction, got 7.",
    ),
    "one bucket": (
        lambda: RelativeBias(2, num_buckets=1, bidirectional=False),
        ArgumentError,
        "num_buckets: expected an int ≥ 2, got 1.",
    ),
    "short distances": (
        lambda: RelativeBias(2, max_distance=8),
        ArgumentError,
        "max_distance: expected more than 8, the distances that 32 buckets tell apart one by one, got 8.",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_what_cannot_be_made(name: str) -> None:
    make, error, text = MADE[name]
    with pytest.raises(error, match=re.escape(text)):
        make()


Q, K = torch.zeros(2, 6, 5, 8), torch.zeros(2, 3, 5, 8)

CALLS = {
    "another head_dim": ((Q[..., :6], K, 0), ShapeError, "q: expected (B, H, L, D) with D = head_dim = 8, got"),
    "keys of another head_dim": ((Q, K[..., :6], 0), ShapeError, "k: expected (B, H, L, D) with D = head_dim = 8"),
    "heads not split": ((Q[0], K, 0), ShapeError, "got (6, 5, 8). clearhead.split_heads turns"),
    "integers": ((Q.long(), K, 0), DTypeError, "q: expected a float tensor (B, H, L, D), got torch.int64."),
    "lists": ((Q, [1.0], 0), DTypeError, "k: expected a float tensor (B, H, L, D), got list."),
    "keys of another length": (
        (Q, K[:, :, :4], 0),
        ShapeError,
        "k: expected batch and length of q, (2, Hkv, 5, 8), got (2, 3, 4, 8). Both are turned by the same positions",
    ),
    "negative start": (
        (Q, K, -1),
        ArgumentError,
        "positions: expected an int ≥ 0, where the first token stands, got -1. Padding is marked per token, by −1",
    ),
    "positions below padding": (
        (Q, K, torch.tensor([0, 1, -2, 3, 4])),
        ArgumentError,
        "positions: expected positions ≥ 0, or −1 for padding, got -2. Positions count from 0",
    ),
    "too few positions": (
        (Q, K, torch.arange(4)),
        ShapeError,
        "positions: expected an int or shape (5,) or (2, 5), one position per token, got (4,).",
    ),
    "positions of another batch": ((Q, K, torch.zeros(3, 5, dtype=torch.long)), ShapeError, "got (3, 5)."),
    "positions of three dimensions": ((Q, K, torch.zeros(2, 1, 5, dtype=torch.long)), ShapeError, "got (2, 1, 5)."),
    "float positions": (
        (Q, K, torch.arange(5.0)),
        DTypeError,
        "positions: expected an int or an integer tensor (L,) or (B, L), got torch.float32.",
    ),
    "no positions": ((Q, K, None), DTypeError, "integer tensor (L,) or (B, L), got NoneType."),
    "a bool for a position": ((Q, K, True), DTypeError, "integer tensor (L,) or (B, L), got bool."),
    "positions elsewhere": (
        (Q, K, torch.arange(5, device="meta")),
        DeviceError,
        "positions: expected q's device cpu, got meta. Move them with .to('cpu').",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_turned(name: str) -> None:
    arguments, error, text = CALLS[name]
    with pytest.raises(error, match=re.escape(text)):
        Rotary(8)(*arguments)


@pytest.mark.parametrize("mask", [ALiBi(3), RelativeBias(3)], ids=["ALiBi", "RelativeBias"])
def test_a_mask_made_for_another_number_of_heads(mask: masks.Mask) -> None:
    name = type(mask).__name__
    text = (
        f"mask {name}(num_heads=3): expected num_heads = 6, the query's head count H, got 3. Grouped heads count too: "
        "give the number of query heads, not of key/value heads."
    )
    with pytest.raises(ShapeError, match=re.escape(text)):
        clearhead.attention(Q, K, K, mask & masks.causal())


def test_a_table_on_another_device() -> None:
    text = "mask RelativeBias(...): expected weights on cpu, like query, got weights on meta. Move it with .to('cpu')."
    with pytest.raises(DeviceError, match=re.escape(text)):
        clearhead.attention(Q, K, K, RelativeBias(6, device="meta"))
