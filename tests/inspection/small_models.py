"""Small random models of transformers, whose heads prefer some keys over others."""

from __future__ import annotations

from typing import Any

from tests.integrations.architectures import VOCABULARY
from tests.support.models import TOKENS, build, encoder_decoder
from tests.support.randomised import randomised

_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
_MORE = {"head_dim": 8, "intermediate_size": 40, "max_position_embeddings": 64}
SMALL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64}),
    "llama": ("Llama", "ForCausalLM", _SIZES | _MORE),
    "bart": ("Bart", "ForConditionalGeneration", encoder_decoder(24, 3, 2, dropout=0.0)),
}


def small(kind: str, **settings: Any) -> Any:
    stem, head, options = SMALL[kind]
    return randomised(build(stem, head, {"vocab_size": VOCABULARY, **TOKENS, **options, **settings}), 0.3)
