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
Refused = tuple[Callable[[], object], type[ClearheadError], str]


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

REFUSED: dict[str, Refused] = {
    "odd head_dim": (lambda: Rotary(7), ArgumentError, f"head_dim: {PAIRS} 7 of head_dim = 7. Choose"),
    "odd fraction": (lambda: Rotary(22, fraction=0.5), ArgumentError, f"fraction: {PAIRS} 11 of head_dim = 22."),
    "no feature": (lambda: Rotary(22, fraction=0.01), ArgumentError, "got 0 of head_dim = 22"),
    "fraction of 1.2": (lambda: Rotary(8, fraction=1.2), ArgumentError, "fraction: expected a share in (0, 1]"),
    "fraction of 0": (lambda: Rotary(8, fraction=0), ArgumentError, "fraction: expected a finite number > 0, got 0"),
    "head_dim of 0": (lambda: Rotary(0), ArgumentError, "head_dim: expected an int ≥ 1, got 0."),
    "head_dim of 8.0": (lambda: Rotary(8.0), DTypeError, "head_dim: expected an int ≥ 1, got float."),
    "base of 1": (lambda: Rotary(8, base=1), ArgumentError, "base: expected a finite number > 1, got 1."),
    "scaling by a dict": (
        lambda: Rotary(8, scaling={"factor": 2.0}),
        DTypeError,
        "scaling: expected a Scaling such as LinearScaling(factor=2.0), or None, got dict. rotary_from_config reads",
    ),
    "scaling by a number": (lambda: Rotary(8, scaling=2.0), DTypeError, "or None, got float."),
    "dynamic, one pair": (
        lambda: Rotary(2, scaling=DynamicNTKScaling(2.0, 8)),
        ArgumentError,
        "whose exponent size / (size − 2) needs at least two pairs. Enlarge head_dim or fraction",
    ),
    "factor below 1": (lambda: LinearScaling(0.9), ArgumentError, "factor: expected a finite number ≥ 1, got 0.9."),
    "factor of ∞": (lambda: YarnScaling(math.inf, 8), ArgumentError, "factor: expected a finite number ≥ 1"),
    "length of 0": (lambda: DynamicNTKScaling(2.0, 0), ArgumentError, "original_length: expected an int ≥ 1, got 0."),
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
    "attention factor of 0": (
        lambda: YarnScaling(2.0, 8, attention_factor=0.0),
        ArgumentError,
        "attention_factor: expected a finite number > 0, got 0.0.",
    ),
    "ALiBi(0)": (lambda: ALiBi(0), ArgumentError, "num_heads: expected an int ≥ 1, got 0."),
    "ALiBi(True)": (lambda: ALiBi(True), DTypeError, "num_heads: expected an int ≥ 1, got bool."),
    "RelativeBias(0)": (lambda: RelativeBias(0), ArgumentError, "num_heads: expected an int ≥ 1, got 0."),
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
    "ALiBi, other heads": (attend(ALiBi(3)), ShapeError, f"mask ALiBi{HEADS}"),
    "RelativeBias, other heads": (attend(RelativeBias(3)), ShapeError, f"mask RelativeBias{HEADS}"),
    "other device": (attend(RelativeBias(6, device="meta")), DeviceError, f"mask RelativeBias(...): {DEVICE}"),
    "q, head_dim": (rotary(Q[..., :6]), ShapeError, f"q: {SHAPE} (2, 6, 5, 6)."),
    "k, head_dim": (rotary(k=K[..., :6]), ShapeError, f"k: {SHAPE} (2, 3, 5, 6)."),
    "no batch": (rotary(Q[0]), ShapeError, "got (6, 5, 8). clearhead.split_heads turns"),
    "integers": (rotary(Q.long()), DTypeError, "q: expected a float tensor (B, H, L, D), got torch.int64."),
    "list": (rotary(k=[1.0]), DTypeError, "k: expected a float tensor (B, H, L, D), got list."),
    "k, length": (
        rotary(k=K[:, :, :4]),
        ShapeError,
        "k: expected batch and length of q, (2, Hkv, 5, 8), got (2, 3, 4, 8). Both are turned by the same positions",
    ),
    "k, device": (rotary(k=K.to("meta")), DeviceError, "k: expected q's device cpu, got meta. Move it with .to('cpu')"),
    "position −1": (
        rotary(positions=-1),
        ArgumentError,
        "positions: expected an int ≥ 0, where the first token stands, got -1. Padding is marked per token, by −1",
    ),
    "position −2": (
        rotary(positions=torch.tensor([0, 1, -2, 3, 4])),
        ArgumentError,
        "positions: expected positions ≥ 0, or −1 for padding, got -2. Positions count from 0",
    ),
    "four positions": (
        rotary(positions=torch.arange(4)),
        ShapeError,
        "positions: expected an int or shape (5,) or (2, 5), one position per token, got (4,).",
    ),
    "positions, batch": (rotary(positions=ints(3, 5)), ShapeError, "got (3, 5)."),
    "3-D positions": (rotary(positions=ints(2, 1, 5)), ShapeError, "got (2, 1, 5)."),
    "float positions": (rotary(positions=torch.arange(5.0)), DTypeError, f"{POSITIONS} torch.float32."),
    "no positions": (rotary(positions=None), DTypeError, f"{POSITIONS} NoneType."),
    "bool position": (rotary(positions=True), DTypeError, f"{POSITIONS} bool."),
    "positions, device": (
        rotary(positions=torch.arange(5, device="meta")),
        DeviceError,
        "positions: expected q's device cpu, got meta. Move them with .to('cpu').",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_words(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=re.escape(text)):
        call()
