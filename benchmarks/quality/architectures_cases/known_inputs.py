"""Inputs of model types whose forward takes what no other does, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common_inputs import Make, ones, text
from .known_sounds import SOUNDS
from .modalities import noise
from .sizes import BATCH, IMAGE, LENGTH, TARGET

__all__ = ["KNOWN"]


def _grid(side: int = 4) -> Tensor:
    return torch.tensor([[1, side, side]] * BATCH)


def _xy(batch: int, side: int) -> Tensor:
    """The positions (x, y) of the patches of square images."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([columns, rows], -1).flatten(0, 1).expand(batch, -1, -1)  # (batch, side², 2)


def _pair(config: Any) -> dict[str, Any]:
    return {"pixel_values": noise(BATCH, 2, 3, 64, 64)}


def _with_image_tokens(name: str, count: Callable[[Any], int], pixels: Callable[[Any], dict[str, Any]]) -> Make:
    """A text with as many placeholders as an image has tokens, and the image."""

    def make(config: Any) -> dict[str, Any]:
        ids = text(config)
        block = torch.full((BATCH, count(config)), getattr(config, name))
        return {"input_ids": torch.cat([ids[:, :3], block, ids[:, 3:]], 1), **pixels(config)}

    return make


def _image(*shape: int) -> Callable[[Any], dict[str, Any]]:
    return lambda config: {"pixel_values": noise(*(shape or (BATCH, 3, IMAGE, IMAGE)))}


def _flat_patches(part: str | None = None, patches: int = 16) -> Make:
    """(B · patches, C · p · p), with a grid."""

    def make(config: Any) -> dict[str, Any]:
        vision = getattr(config, part) if part else config
        frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
        width = 3 * frames * vision.patch_size**2
        return {"pixel_values": noise(BATCH * patches, width), "grid_thw": _grid()}

    return make


def _patch_encoder(config: Any) -> dict[str, Any]:
    ids = torch.arange(LENGTH).div(3, rounding_mode="floor").expand(BATCH, -1)
    return {"input_ids": text(config), "num_patches": 4, "patch_ids": ids}


def _patch_decoder(config: Any) -> dict[str, Any]:
    return {
        "inputs_embeds": noise(BATCH, LENGTH, config.hidden_size),
        "patch_embeds": noise(BATCH, 4, config.hidden_size_global),
    }


def _canvas(config: Any) -> dict[str, Any]:
    """A canvas that reads the text, with a mask of both."""
    found = {"input_ids": text(config), "decoder_input_ids": text(config, TARGET)}
    return {**found, "decoder_attention_mask": ones(BATCH, LENGTH + TARGET)}


def _siglip2(config: Any) -> dict[str, Any]:
    vision = getattr(config, "vision_config", config)
    found = {
        "pixel_values": noise(BATCH, 16, 3 * vision.patch_size**2),
        "pixel_attention_mask": ones(BATCH, 16),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    }
    return found if vision is config else {"input_ids": text(config), **found}


def _sam3_queries(config: Any) -> dict[str, Any]:
    width = config.hidden_size
    return {
        "vision_features": noise(BATCH, 16, width),
        "text_features": noise(BATCH, 5, width),
        "vision_pos_encoding": noise(BATCH, 16, width + 1)[..., :width],
        "text_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool(),
        "spatial_shapes": torch.tensor([[4, 4]]),
    }


def _sam3_levels(config: Any) -> dict[str, Any]:
    width = config.hidden_size
    return {
        "vision_features": [noise(BATCH, width, 4, 4)],
        "vision_pos_embeds": [noise(BATCH, width, 4, 4) * 0.5],
        "text_features": noise(BATCH, 5, width),
        "text_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool(),
    }


def _sam3_masks(config: Any) -> dict[str, Any]:
    width = config.hidden_size
    levels = [noise(BATCH, width, side, side) for side in (16, 8, 4)]
    return {
        "decoder_queries": noise(BATCH, 6, width),
        "backbone_features": levels,
        "encoder_hidden_states": noise(BATCH, 16, width),
        "prompt_features": noise(BATCH, 5, width),
        "prompt_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool(),
    }


def _mllama_vision(config: Any) -> dict[str, Any]:
    tiles = config.max_num_tiles
    return {
        "pixel_values": noise(BATCH, 1, tiles, 3, config.image_size, config.image_size),
        "aspect_ratio_ids": ones(BATCH, 1),
        "aspect_ratio_mask": torch.tensor([[[1] * tiles], [[1] + [0] * (tiles - 1)], [[1] * tiles]]),
    }


def _molmo2_adapter(config: Any) -> dict[str, Any]:
    pooled = torch.arange(BATCH * 16).reshape(-1, 4)
    pooled[0, 2:] = -1
    return {
        "image_features": noise(BATCH, 16, config.hidden_size * len(config.vision_feature_layer)),
        "pooled_patches_idx": pooled,
    }


def _kosmos2(config: Any) -> dict[str, Any]:
    ids = text(config)
    count = config.latent_query_num
    positions = torch.zeros(BATCH, LENGTH + count, dtype=torch.long)
    positions[:, 2 : 2 + count] = 1
    ids = torch.cat([ids[:, :2], torch.zeros(BATCH, count, dtype=torch.long), ids[:, 2:]], 1)
    return {"input_ids": ids, "image_embeds_position_mask": positions, **_image()(config)}


def _jev(config: Any) -> dict[str, Any]:
    return {
        "input_ids": text(config.text_config)[:1],
        "marks": torch.tensor([[4, 8]]),
        "num_options": torch.tensor([[2, 2]]),
        "question_type_ids": torch.tensor([[0, 2]]),
    }


def _draft(config: Any) -> dict[str, Any]:
    """The noise tokens of a block, and the states of the context."""
    return {
        "noise_embeds": noise(BATCH, 4, config.hidden_size),
        "attention_mask": ones(BATCH, 13),
        "context_hidden_states": noise(BATCH, 9, config.hidden_size * len(config.target_layer_ids)),
    }


def _pi0(config: Any) -> dict[str, Any]:
    return {
        "action_embeds": noise(BATCH, 5, config.dit_config.hidden_size),
        "inputs_embeds": noise(BATCH, 9, config.vlm_config.text_config.hidden_size),
        "pixel_values": noise(BATCH, 1, 3, IMAGE, IMAGE),
        "attention_mask": ones(BATCH, 9),
    }


KNOWN: dict[str, Make] = {
    "blip-2": _with_image_tokens("image_token_index", lambda c: c.num_query_tokens, _image()),
    "blip_2_qformer": lambda c: {
        "query_embeds": noise(BATCH, 6, c.hidden_size),
        "encoder_hidden_states": noise(BATCH, 9, c.encoder_hidden_size),
        "encoder_attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 7 + [0] * 2]),
    },
    "blt": lambda c: {"input_ids": text(c), "use_cache": False},
    "blt_local_decoder": _patch_decoder,
    "blt_local_encoder": _patch_encoder,
    "bridgetower_vision_model": lambda c: {"image": noise(BATCH, 3, c.image_size, c.image_size)},
    "deepseek_ocr2_encoder": lambda c: {"inputs_embeds": noise(BATCH, 14, c.hidden_size), "num_patches": 9},
    "diffusion_gemma": _canvas,
    "efficientloftr": _pair,
    "embedding_gemma2": lambda c: {"input_ids": text(c)},
    "florence_vision": lambda c: {"hidden_states": noise(BATCH, 3, IMAGE, IMAGE)},
    "gemma4_vision": lambda c: {
        "pixel_values": noise(BATCH, 16, 3 * c.patch_size**2),
        "pixel_position_ids": _xy(BATCH, 4),
    },
    "idefics": lambda c: {
        "input_ids": text(c),
        "pixel_values": noise(BATCH, 1, 3, IMAGE, IMAGE),
        "image_attention_mask": ones(BATCH, LENGTH, 1),
    },
    "idefics2_perceiver": lambda c: {
        "context": noise(BATCH, 9, c.hidden_size),
        "attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 7 + [0] * 2]),
    },
    "inkling2_vision": lambda c: {
        "pixel_values": noise(BATCH * 4, *[c.patch_size * c.spatial_merge_size] * 2, 3),
        "image_grid_thw": _grid(2),
    },
    "instructblip": _with_image_tokens(
        "image_token_index",
        lambda c: c.num_query_tokens,
        lambda c: {**_image()(c), "qformer_input_ids": text(c, 5)},
    ),
    "instructblipvideo": _with_image_tokens(
        "video_token_index",
        lambda c: c.num_query_tokens * 2,
        lambda c: {"pixel_values": noise(BATCH, 2, 3, IMAGE, IMAGE), "qformer_input_ids": text(c, 5)},
    ),
    "jev": _jev,
    "kimi_k25_vision": lambda c: {
        "pixel_values": noise(BATCH * 16, 3, c.patch_size, c.patch_size),
        "grid_thw": _grid(),
    },
    "kosmos-2": _kosmos2,
    "kosmos_2_5_vision_model": lambda c: {
        "hidden_states": noise(BATCH, 16, c.hidden_size),
        "attention_mask": torch.tensor([[1] * 16, [1] * 9 + [0] * 7, [1] * 12 + [0] * 4]),
    },
    "lightglue": _pair,
    "lxmert": lambda c: {
        "input_ids": text(c),
        "visual_feats": noise(BATCH, 6, c.visual_feat_dim),
        "visual_pos": noise(BATCH, 6, c.visual_pos_dim),
    },
    "minicpm_ocr_vision": lambda c: {
        "pixel_values": noise(1, 3, c.patch_size, 16 * c.patch_size * BATCH),
        "target_sizes": torch.tensor([[4, 4]] * BATCH),
    },
    "minicpmv4_6_vision": lambda c: {
        "pixel_values": noise(1, 3, c.patch_size, 16 * c.patch_size * BATCH),
        "target_sizes": torch.tensor([[4, 4]] * BATCH),
    },
    "minicpmv4_7_vision": lambda c: {
        "pixel_values": noise(1, 3, c.patch_size, 16 * c.patch_size * BATCH),
        "target_sizes": torch.tensor([[4, 4]] * BATCH),
    },
    "mllama_vision_model": _mllama_vision,
    "molmo2_adapter": _molmo2_adapter,
    "molmo2_vision": lambda c: {"pixel_values": noise(BATCH, 16, 3 * c.patch_size**2)},
    "muse_glimmer_assistant": _draft,
    "muse_glimmer_vision": _flat_patches(),
    "muse_spark_vision": _flat_patches(),
    "nemotron_h_omni": lambda c: {"input_ids": text(c)},
    "oneformer": lambda c: {"pixel_values": noise(BATCH, 3, 64, 64), "task_inputs": text(c, 12) * 1.0},
    "paddleocr_vl_vision": lambda c: {
        "pixel_values": noise(BATCH, 16, 3, c.patch_size, c.patch_size),
        "grid_thw": _grid(),
    },
    "pi0": _pi0,
    "pix2struct": lambda c: {
        "flattened_patches": noise(BATCH, 9, c.vision_config.patch_embed_hidden_size + 2).abs().clamp(max=3),
        "decoder_input_ids": text(c.text_config, 7),
    },
    "pix2struct_vision_model": lambda c: {
        "flattened_patches": noise(BATCH, 9, c.patch_embed_hidden_size + 2).abs().clamp(max=3)
    },
    "pp_ocrv5_mobile_rec": lambda c: {"pixel_values": noise(BATCH, 3, 48, 160)},
    "qwen2_5_omni_thinker": lambda c: {"input_ids": text(c)},
    "qwen3_omni_moe_thinker": lambda c: {"input_ids": text(c)},
    "qwen3_omni_moe_talker_text": lambda c: {"inputs_embeds": noise(BATCH, LENGTH, c.hidden_size)},
    "t5gemma2_decoder": lambda c: {
        "input_ids": text(c),
        "encoder_hidden_states": noise(BATCH, 9, c.hidden_size),
        "encoder_attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 7 + [0] * 2]),
    },
    "qwen3_omni_moe_talker_code_predictor": lambda c: {"inputs_embeds": noise(BATCH, LENGTH, c.hidden_size)},
    "rag": lambda c: {
        "input_ids": text(c),
        "context_input_ids": text(c, 5),
        "context_attention_mask": ones(BATCH, 5),
        "doc_scores": noise(BATCH, 1),
        "decoder_input_ids": text(c, 7),
        "n_docs": 1,
    },
    "sam3_detr_decoder": _sam3_queries,
    "sam3_detr_encoder": _sam3_levels,
    "sam3_lite_text_detr_decoder": _sam3_queries,
    "sam3_lite_text_detr_encoder": _sam3_levels,
    "sam3_lite_text_mask_decoder": _sam3_masks,
    "sam3_mask_decoder": _sam3_masks,
    "siglip2": _siglip2,
    "siglip2_vision_model": _siglip2,
    "superglue": _pair,
    "unlimited_ocr_vision_encoder": lambda c: {
        "patch_embeds": noise(BATCH, c.hidden_size, *[c.image_size // c.patch_size] * 2)
    },
    "voxtral_realtime_text": lambda c: {"input_ids": text(c), "t_cond": noise(1, 1, c.hidden_size)},
    "xclip_vision_model": lambda c: {"pixel_values": noise(BATCH * c.num_frames, 3, c.image_size, c.image_size)},
} | SOUNDS
