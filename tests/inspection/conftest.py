"""The model and input of `stacks`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .stacks import BATCH, LENGTH, WIDTH, Stack


@pytest.fixture(name="model")
def _model() -> Stack:
    return Stack()


@pytest.fixture(name="x")
def _x() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)
