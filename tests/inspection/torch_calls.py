"""What `nn.MultiheadAttention` computes from its arguments, for the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from tests.support.statistics_oracle import EVERY, Oracle

BATCH, LENGTH, KEYS, WIDTH, HEADS = 2, 7, 11, 12, 3
EVEN_HEADS = 4  # PyTorch's inference fast path wants an even number
EXACT = 1e-10

modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
kinds = pytest.mark.parametrize("upgraded", [False, True], ids=["torch", "upgraded"])


def record(model: nn.Module, **options: Any) -> clearhead.record:
    return clearhead.record(model, EVERY, **options)


def projected(module: nn.MultiheadAttention, *inputs: Tensor) -> list[Tensor]:
    """Query, key and value as (N, H, length, D), by hand from the module's parameters."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = [0, 0, 0] if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    batch_first = [x if module.batch_first else x.transpose(0, 1) for x in inputs]
    found = [x @ weight.T + bias for x, weight, bias in zip(batch_first, weights, biases, strict=True)]
    for place, learned in ((1, module.bias_k), (2, module.bias_v)):
        if learned is not None:
            found[place] = torch.cat([found[place], learned.expand(found[place].shape[0], 1, -1)], 1)
    if module.add_zero_attn:
        found[1:] = [torch.cat([x, torch.zeros_like(x[:, :1])], 1) for x in found[1:]]
    return [x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in found]


def oracle(module: nn.MultiheadAttention, inputs: tuple[Tensor, Tensor, Tensor], bias: Tensor, counted: Any) -> Oracle:
    """`bias` (N, H, L, S) holds every mask as numbers; appended keys are always visible."""
    query, key, value = projected(module, *inputs)
    bias = torch.nn.functional.pad(bias, (0, key.shape[2] - bias.shape[-1]))
    return Oracle(query, key, bias > -torch.inf, value, bias, counted=counted)


def padding(length: int) -> Tensor:
    """(N, length), True = padding, at the end of the second item."""
    return torch.arange(length) >= torch.tensor([[length], [length - 3]])
