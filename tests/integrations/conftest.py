"""What the tests of encoders without padding observe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from clearhead.integrations import transformers as integration


class Rows:
    """Batch sizes of the attention that was computed: 1 if padding was removed."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    @property
    def unpadded(self) -> bool:
        (size,) = set(self.batches)
        self.batches.clear()
        return size == 1


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    computed = Rows()

    def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        computed.batches.append(query.shape[0])
        return integration.attention_forward(module, query, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "clearhead", attend)
    return computed


@pytest.fixture
def exact_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let XLM's and Flaubert's own attention, which rounds its scores to float32, be exact in float64."""
    rounded = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else rounded(x))
