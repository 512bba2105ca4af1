"""Models whose attention runs through Clearhead, as functions of (B, L, E)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clearhead
import clearhead.integrations.transformers
from clearhead import masks

from .small_models import small

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 12, 3
HEAD_DIM = WIDTH // HEADS
VOCABULARY = 31


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, mask=masks.causal())


class Checkpointed(Ours):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


def upgraded() -> nn.Module:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    clearhead.upgrade(model)
    return model


def llama() -> Any:
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM}
    model = small("llama", hidden_size=WIDTH, intermediate_size=16, vocab_size=VOCABULARY, **heads)
    model.set_attn_implementation("clearhead")
    return model


class Logits(nn.Module):
    """A transformers model as a function of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).logits


# How to make the model, the name of an attention module in it, and the name of its output projection.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "Clearhead's": (Ours, "attend", "attend.out_proj"),
    "upgraded": (upgraded, "layers.1.self_attn", "layers.1.self_attn.out_proj"),
    "transformers": (Logits, "model.model.layers.0.self_attn", "model.model.layers.0.self_attn.o_proj"),
}
kinds = pytest.mark.parametrize("kind", MODELS)


def made(kind: str) -> tuple[nn.Module, str, nn.Linear, Tensor]:
    make, name, projection = MODELS[kind]
    model = make().double()
    return model, name, model.get_submodule(projection), torch.randn(BATCH, LENGTH, WIDTH).double()
