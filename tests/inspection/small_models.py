"""Small random models from transformers, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

__all__ = ["VOCABULARY", "enlivened", "padding", "small", "small_bart", "token_ids"]

VOCABULARY = 97


def small(kind: str) -> Any:
    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=40,
            max_position_embeddings=64,
            **common,
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=64, **common)
        model = transformers.GPT2LMHeadModel(config)
    return enlivened(model)


def small_bart() -> Any:
    config = transformers.BartConfig(
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=3,
        decoder_attention_heads=3,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        dropout=0.0,
    )
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
