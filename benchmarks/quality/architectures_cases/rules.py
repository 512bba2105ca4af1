"""How small each field of a configuration becomes, by its name; and the few model types that need more than that."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .overrides_media import MEDIA
from .overrides_text import TEXT
from .released import RELEASED

__all__ = ["FIELDS", "KEPT", "OVERRIDES"]

#: Fields that keep their value although a rule below would match them.
KEPT = frozenset(
    {
        "attention_head_dim_scale",
        "num_adapter_layers",
        "num_feat_extract_layers",
        "output_hidden_states",
        "per_layer_config",
    }
)


def _at_most(most: int) -> Callable[[int], int]:
    return lambda value: min(int(value), most)


def _heads(value: int) -> int:
    """A power of two, as the sizes are."""
    return 4 if value > 3 else min(value, 2)


def _shared_heads(value: int) -> int:
    """Key/value heads: one stays one, all heads stay all of them as far as the name can say."""
    return min(value, 2)


#: The first pattern that is found in a field's name decides; sizes divide each other wherever models divide them.
FIELDS: list[tuple[re.Pattern[str], Callable[[int], int]]] = [
    (re.compile(pattern), small)
    for pattern, small in [
        (r"vocab_size|^num_hash_buckets$|_vocab$", _at_most(99)),
        (r"(key_value_heads|kv_heads|num_query_groups|^multi_query_group_num)$", _shared_heads),
        (r"mamba_n_heads|mamba_num_heads|linear_num_value_heads", _at_most(8)),
        (r"(attention_heads|num_heads|n_heads?|^num_attention_head|cross_heads|_key_heads)$", _heads),
        (r"(head_dim|^d_kv|^kv_channels|attention_head_size|head_size|^d_head|mamba_d_head)$", _at_most(8)),
        (r"lora_rank$|time_step_rank|^mamba_dt_rank", _at_most(16)),
        (r"mamba_d_state|ssm_state_size|^state_size", _at_most(8)),
        (r"experts_per_tok|^moe_topk?|^moe_k$|num_selected_experts|^top_k_experts|experts_per_token", _at_most(2)),
        (r"shared_experts$", _at_most(1)),
        (r"experts$|^num_local_experts|moe_num_experts|^zero_expert_num", _at_most(4)),
        (r"^n_group$|^topk_group$", _at_most(1)),
        (r"intermediate|ffn|mlp_dim$|^d_ff$|^dff$|feedforward|feed_forward_size|^n_inner$|^d_inner", _at_most(64)),
        (r"(layers?|^depths?|^resampler_depth|num_blocks)$", _at_most(2)),
        (r"^index_topk", _at_most(4)),
        (r"pooler_output_size$|^projection_size$|^word_embed_proj_dim$|^vit_dim$", _at_most(32)),
        (r"upsample_groups$", _at_most(32)),
        (r"^rotary_dim|rotary_emb", _at_most(4)),
        (r"output_channels$|condition_dim$|fpn_hidden|^d_conv", _at_most(32)),
        (r"^coordinate_size|^shape_size", _at_most(6)),
        (r"^input_size$", _at_most(32)),
        (r"^subsampling_conv_channels$", _at_most(16)),
        (r"^num_pos_feats$", _at_most(16)),
        (r"^upsample_initial_channel$|^flow_size$|^duration_predictor_filter_channels$", _at_most(32)),
        (r"^n_groups$|^mamba_n_groups$", _at_most(1)),
        (r"embedding_size|embedding_dim|embed_dim$|^dim$|hidden_size$|^d_model$|^n_embd$|hidden_dim$", _at_most(32)),
        (r"hidden_sizes|projection_dim$|^hidden_size|_hidden_size|out_hidden|^embed_dims$", _at_most(32)),
        (r"^d_latents$|^conv_dim$|^project_dim|^emb_dim|^output_dim$|^text_output_dim", _at_most(32)),
        (r"sliding_window|attention_window|^local_attention|window_size$", _at_most(4)),
        (r"attention_chunk_size", _at_most(6)),
        (r"max_position|n_positions|^n_ctx|max_seq_len|max_sequence_length|max_target_positions", _at_most(64)),
        (r"max_source_positions", _at_most(32)),
        (r"image_size$|^img_size", _at_most(32)),
        (r"patch_size$", _at_most(8)),
        (r"num_mel_bins", _at_most(16)),
        (r"num_conv_pos_embeddings$", _at_most(16)),
        (r"num_conv_pos_embedding_groups", _at_most(2)),
        (r"num_queries$|num_query_tokens|num_latents|num_denoising|num_proposals", _at_most(6)),
    ]
]

#: By model type: fields with their values.
OVERRIDES: dict[str, dict[str, Any]] = {
    name: {**TEXT.get(name, {}), **MEDIA.get(name, {}), **RELEASED.get(name, ({}, ""))[0]}
    for name in TEXT.keys() | MEDIA.keys() | RELEASED.keys()
}
