"""Settings of a configuration as arguments of `MultiHeadAttention`: one function per setting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from .. import masks
from ..errors import ArgumentError
from ..positions import ALiBi, RelativeBias, rotary_from_config
from ._blocks import Reading, StoredLayer
from ._namings import Projection
from ._tensors import parameter


def rotary(layer: StoredLayer) -> dict[str, Any]:
    """`Rotary` with the base, share and scaling of ``rope_parameters``."""
    part = rotary_from_config(
        layer.setting("rope_parameters"),
        layer.head_dim,
        max_position_embeddings=layer.setting("max_position_embeddings"),
    )
    return {"position": part}


def head_norms(layer: StoredLayer) -> dict[str, Any]:
    """Root-mean-square norms of every query and key, with the model's weights and eps."""
    norms: dict[str, Any] = {}
    for name in ("q_norm", "k_norm"):
        norms[name] = nn.RMSNorm(layer.head_dim, eps=layer.setting("rms_norm_eps"), device="meta")
        norms[name].weight = parameter(layer.tensor(f"{name}.weight", (layer.head_dim,)))
    return norms


def local_rotary(layer: StoredLayer) -> dict[str, Any]:
    """`rotary` in the layers that look back through a window. The others have no positions."""
    return rotary(layer) if layer.setting("layer_types")[layer.number] == "sliding_attention" else {}


def centred_norms(layer: StoredLayer) -> dict[str, Any]:
    """`head_norms` whose weights are stored minus one."""
    norms = head_norms(layer)
    for norm in norms.values():
        norm.weight.data += 1
    return norms


def gate(layer: StoredLayer) -> dict[str, Any]:
    """The projection of a gate with one factor for each feature."""
    shape = layer.num_heads * layer.head_dim, layer.embed_dim
    weight = layer.tensor("gate_proj.weight", shape)
    has_bias = f"{layer.prefix}gate_proj.bias" in layer.tensors
    return {"gate": Projection(weight, layer.tensor("gate_proj.bias", shape[:1]) if has_bias else None)}


def softcap(layer: StoredLayer) -> dict[str, Any]:
    """The limit of the scores, if there is one."""
    return {"softcap": layer.setting("attn_logit_softcapping")}


def query_scale(layer: StoredLayer) -> dict[str, Any]:
    """1/√ of a setting instead of 1/√D."""
    return {"scale": layer.setting("query_pre_attn_scalar") ** -0.5}


def gpt2_scale(layer: StoredLayer) -> dict[str, Any]:
    """1/√D or 1, which may be divided by the number of the layer, from 1."""
    scale = layer.head_dim**-0.5 if layer.setting("scale_attn_weights") else 1.0
    return {"scale": scale / (layer.number + 1) if layer.setting("scale_attn_by_inverse_layer_idx") else scale}


def unscaled(layer: StoredLayer) -> dict[str, Any]:
    """Scores as they are."""
    return {"scale": 1.0}


def sinks(layer: StoredLayer) -> dict[str, Any]:
    """A learned logit per head."""
    return {"sinks": parameter(layer.tensor("sinks", (layer.num_heads,)))}


def window(layer: StoredLayer) -> dict[str, Any]:
    """Each query attends to the last ``sliding_window`` positions, its own included."""
    size = layer.setting("sliding_window")
    return {} if size is None else {"mask": masks.sliding_window(size - 1, 0)}


def alternating_window(layer: StoredLayer) -> dict[str, Any]:
    """A window in the layers that ``layer_types`` gives one."""
    if getattr(layer.config, "use_bidirectional_attention", None):
        got = "use_bidirectional_attention = True"
        fix = "Build the layer yourself, with mask=masks.sliding_window(size - 1, size - 1)."
        raise ArgumentError("config", expected="windows that look back", got=got, fix=fix)
    kinds, size = layer.setting("layer_types"), getattr(layer.config, "sliding_window", None)
    kind = kinds[layer.number] if len(kinds) > layer.number else None
    if kind == "full_attention":
        return {}
    if kind == "sliding_attention" and size is not None:
        return window(layer)
    expected = f"layer_types[{layer.number}] full_attention, or sliding_attention with a sliding_window"
    raise ArgumentError("config", expected=expected, got=f"{kind!r} and sliding_window = {size}")


def alibi(layer: StoredLayer) -> dict[str, Any]:
    """Scores fall with the distance, at a rate per head."""
    return {"mask": ALiBi(layer.num_heads)}


def relative_bias(*, bidirectional: bool) -> Reading:
    """A learned bias per head and bucket of distances. All layers use that of the first layer."""

    def read(layer: StoredLayer) -> dict[str, Any]:
        buckets, heads = layer.setting("relative_attention_num_buckets"), layer.num_heads
        weight = replace(layer, number=0).tensor("relative_attention_bias.weight", (buckets, heads))
        if "relative_bias" not in layer.shared:
            most = layer.setting("relative_attention_max_distance")
            # Made without memory, so that no random number is drawn.
            bias = RelativeBias(heads, buckets, most, bidirectional, device="meta").to_empty(device=weight.device)
            bias.weight = parameter(weight)
            layer.shared["relative_bias"] = bias
        return {"mask": layer.shared["relative_bias"]}

    return read
