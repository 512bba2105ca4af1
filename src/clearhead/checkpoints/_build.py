"""From a `Layer` to a module with all its parts."""

from __future__ import annotations

from typing import Any

from .._checks import is_probability, number
from .._multihead import MultiHeadAttention
from ..masks._base import Mask
from ._blocks import Attention, Layer
from ._fill import fill


def multi_head(layer: Layer) -> MultiHeadAttention:
    """Attention with copies of the layer's tensors, and with the settings of its configuration."""
    projections = layer.projections()
    parts: dict[str, Any] = {}
    for read in layer.block.reads:
        parts |= read(layer)
    layer.require_nothing_left()
    sinks = parts.pop("sinks", None)
    module = MultiHeadAttention(
        layer.embed_dim,
        layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        bias=projections["query"].bias is not None,
        out_bias=projections["output"].bias is not None,
        dropout=_dropout(layer),
        sinks=sinks is not None,
        device="meta",
        **parts,
    )
    fill(module, projections)
    if sinks is not None:
        module.sinks = sinks
    if module.position is not None:
        parts["position"].to(module.q_proj.weight.device)
    lines = [
        f"{layer.config.model_type}, layer {layer.number}, {layer.block.part} attention",
        f"  weights: {', '.join(layer.block.naming.keys)} (under {layer.prefix!r})",
        f"  heads: {module.num_heads}, key/value heads {module.num_kv_heads}, head_dim {module.head_dim}",
    ]
    lines += [
        f"  {name}: {part.describe() if isinstance(part, Mask) else part}"
        for name, part in parts.items()
        if part is not None
    ]
    report(module, lines + ["  sinks: one per head"] * (sinks is not None), causal=layer.block.causal)
    return module


def _dropout(layer: Layer) -> float:
    name = layer.block.dropout
    dropout = layer.setting(name)
    return 0.0 if dropout is None else number(f"config.{name}", dropout, "a probability in [0, 1]", is_probability)


def report(module: Attention, lines: list[str], *, causal: bool) -> None:
    """Store in `loaded_from` what was read, and whether the model is causal. The module itself is not causal."""
    hidden = (
        "not hidden here, but hidden in the model. Pass mask=masks.causal()" if causal else "not hidden in the model"
    )
    dropout = [f"  dropout: {module.dropout}"] if module.dropout else []
    text = "\n".join([*lines, *dropout, f"  the future: {hidden}"])
    module.loaded_from = text  # pyright: ignore[reportArgumentType]
