"""The latent attention of transformers' DeepSeek models."""

from __future__ import annotations

import math
from typing import Any

from .._latent import MultiHeadLatentAttention
from ..errors import ArgumentError
from ..positions import rotary_from_config
from ._blocks import StoredLayer, report
from ._tensors import copied

#: The names of transformers and of the original checkpoints, by Clearhead's names.
_NAMES = {
    "q_proj.down": "q_a_proj",
    "q_proj.norm": "q_a_layernorm",
    "q_proj.up": "q_b_proj",
    "q_proj": "q_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out_proj": "o_proj",
}


def latent(layer: StoredLayer) -> MultiHeadLatentAttention:
    """Latent attention with copies of the layer's tensors. Its scale contains YaRN's squared ``mscale_all_dim``."""
    module = _empty(layer)
    ours = module.state_dict()
    theirs = {name: f"{_NAMES[stem]}.{kind}" for name in ours for stem, _, kind in [name.rpartition(".")]}
    layer.require(list(theirs.values()))
    copies = {name: copied(layer.tensor(theirs[name], tuple(tensor.shape))) for name, tensor in ours.items()}
    layer.require_nothing_left()
    module.load_state_dict(copies, assign=True)
    module.to(copies["kv_up.weight"].device)
    lines = [
        f"{layer.config.model_type}, latent attention",
        f"  weights: {', '.join(theirs.values())} (under {layer.prefix!r})",
        f"  heads: {module.num_heads}, latent {module.kv_lora_rank}, rotary {module.qk_rope_head_dim}",
        f"  position: {module.position}",
        f"  scale: {module.scale:g}",
    ]
    report(module, lines, causal=True)
    return module


def _empty(layer: StoredLayer) -> MultiHeadLatentAttention:
    """The module that the configuration describes, with parameters on ``"meta"``."""
    heads, kv_heads = layer.setting("num_attention_heads"), layer.setting("num_key_value_heads")
    if kv_heads not in (None, heads):
        expected = f"num_attention_heads = {heads}, for every head has keys of its own"
        raise ArgumentError("config.num_key_value_heads", expected=expected, got=repr(kv_heads))
    unrotated, rotary = layer.setting("qk_nope_head_dim"), layer.setting("qk_rope_head_dim")
    position = rotary_from_config(
        layer.setting("rope_parameters"),
        rotary,
        max_position_embeddings=layer.setting("max_position_embeddings"),
        # DeepSeek-V2 has no such setting and always pairs neighbours.
        interleaved=layer.config.model_type == "deepseek_v2" or bool(layer.setting("rope_interleave")),
    )
    return MultiHeadLatentAttention(
        layer.setting("hidden_size"),
        heads,
        **{name: layer.setting(name) for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")},
        qk_nope_head_dim=unrotated,
        qk_rope_head_dim=rotary,
        bias=bool(layer.setting("attention_bias")),
        scale=(unrotated + rotary) ** -0.5 * _sharpening(layer.config),
        dropout=layer.dropout,
        position=position,
        device="meta",
    )


def _sharpening(config: Any) -> float:
    """The factor of the scores for longer contexts, (0.1 · mscale_all_dim · ln factor + 1)²."""
    rope = config.rope_parameters or {}
    mscale = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") == "default" or not mscale:
        return 1.0
    factor = rope.get("factor") or config.max_position_embeddings / rope["original_max_position_embeddings"]
    return (0.1 * mscale * math.log(factor) + 1) ** 2 if factor > 1 else 1.0
