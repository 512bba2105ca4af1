"""What the tests of encoders without padding observe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from clearhead._encoder.layers import LeanLayers
from clearhead.integrations import _deberta
from clearhead.integrations import transformers as integration
from clearhead.kernels._disentangled import disentangled_attention

RUN = LeanLayers.run


class Rows:
    """What was computed: batch sizes, 1 if padding was removed, and the dtypes of the loops over all layers."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.dtypes: list[torch.dtype] = []

    @property
    def lean(self) -> bool:
        """Whether the layers ran in one loop since the last question, and nothing else did."""
        is_lean = len(self.dtypes) == len(self.batches) > 0
        self.batches.clear(), self.dtypes.clear()
        return is_lean

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

    def run(layers: LeanLayers, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        computed.batches.append(x.shape[0])
        computed.dtypes.append(layers.dtype)
        return RUN(layers, x, *args, **kwargs)

    def disentangled(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        computed.batches.append(query.shape[0])
        return disentangled_attention(query, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "clearhead", attend)
    monkeypatch.setattr(LeanLayers, "run", run)
    monkeypatch.setattr(_deberta, "disentangled_attention", disentangled)
    return computed


@pytest.fixture
def exact_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let XLM's and Flaubert's own attention, which rounds its scores to float32, be exact in float64."""
    rounded = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else rounded(x))
