"""Errors of position parts: they name the argument, what was expected, what came, and a fix."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import attention, masks
from clearhead.errors import ArgumentError, ClearheadError, DeviceError, DTypeError, ShapeError
from clearhead.positions import (
    ALiBi,
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    RelativeBias,
    Rotary,
    YarnScaling,
)

Q, K = torch.zeros(2, 6, 5, 8), torch.zeros(2, 3, 5, 8)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def rotary(q: Any = Q, k: Any = K, positions: Any = 0) -> Callable[[], object]:
    return lambda: Rotary(8)(q, k, positions)


def attend(mask: masks.Mask) -> Callable[[], object]:
    return lambda: attention(Q, K, K, mask & masks.causal())


PAIRS = "expected an even number of features to turn, in pairs, got"
POSITIONS = "positions: expected an int or an integer tensor (L,) or (B, L), got"
GROUPED = "Grouped heads count too: give the number of query heads, not of key/value heads."
HEADS = f"(num_heads=3): expected num_heads = 6, the query's head count H, got 3. {GROUPED}"
DEVICE = "expected weights on cpu, like query, got weights on meta. Move it with .to('cpu')."
SHAPE = "expected (B, H, L, D) with D = head_dim = 8, got"
START, LENGTHS = "an int ≥ 0, where the first token stands", "expected batch and length of q, (2, Hkv, 5, 8)"
SCALING = "expected a Scaling such as LinearScaling(factor=2.0), or None"

REFUSED: dict[type[ClearheadError], dict[str, Callable[[], object]]] = {
    ArgumentError: {
        f"head_dim: {PAIRS} 7 of head_dim = 7. Choose": lambda: Rotary(7),
        f"fraction: {PAIRS} 11 of head_dim = 22.": lambda: Rotary(22, fraction=0.5),
        "got 0 of head_dim = 22": lambda: Rotary(22, fraction=0.01),
        "fraction: expected a share in (0, 1]": lambda: Rotary(8, fraction=1.2),
        "fraction: expected a finite number > 0, got 0": lambda: Rotary(8, fraction=0),
        "head_dim: expected an int ≥ 1, got 0.": lambda: Rotary(0),
        "base: expected a finite number > 1, got 1.": lambda: Rotary(8, base=1),
        "whose exponent size / (size − 2) needs at least two pairs. Enlarge head_dim or fraction": lambda: Rotary(
            2, scaling=DynamicNTKScaling(2.0, 8)
        ),
        "factor: expected a finite number ≥ 1, got 0.9.": lambda: LinearScaling(0.9),
        "factor: expected a finite number ≥ 1": lambda: YarnScaling(math.inf, 8),
        "original_length: expected an int ≥ 1, got 0.": lambda: DynamicNTKScaling(2.0, 0),
        "beta_fast: expected at least beta_slow = 32, got 1.": lambda: YarnScaling(2.0, 8, beta_fast=1, beta_slow=32),
        "high_freq_factor: expected more than low_freq_factor = 4, got 1.": lambda: Llama3Scaling(2.0, 8, 4.0, 1.0),
        "attention_factor: expected a finite number > 0, got 0.0.": lambda: YarnScaling(2.0, 8, attention_factor=0.0),
        "num_heads: expected an int ≥ 1, got 0.": lambda: ALiBi(0),
        "num_heads: expected an int ≥ 1, got -1.": lambda: RelativeBias(-1),
        "num_buckets: expected an even number ≥ 4, half for each direction, got 7.": lambda: RelativeBias(
            2, num_buckets=7
        ),
        "num_buckets: expected an int ≥ 2, got 1.": lambda: RelativeBias(2, num_buckets=1, bidirectional=False),
        "max_distance: expected more than 8, the distances that 32 buckets tell apart one by one, got 8.": lambda: (
            RelativeBias(2, max_distance=8)
        ),
        f"positions: expected {START}, got -1. Padding is marked per token, by −1": rotary(positions=-1),
        "positions: expected positions ≥ 0, or −1 for padding, got -2. Positions count from 0": rotary(
            positions=torch.tensor([0, 1, -2, 3, 4])
        ),
    },
    DTypeError: {
        "head_dim: expected an int ≥ 1, got 8.0.": lambda: Rotary(8.0),
        f"scaling: {SCALING}, got dict. rotary_from_config reads": lambda: Rotary(8, scaling={"factor": 2.0}),
        "or None, got float.": lambda: Rotary(8, scaling=2.0),
        "num_heads: expected an int ≥ 1, got True.": lambda: ALiBi(True),
        "q: expected a float tensor (B, H, L, D), got torch.int64.": rotary(Q.long()),
        "k: expected a float tensor (B, H, L, D), got list.": rotary(k=[1.0]),
        f"{POSITIONS} torch.float32.": rotary(positions=torch.arange(5.0)),
        f"{POSITIONS} NoneType.": rotary(positions=None),
        f"{POSITIONS} bool.": rotary(positions=True),
    },
    ShapeError: {
        f"mask ALiBi{HEADS}": attend(ALiBi(3)),
        f"mask RelativeBias{HEADS}": attend(RelativeBias(3)),
        f"q: {SHAPE} (2, 6, 5, 6).": rotary(Q[..., :6]),
        f"k: {SHAPE} (2, 3, 5, 6).": rotary(k=K[..., :6]),
        "got (6, 5, 8). clearhead.split_heads turns": rotary(Q[0]),
        f"k: {LENGTHS}, got (2, 3, 4, 8). Both are turned by the same positions": rotary(k=K[:, :, :4]),
        "positions: expected an int or shape (5,) or (2, 5), one position per token, got (4,).": rotary(
            positions=torch.arange(4)
        ),
        "got (3, 5).": rotary(positions=ints(3, 5)),
        "got (2, 1, 5).": rotary(positions=ints(2, 1, 5)),
    },
    DeviceError: {
        f"mask RelativeBias(...): {DEVICE}": attend(RelativeBias(6, device="meta")),
        "k: expected q's device cpu, got meta. Move it with .to('cpu')": rotary(k=K.to("meta")),
        "positions: expected q's device cpu, got meta. Move them with .to('cpu').": rotary(
            positions=torch.arange(5, device="meta")
        ),
    },
}


@pytest.mark.parametrize(("error", "text"), [(error, text) for error, calls in REFUSED.items() for text in calls])
def test_it_is_refused_in_words(error: type[ClearheadError], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        REFUSED[error][text]()
