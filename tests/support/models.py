"""Settings of small models of transformers."""

from __future__ import annotations

from typing import Any

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
#: Three rows and columns of patches.
VIT: dict[str, Any] = {
    **{"hidden_size": 35, "num_attention_heads": 5, "num_hidden_layers": 2, "intermediate_size": 29},
    **{"image_size": 12, "patch_size": 4},
}


def encoder_decoder(size: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    """Of BART's kind, with as many layers on both sides."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": size}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    return {"d_model": size, **sides, **TOKENS, "decoder_start_token_id": 2, **more}


def minilm() -> str:
    """The folder of a sentence encoder with 6 layers of 12 heads."""
    from clearhead.cli._demo import default_model_path

    return str(default_model_path())
