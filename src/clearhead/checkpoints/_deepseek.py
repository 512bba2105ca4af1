"""The latent attention of transformers' DeepSeek models."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._latent import MultiHeadLatentAttention
from ..errors import ArgumentError, CheckpointError, shape_text
from ..positions import rotary_from_config

#: Our submodules by transformers' names, which the original checkpoints have too.
_NAMES = {
    "q_proj.down": "q_a_proj",
    "q_proj.norm": "q_a_layernorm",
    "q_proj.up": "q_b_proj",
    "q_proj": "q_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out_proj": "o_proj",
}
_MODELS = ("deepseek_v3", "deepseek_v2")
_IGNORED = r"rotary_emb\.inv_freq"


def latent_from_transformers(config: Any, tensors: Mapping[str, Tensor], prefix: str = "") -> MultiHeadLatentAttention:
    """Build the attention of one layer of a DeepSeek-V2 or -V3 model.

    Args:
        config: the model's configuration.
        tensors: the model's state dict, or that of the layer's attention.
        prefix: what stands before ``kv_b_proj.weight``, such as ``"model.layers.0.self_attn."``. Default: nothing.

    Returns:
        The module with copies of the tensors in their own dtypes, in training mode. Its scale has YaRN's squared
        ``mscale_all_dim``. Hiding the future stays with the call: ``mask=masks.causal()``.

    Raises:
        ArgumentError: for the configuration of another model, or settings that have no counterpart here.
        CheckpointError: for tensors that are missing, unexpected, or do not have the sizes of the configuration.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from clearhead.checkpoints._deepseek import latent_from_transformers
        >>> config = SimpleNamespace(model_type="deepseek_v3", hidden_size=12, num_attention_heads=3,
        ...     num_key_value_heads=3, q_lora_rank=None, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2,
        ...     v_head_dim=4, attention_bias=False, attention_dropout=0.0, rope_interleave=True,
        ...     rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=32)
        >>> sizes = {"q_proj": (18, 12), "kv_a_proj_with_mqa": (7, 12), "kv_a_layernorm": (5,), "kv_b_proj": (24, 5),
        ...     "o_proj": (12, 12)}
        >>> state = {f"{name}.weight": torch.randn(size) for name, size in sizes.items()}
        >>> attend = latent_from_transformers(config, state)
        >>> attend.position
        Rotary(head_dim=2, base=10000, interleaved=True)
        >>> attend(torch.randn(2, 7, 12)).shape
        torch.Size([2, 7, 12])
    """
    module = _empty(config)
    wanted = {_theirs(ours): (ours, tuple(tensor.shape)) for ours, tensor in module.state_dict().items()}
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and not re.fullmatch(_IGNORED, name.removeprefix(prefix))
    }
    _require_names(set(wanted), set(own), config, prefix)
    for name, (_, shape) in wanted.items():
        if tuple(own[name].shape) != shape:
            fix = "Does the configuration belong to these weights?"
            got = shape_text(tuple(own[name].shape))
            raise CheckpointError(prefix + name, expected=shape_text(shape), got=got, fix=fix)
    copies = {
        ours: own[name].detach().clone(memory_format=torch.contiguous_format) for name, (ours, _) in wanted.items()
    }
    module.load_state_dict(copies, assign=True)
    module.to(copies["kv_up.weight"].device)
    module.loaded_from = _report(config, module, prefix)  # pyright: ignore[reportArgumentType]
    return module


def _empty(config: Any) -> MultiHeadLatentAttention:
    """The module that the configuration describes, its parameters without memory."""
    kind = getattr(config, "model_type", None)
    if kind not in _MODELS:
        expected = f"one of {', '.join(_MODELS)}"
        raise ArgumentError("config.model_type", expected=expected, got=repr(kind))
    heads, kv_heads = _setting(config, "num_attention_heads"), _setting(config, "num_key_value_heads")
    if kv_heads not in (None, heads):
        expected = f"num_attention_heads = {heads}, for every head has keys of its own"
        raise ArgumentError("config.num_key_value_heads", expected=expected, got=repr(kv_heads))
    rotary = _setting(config, "qk_rope_head_dim")
    position = rotary_from_config(
        _setting(config, "rope_parameters"),
        rotary,
        max_position_embeddings=_setting(config, "max_position_embeddings"),
        # DeepSeek-V2 has no such setting and always pairs neighbours.
        interleaved=kind == "deepseek_v2" or bool(_setting(config, "rope_interleave")),
    )
    return MultiHeadLatentAttention(
        _setting(config, "hidden_size"),
        heads,
        q_lora_rank=_setting(config, "q_lora_rank"),
        kv_lora_rank=_setting(config, "kv_lora_rank"),
        qk_nope_head_dim=_setting(config, "qk_nope_head_dim"),
        qk_rope_head_dim=rotary,
        v_head_dim=_setting(config, "v_head_dim"),
        bias=bool(_setting(config, "attention_bias")),
        scale=(_setting(config, "qk_nope_head_dim") + rotary) ** -0.5 * _sharpening(config),
        dropout=_setting(config, "attention_dropout") or 0.0,
        position=position,
        device="meta",
    )


def _sharpening(config: Any) -> float:
    """What scores are multiplied by for longer contexts: (0.1 · mscale_all_dim · ln factor + 1)²."""
    rope = _setting(config, "rope_parameters") or {}
    mscale = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") == "default" or not mscale:
        return 1.0
    factor = rope.get("factor") or config.max_position_embeddings / rope["original_max_position_embeddings"]
    return (0.1 * mscale * math.log(factor) + 1) ** 2 if factor > 1 else 1.0


def _setting(config: Any, name: str) -> Any:
    if not hasattr(config, name):
        expected = f"the setting {name}, as configurations of {config.model_type} have it"
        raise ArgumentError("config", expected=expected, got=f"a {type(config).__name__} without it")
    return getattr(config, name)


def _theirs(ours: str) -> str:
    stem, _, kind = ours.rpartition(".")
    return f"{_NAMES[stem]}.{kind}"


def _require_names(wanted: set[str], found: set[str], config: Any, prefix: str) -> None:
    """Raise unless the tensors under the prefix are the ones that the configuration describes."""
    missing, unexpected = sorted(wanted - found), sorted(found - wanted)
    if not missing and not unexpected:
        return
    quantised = any(name.endswith("_scale_inv") for name in unexpected)
    raise CheckpointError(
        "tensors",
        expected=f"what {config.model_type} with this configuration has under {prefix!r}",
        got="; ".join(f"{word} {', '.join(names)}" for word, names in (("no", missing), ("also", unexpected)) if names),
        fix="The weights are quantised: convert them to bfloat16 first."
        if quantised
        else "Does the configuration belong to these weights?",
    )


def _report(config: Any, module: MultiHeadLatentAttention, prefix: str) -> str:
    weights = (_theirs(ours) for ours in module.state_dict())
    lines = [
        f"{config.model_type}, latent attention",
        f"  weights: {', '.join(weights)} (under {prefix!r})",
        f"  heads: {module.num_heads}, latent {module.kv_lora_rank}, rotary {module.qk_rope_head_dim}",
        f"  position: {module.position}",
        f"  scale: {module.scale:g}",
    ]
    lines += [f"  dropout: {module.dropout}"] if module.dropout else []
    return "\n".join([*lines, "  the future: hidden in the model: pass mask=masks.causal()"])
