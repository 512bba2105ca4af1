"""Where a vision model puts its patches, from its own configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .._statistics.patch_layout import PatchLayout
from ..errors import ArgumentError

#: transformers' vision models → the tokens that stand before their patches.
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
    """Height and width of the pictures a model was called with, (B, C, H, W), or ``None`` if there are none."""
    args, kwargs = arguments
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim() == 4 and value.is_floating_point():
            return value.shape[2], value.shape[3]
    return None


def find_layout(
    model: nn.Module, name: str, size: tuple[int, int] | None, query_length: int, key_length: int
) -> PatchLayout:
    """Place the tokens of one attention module on the model's input.

    Args:
        model: the recorded model.
        name: the module in which attention ran.
        size: from `picture_size`.
        query_length, key_length: L and S of its calls.

    Raises:
        ArgumentError: if the model is none of those whose tokens are known, or its tokens are not as many as they
            should be.
    """
    if size is None:
        raise _refused("a model that was called with pictures (B, C, H, W)", "other inputs")
    for module in _from_inside_out(model, name):
        found = _of_transformers(module, size) or _of_timm(module, size)
        if found is not None:
            return _fitted(found, name, query_length, key_length)
    raise _refused(f"{KNOWN} around {name or 'the model itself'!r}", f"a {type(model).__name__}")


def _from_inside_out(model: nn.Module, name: str) -> Iterator[nn.Module]:
    parts = name.split(".") if name else []
    for count in range(len(parts), -1, -1):
        yield model.get_submodule(".".join(parts[:count]))


def _of_transformers(module: nn.Module, size: tuple[int, int]) -> PatchLayout | None:
    config = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in PREFIXES:
        return None
    prefix: list[str] = []
    for token in PREFIXES[kind]:
        prefix += _registers(getattr(config, "num_register_tokens", 0)) if token == "registers" else [token]
    return _layout(prefix, _pair(getattr(config, "patch_size", None)), size)


def _of_timm(module: nn.Module, size: tuple[int, int]) -> PatchLayout | None:
    embedding, count = getattr(module, "patch_embed", None), getattr(module, "num_prefix_tokens", None)
    patch = getattr(embedding, "patch_size", None)
    if not isinstance(embedding, nn.Module) or patch is None or not isinstance(count, int):
        return None
    prefix = ["class"] if getattr(module, "cls_token", None) is not None else []
    prefix += ["distillation"] if getattr(module, "dist_token", None) is not None else []
    prefix += _registers(count - len(prefix))
    return _layout(prefix, _pair(patch), size)


def _layout(prefix: list[str], patch: tuple[int, int], size: tuple[int, int]) -> PatchLayout:
    return PatchLayout(tuple(prefix), (size[0] // patch[0], size[1] // patch[1]), patch, size)


def _fitted(layout: PatchLayout, name: str, query_length: int, key_length: int) -> PatchLayout:
    patches = layout.grid[0] * layout.grid[1]
    if query_length == key_length == layout.length:
        return layout
    if query_length < key_length and key_length in (layout.length, patches):
        queries = ("pooling",) if query_length == 1 else tuple(f"pooling {place}" for place in range(query_length))
        prefix = layout.prefix if key_length == layout.length else ()
        return replace(layout, prefix=prefix, queries=queries)
    wanted = f"attention between {layout.length} tokens in {name!r} ({len(layout.prefix)} and {patches} patches)"
    raise _refused(wanted, f"{query_length} queries and {key_length} keys")


def _registers(count: int) -> list[str]:
    return [f"register {place}" for place in range(1, count + 1)]


def _pair(value: Any) -> tuple[int, int]:
    sides = (value, value) if isinstance(value, int) else tuple(value)
    return sides[0], sides[1]


def _refused(expected: str, got: str) -> ArgumentError:
    return ArgumentError("image", expected=expected, got=got, fix="Where its patches lie is not known then.")
