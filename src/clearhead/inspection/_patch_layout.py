"""The positions of a vision model's patches, from its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .._statistics.patch_layout import PatchLayout
from ..errors import ArgumentError

#: From the model types of transformers to the tokens before their patches.
PREFIXES: dict[str, tuple[str, ...]] = {
    "vit": ("class",),
    "deit": ("class", "distillation"),
    "dinov2": ("class",),
    "dinov2_with_registers": ("class", "registers"),
    "clip_vision_model": ("class",),
    "siglip_vision_model": (),
}
KNOWN = "a ViT, DeiT, DINOv2 or the vision side of CLIP or SigLIP of transformers, or a vision transformer of timm"


def picture_size(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[int, int] | None:
    """Height and width of the pictures (B, C, H, W) among a model's arguments, or ``None`` if there are none."""
    args, kwargs = arguments
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point():
            return value.shape[2], value.shape[3]
    return None


def find_layout(
    model: nn.Module, name: str, size: tuple[int, int] | None, query_length: int, key_length: int
) -> PatchLayout:
    """The positions of one attention module's tokens on the model's input.

    Args:
        model: the recorded model.
        name: the name of the attention module.
        size: from `picture_size`.
        query_length, key_length: L and S of its calls.

    Raises:
        ArgumentError: if the model is not supported, or has another number of tokens than its configuration says.
    """
    if size is None:
        raise _refused("a model that was called with pictures (B, C, H, W)", "other inputs")
    path = name.split(".") if name else []
    for depth in range(len(path), -1, -1):  # from the attention module out to the model
        module = model.get_submodule(".".join(path[:depth]))
        layout = _of_transformers(module, size) or _of_timm(module, size)
        if layout is not None:
            return _fitted(layout, name, query_length, key_length)
    raise _refused(f"{KNOWN} around {name or 'the model itself'!r}", f"a {type(model).__name__}")


def _of_transformers(module: nn.Module, size: tuple[int, int]) -> PatchLayout | None:
    config = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in PREFIXES:
        return None
    prefix: list[str] = []
    for token in PREFIXES[kind]:
        prefix += _registers(getattr(config, "num_register_tokens", 0)) if token == "registers" else [token]
    return _layout(prefix, getattr(config, "patch_size", None), size)


def _of_timm(module: nn.Module, size: tuple[int, int]) -> PatchLayout | None:
    embedding, count = getattr(module, "patch_embed", None), getattr(module, "num_prefix_tokens", None)
    patch = getattr(embedding, "patch_size", None)
    if not isinstance(embedding, nn.Module) or patch is None or not isinstance(count, int):
        return None
    prefix = ["class"] if getattr(module, "cls_token", None) is not None else []
    prefix += ["distillation"] if getattr(module, "dist_token", None) is not None else []
    prefix += _registers(count - len(prefix))
    return _layout(prefix, patch, size)


def _layout(prefix: list[str], patch: Any, size: tuple[int, int]) -> PatchLayout:
    height, width = (patch, patch) if isinstance(patch, int) else tuple(patch)[:2]
    return PatchLayout(tuple(prefix), (size[0] // height, size[1] // width), (height, width), size)


def _fitted(layout: PatchLayout, name: str, query_length: int, key_length: int) -> PatchLayout:
    patches = layout.grid[0] * layout.grid[1]
    if query_length == key_length == layout.length:
        return layout
    if query_length < key_length and key_length in (layout.length, patches):
        queries = ("pooling",) if query_length == 1 else tuple(f"pooling {place}" for place in range(query_length))
        prefix = layout.prefix if key_length == layout.length else ()
        return replace(layout, prefix=prefix, queries=queries)
    expected = f"attention between {layout.length} tokens in {name!r} ({len(layout.prefix)} and {patches} patches)"
    raise _refused(expected, f"{query_length} queries and {key_length} keys")


def _registers(count: int) -> list[str]:
    return [f"register {place}" for place in range(1, count + 1)]


def _refused(expected: str, got: str) -> ArgumentError:
    return ArgumentError("image", expected=expected, got=got, fix="Where its patches lie is not known then.")
