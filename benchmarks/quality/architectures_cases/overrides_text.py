"""Fields of text models that the rules do not reach, with their values; `mechanisms` says what turns a mechanism on."""

from __future__ import annotations

from typing import Any

__all__ = ["TEXT"]

_MLA = {"head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}

TEXT: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "blip_2_qformer": {"encoder_hidden_size": 32},
    "bros": {"hidden_size": 64, "dim_bbox": 8},
    "chameleon": {"vocabulary_map": {"<image>": 98, "IMGIMGA": 97}},
    "dbrx": {
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 98, "<|extra_200|>": 97, "<|visual token 0|>": 96}},
    "ernie4_5_vl_moe_text": {
        "head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
        "moe_intermediate_size": [16, 16],
    },
    "esm": {"vocab_size": 99, "mask_token_id": 98, "pad_token_id": 1, "position_embedding_type": "rotary"},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2, "head_dim": 0, "qk_rope_head_dim": 0},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "attention_layers": ["global", "local"],
    },
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_hidden_layers": 3},
    "longcat_flash": {**_MLA, "qk_head_dim": 12},
    "mamba2": {"num_heads": 8, "head_dim": 8},
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
    "moshi_depth": {"num_codebooks": 16, "max_position_embeddings": 17},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "neomme": {"head_dim": 16},
    "paddleocr_vl_text": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 1, 2]},
    },
    "pix2struct_text_model": {"initializer_range": 0.02},
    "pegasus_x": {"block_size": 4, "num_global_tokens": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    # Released configurations set the indexer, whose fields have no default.
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_embds_dim": (8, 24),
        "axial_pos_shape": (4, 16),
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_hidden_layers": 2,
    },
    "step3p5": {"sliding_window": 4},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}
