"""What the tests of encoders without padding observe."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from transformers import AttentionInterface

from clearhead.integrations import _deberta
from clearhead.integrations import transformers as integration
from clearhead.kernels._disentangled import disentangled_attention


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

    def disentangled(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        computed.batches.append(query.shape[0])
        return disentangled_attention(query, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "clearhead", attend)
    monkeypatch.setattr(_deberta, "disentangled_attention", disentangled)
    return computed
