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


def masked(mask: masks.Mask) -> Callable[[], object]:
    return lambda: attention(Q, K, K, mask & masks.causal())


PAIRS = "expected an even number of features to turn, in pairs, got"
POSITIONS = "positions: expected an int or an integer tensor (L,) or (B, L), got"
GROUPED = "Grouped heads count too: give the number of query heads, not of key/value heads."
HEADS = f"(num_heads=3): expected num_heads = 6, the query's head count H, got 3. {GROUPED}"
DEVICE = "expected a weight on the query's device cpu, got a weight on meta, without values. Load its weight first."
SHAPE = "expected (B, H, L, D) with D = head_dim = 8, got"
START, LENGTHS = "an int ≥ 0, where the first token stands", "expected batch and length of q, (2, Hkv, 5, 8)"
SCALING = "scaling: expected a Scaling such as LinearScaling(factor=2.0), or None"

REFUSED: list[tuple[type[ClearheadError], Callable[[], object], str]] = [
    (ArgumentError, lambda: Rotary(7), f"head_dim: {PAIRS} 7 of head_dim = 7. Choose"),
    (ArgumentError, lambda: Rotary(22, fraction=0.5), f"fraction: {PAIRS} 11 of head_dim = 22."),
    (ArgumentError, lambda: Rotary(22, fraction=0.01), "got 0 of head_dim = 22"),
    (ArgumentError, lambda: Rotary(8, fraction=1.2), "fraction: expected a share in (0, 1]"),
    (ArgumentError, lambda: Rotary(8, fraction=0), "fraction: expected a finite number > 0, got 0"),
    (ArgumentError, lambda: Rotary(0), "head_dim: expected an int ≥ 1, got 0."),
    (ArgumentError, lambda: Rotary(8, base=1), "base: expected a finite number > 1, got 1."),
    (ArgumentError, lambda: Rotary(2, scaling=DynamicNTKScaling(2.0, 8)), "needs at least two pairs. Enlarge head_dim"),
    (ArgumentError, lambda: LinearScaling(0.9), "factor: expected a finite number ≥ 1, got 0.9."),
    (ArgumentError, lambda: YarnScaling(math.inf, 8), "factor: expected a finite number ≥ 1"),
    (ArgumentError, lambda: DynamicNTKScaling(2.0, 0), "original_length: expected an int ≥ 1, got 0."),
    (ArgumentError, lambda: YarnScaling(2.0, 8, 1, 32), "beta_fast: expected at least beta_slow = 32, got 1."),
    (
        ArgumentError,
        lambda: Llama3Scaling(2.0, 8, 4.0, 1.0),
        "high_freq_factor: expected more than low_freq_factor = 4",
    ),
    (
        ArgumentError,
        lambda: YarnScaling(2.0, 8, attention_factor=0.0),
        "attention_factor: expected a finite number > 0",
    ),
    (ArgumentError, lambda: ALiBi(0), "num_heads: expected an int ≥ 1, got 0."),
    (ArgumentError, lambda: RelativeBias(-1), "num_heads: expected an int ≥ 1, got -1."),
    (
        ArgumentError,
        lambda: RelativeBias(2, 7),
        "num_buckets: expected an even number ≥ 4, half for each direction, got",
    ),
    (ArgumentError, lambda: RelativeBias(2, 1, bidirectional=False), "num_buckets: expected an int ≥ 2, got 1."),
    (
        ArgumentError,
        lambda: RelativeBias(2, max_distance=8),
        "max_distance: expected more than 8, the distances that 32",
    ),
    (ArgumentError, rotary(positions=-1), f"positions: expected {START}, got -1. Padding is marked per token, by −1"),
    (ArgumentError, rotary(positions=ints(5) - 2), "positions ≥ 0, or −1 for padding, got -2. Positions count from 0"),
    (DTypeError, lambda: Rotary(8.0), "head_dim: expected an int ≥ 1, got 8.0."),
    (DTypeError, lambda: Rotary(8, scaling={"factor": 2.0}), f"{SCALING}, got dict. rotary_from_config reads"),
    (DTypeError, lambda: Rotary(8, scaling=2.0), "or None, got float."),
    (DTypeError, lambda: ALiBi(True), "num_heads: expected an int ≥ 1, got True."),
    (DTypeError, rotary(Q.long()), "q: expected a float tensor (B, H, L, D), got torch.int64."),
    (DTypeError, rotary(k=[1.0]), "k: expected a float tensor (B, H, L, D), got list."),
    (DTypeError, rotary(positions=torch.arange(5.0)), f"{POSITIONS} torch.float32."),
    (DTypeError, rotary(positions=None), f"{POSITIONS} NoneType."),
    (DTypeError, rotary(positions=True), f"{POSITIONS} bool."),
    (ShapeError, masked(ALiBi(3)), f"mask ALiBi{HEADS}"),
    (ShapeError, masked(RelativeBias(3)), f"mask RelativeBias{HEADS}"),
    (ShapeError, rotary(Q[..., :6]), f"q: {SHAPE} (2, 6, 5, 6)."),
    (ShapeError, rotary(k=K[..., :6]), f"k: {SHAPE} (2, 3, 5, 6)."),
    (ShapeError, rotary(Q[0]), "got (6, 5, 8). clearhead.split_heads turns"),
    (ShapeError, rotary(k=K[:, :, :4]), f"k: {LENGTHS}, got (2, 3, 4, 8). Both are turned by the same positions"),
    (ShapeError, rotary(positions=ints(4)), "shape (5,) or (2, 5), one position per token, got (4,)."),
    (ShapeError, rotary(positions=ints(3, 5)), "got (3, 5)."),
    (ShapeError, rotary(positions=ints(2, 1, 5)), "got (2, 1, 5)."),
    (DeviceError, masked(RelativeBias(6, device="meta")), f"mask RelativeBias(...): {DEVICE}"),
    (DeviceError, rotary(k=K.to("meta")), "k: expected q's device cpu, got meta. Move it with .to('cpu')"),
    (DeviceError, rotary(positions=ints(5).to("meta")), "positions: expected q's device cpu, got meta. Move them with"),
]


@pytest.mark.parametrize(("error", "call", "text"), REFUSED, ids=range(len(REFUSED)))
def test_it_is_refused_in_words(error: type[ClearheadError], call: Callable[[], object], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()
