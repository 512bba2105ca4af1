"""Small random models of transformers, and their settings."""

from __future__ import annotations

from typing import Any

import torch
import transformers

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
#: Three rows and columns of patches.
VIT: dict[str, Any] = {
    **{"hidden_size": 35, "num_attention_heads": 5, "num_hidden_layers": 2, "intermediate_size": 29},
    **{"image_size": 12, "patch_size": 4},
}
SIDE: int = VIT["image_size"]
_VISION = VIT | {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
_TEXT: dict[str, Any] = _VISION | {"num_hidden_layers": 1, "vocab_size": 40, "max_position_embeddings": 8}
_RESIZED: dict[str, Any] = {"size": {"height": SIDE, "width": SIDE}}
_CROPPED: dict[str, Any] = {"size": {"shortest_edge": SIDE + 4}, "crop_size": {"height": SIDE, "width": SIDE}}
_REGISTERS = ("class", "register 1", "register 2")
#: Of vision models the beginning of their classes' names, their options, the tokens before the patches, and the
#: beginning of the name of the processor, with its options.
VISION: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str, dict[str, Any]]] = {
    "vit": ("ViT", _VISION, ("class",), "ViT", _RESIZED),
    "deit": ("DeiT", _VISION, ("class", "distillation"), "DeiT", _RESIZED | {"do_center_crop": False}),
    "dinov2": ("Dinov2", _VISION, ("class",), "Bit", _CROPPED),
    "registers": ("Dinov2WithRegisters", _VISION | {"num_register_tokens": 2}, _REGISTERS, "Bit", _CROPPED),
    "clip": ("CLIPVision", _VISION, ("class",), "CLIP", _CROPPED),
    "siglip": ("SiglipVision", _VISION, (), "Siglip", _RESIZED),
}


def build(stem: str, head: str, options: dict[str, Any]) -> Any:
    """A random model of transformers' classes `stem` + `head` and `stem`Config."""
    return getattr(transformers, stem + head)(getattr(transformers, f"{stem}Config")(**options)).eval()


def vision_model(kind: str, head: str = "Model", **options: Any) -> Any:
    """A model of `VISION`, whose class has a name that ends in `head`."""
    torch.manual_seed(1)
    stem, fixed, *_ = VISION[kind]
    return build(stem, head, fixed | options)


def two_sided(stem: str) -> Any:
    """CLIP or SigLIP with both sides, one for texts and one for pictures."""
    text = _TEXT | {"projection_size": 16, "eos_token_id": 2, "bos_token_id": 1}
    return build(stem, "Model", {"vision_config": _VISION, "text_config": text})


def processor_of(kind: str) -> Any:
    """The image processor of a model of `VISION`."""
    *_, stem, options = VISION[kind]
    return getattr(transformers, f"{stem}ImageProcessorPil")(**options)


def encoder_decoder(size: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    """Of BART's kind, with as many layers on both sides."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": size}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    return {"d_model": size, **sides, **TOKENS, "decoder_start_token_id": 2, **more}


def minilm() -> str:
    """The folder of a sentence encoder with 6 layers of 12 heads."""
    from clearhead.cli._demo import default_model_path

    return str(default_model_path())
