"""Small random models from transformers, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.support.models import TOKENS, encoder_decoder

VOCABULARY = 97


def small(kind: str, **settings: Any) -> Any:
    common = {"vocab_size": VOCABULARY, **TOKENS}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=64, **common)
        return enlivened(transformers.GPT2LMHeadModel(config))
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "intermediate_size": 40, "max_position_embeddings": 64}
    return enlivened(transformers.LlamaForCausalLM(transformers.LlamaConfig(**common | sizes | settings)))


def small_bart() -> Any:
    config = transformers.BartConfig(**encoder_decoder(24, 3, 2), vocab_size=VOCABULARY, dropout=0.0)
    return enlivened(transformers.BartForConditionalGeneration(config))


def enlivened(model: Any) -> Any:
    """Random weights large enough that heads prefer some keys over others."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model.eval()


def token_ids(length: int, batch_size: int = 3) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch_size, length))


def padding(side: str, length: int) -> Tensor | None:
    """A tokenizer's attention_mask, 1 = real."""
    if side == "none":
        return None
    lengths = torch.tensor([[length], [length - 4], [length - 2]])
    right = torch.arange(length) < lengths
    return (right if side == "right" else right.flip(-1)).long()
