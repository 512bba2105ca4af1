"""How small each field of a configuration becomes, by its name; and the few model types that need more than that."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

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

_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_TIMM_FREE = {
    "backbone_config": _RESNET,
    "use_timm_backbone": False,
    "backbone": None,
    "use_pretrained_backbone": False,
}
_SERIES = {"prediction_length": 7, "context_length": 11, "lags_sequence": [1, 2], "num_time_features": 1}
_WIDE = {"hidden_size": 128}  # heads are of size 64, whatever the configuration

#: By model type: fields with their values, or a function of `small_config` that returns the configuration.
OVERRIDES: dict[str, Any] = {
    "autoformer": _SERIES,
    "bridgetower": _WIDE,
    "bridgetower_text_model": _WIDE,
    "bridgetower_vision_model": _WIDE,
    "bros": {"hidden_size": 64, "dim_bbox": 8},
    "conditional_detr": _TIMM_FREE,
    "dab-detr": _TIMM_FREE,
    "deformable_detr": {**_TIMM_FREE, "backbone_config": {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]}},
    "detr": _TIMM_FREE,
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "attention_layers": ["global", "local"],
    },
    "groupvit_vision_model": {
        "depths": (1, 1, 1),
        "num_hidden_layers": 3,
        "num_group_tokens": (8, 4, 0),
        "num_output_groups": (8, 4, 4),
    },
    "informer": _SERIES,
    # As released: microsoft/deberta-base and microsoft/deberta-v3-base.
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    # Most released layers are sparse. Blocks of four keys leave some out of a text of a few tokens.
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mistral_large4_text": {
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 0],
        "kv_source_layers": [0, 1],
        "indexer_types": ["full", "full"],
        "layer_types": ["indexed_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "patchtsmixer": {"context_length": 32, "patch_length": 8, "patch_stride": 8},
    "patchtst": {"context_length": 32, "patch_length": 8, "patch_stride": 8},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 2},
    "reformer": {
        "axial_pos_embds_dim": (8, 24),
        "axial_pos_shape": (4, 16),
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_hidden_layers": 2,
    },
    "sam2_hiera_det_model": {
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [8, 16, 32, 32],
        "hidden_size": 8,
        "num_attention_heads_per_stage": [1, 2, 4, 4],
        "window_size_per_stage": [8, 4, 4, 4],
        "global_attention_blocks": [3],  # not the first of a stage
        "image_size": [32, 32],
    },
    "table-transformer": _TIMM_FREE,
    "time_series_transformer": _SERIES,
    "xmod": {"default_language": "en_XX"},
}
