"""Fields that turn a mechanism on that is off by default, or too large for a tiny model, and where it is from.

Windows, budgets, blocks and chunks of other types become small by `rules.FIELDS`. `mechanisms` measures what is on.
"""

from __future__ import annotations

from typing import Any

__all__ = ["RELEASED"]

_FULL_AND_WINDOW = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
_QWEN = {**_FULL_AND_WINDOW, "use_sliding_window": True, "max_window_layers": 1}
_SAM = {"window_size": 2, "global_attn_indexes": [1]}
_USES = "use_sliding_window and max_window_layers of the configuration class"
_KINDS = "layer_types of the configuration class"
_WINDOWED = "sliding_window of the configuration class"
_BETA = "llama_4_scaling_beta in the default rope_parameters; the position from which it counts is lowered"
_CAP = "the default of the configuration class, lowered to the scores of a tiny model"
_SMALLER = "the default of the configuration class, with a window of half an image"

#: By model type: the fields, and where the mechanism is from.
RELEASED: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_ocr2_sam_vision_model": (_SAM, _SMALLER),
    "deepseek_v4": ({"index_topk": 1}, "the default of the configuration class, below the compressed keys of a text"),
    "dots1": (_FULL_AND_WINDOW, _KINDS),
    "exaone4_5_vision": ({"window_size": 16, "fullatt_block_indexes": [1]}, _SMALLER),
    "gemma2": ({"attn_logit_softcapping": 1.0}, _CAP),
    "gemma3n_audio": ({"conf_attention_logit_cap": 1.0}, _CAP),
    "gemma4_audio": ({"attention_logit_cap": 1.0}, _CAP),
    "gemma4_text": (
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
        },
        "num_kv_shared_layers of the configuration class",
    ),
    "got_ocr2_vision": (_SAM, _SMALLER),
    "laguna": (
        {**_FULL_AND_WINDOW, "mlp_layer_types": ["dense", "sparse"], "num_attention_heads_per_layer": [4, 4]},
        _KINDS,
    ),
    "llama4_text": ({"floor_scale": 4}, "attn_temperature_tuning by default; floor_scale below the length of the text"),
    "mellum": ({**_FULL_AND_WINDOW, "mlp_layer_types": ["sparse", "sparse"]}, _KINDS),
    "ministral3": ({"sliding_window": 4}, _WINDOWED),
    "mixtral": ({"sliding_window": 4}, _WINDOWED),
    "moonshine_streaming_encoder": ({"sliding_windows": [[2, 1], [2, 0]]}, "the default, with shorter windows"),
    "phi3": ({"sliding_window": 4}, _WINDOWED),
    "phimoe": ({"sliding_window": 4}, _WINDOWED),
    "pp_chart2table_vision": (_SAM, _SMALLER),
    "qwen2": (_QWEN, _USES),
    "qwen2_5_omni_text": (_QWEN, _USES),
    "qwen2_5_omni_vision_encoder": ({"window_size": 16, "fullatt_block_indexes": [1]}, _SMALLER),
    "qwen2_5_vl_text": (_QWEN, _USES),
    "qwen2_5_vl_vision": ({"window_size": 16, "fullatt_block_indexes": [1]}, _SMALLER),
    "qwen2_moe": (_QWEN, _USES),
    "qwen2_vl_text": (_QWEN, _USES),
    "qwen3": (_QWEN, _USES),
    "qwen3_moe": ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window of the configuration class"),
    "sam3_vit_model": (_SAM, _SMALLER),
    "sam_hq_vision_model": (_SAM, _SMALLER),
    "sam_vision_model": (_SAM, _SMALLER),
    "slanext_vision": (_SAM, _SMALLER),
    "smollm3": ({**_FULL_AND_WINDOW, "use_sliding_window": True, "no_rope_layers": [1, 0]}, _KINDS),
    "starcoder2": ({"sliding_window": 4}, _WINDOWED),
    "step3p5": (
        {
            **_FULL_AND_WINDOW,
            "mlp_layer_types": ["dense", "sparse"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
            },
        },
        _KINDS,
    ),
    "t5_gemma_module": ({"attn_logit_softcapping": 1.0}, _CAP),
    "unlimited_ocr_sam_vision_model": (_SAM, _SMALLER),
    "vaultgemma": ({"attn_logit_softcapping": 1.0}, _CAP),
    "videoprism_text_model": ({"attn_logit_softcapping": 1.0}, _CAP),
    "videoprism_vision_model": ({"attn_logit_softcapping": 1.0}, _CAP),
}
