"""A small model of Clearhead's modules and its input, and checks of records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from tests.support.snapshots import observers
from tests.support.statistics_oracle import EVERY

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 12, 4
CAUSAL = clearhead.masks.causal()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, mask=CAUSAL)


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


NAMES = [f"blocks.{number}.attend" for number in range(3)]


@pytest.fixture(name="model")
def _model() -> Stack:
    return Stack()


@pytest.fixture(name="x")
def _x() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


def hooks(model: nn.Module) -> list[str]:
    """Names of all dictionaries of hooks that hold something."""
    return [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if "hooks" in attribute and isinstance(value, Mapping) and value
    ]


def recorded(model: nn.Module, *calls: Any, **options: Any) -> clearhead.record:
    """The record of calls with these inputs; a dictionary holds keyword arguments."""
    with clearhead.record(model, **options) as rec:
        for inputs in calls:
            model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return rec


def nothing_left(model: nn.Module) -> bool:
    """Whether a model has no hooks, and this thread no observers and no function modes."""
    return not (hooks(model) or observers() or torch.overrides._get_current_function_mode_stack())


def require_same_training(model: nn.Module, loss: Callable[[], Tensor]) -> None:
    """A step inside a record has the same gradients as outside, bit for bit and with the same dropout."""
    gradients: list[list[Tensor | None]] = []
    for around in (nullcontext(), clearhead.record(model, EVERY)):
        model.zero_grad()
        torch.manual_seed(5)
        with around as rec:
            loss().backward()
        if rec is not None:
            assert all(len(calls) == 1 and not calls.entropy.requires_grad for calls in rec.values())
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
