"""Small random models from transformers, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.integrations.architectures import VOCABULARY
from tests.support.models import TOKENS, encoder_decoder


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
