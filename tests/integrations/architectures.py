"""Small random models of many architectures, as a pair: transformers' eager attention, and Clearhead's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY, LENGTH = 97, 11

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}

# model class, configuration class, what differs from SMALL or GROUPED
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral, window": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 5}),
    "gemma2, soft-cap, window": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GROUPED | {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    ),
    "gpt-oss, sinks, window": (
        "GptOssForCausalLM",
        "GptOssConfig",
        GROUPED | {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "llama4, chunks": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        GROUPED | {"attention_chunk_size": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


def make_pair(model_name: str, config_name: str, options: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    """One random model twice, computing with eager attention and with Clearhead's."""
    config = getattr(transformers, config_name)(**options, **more)
    eager = getattr(transformers, model_name)(config).eval()
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(std=0.15)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("clearhead")
    assert ours.config._attn_implementation == "clearhead"
    return eager, ours


def token_ids(length: int = LENGTH, batch_size: int = 3) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch_size, length))


def padding(side: str, length: int = LENGTH) -> Tensor:
    """A tokenizer's attention_mask: the second and third text are shorter, unless the side is ``"none"``."""
    shorter = torch.tensor([[0], [0], [0]] if side == "none" else [[0], [4], [2]])
    right = (torch.arange(length) < length - shorter).long()
    return right.flip(-1) if side == "left" else right


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected number."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()
