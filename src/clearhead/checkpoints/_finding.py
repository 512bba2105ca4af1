"""The description of a recognised attention block: `Finding`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ._namings import ROLES, Naming, Role
from ._unpack import Projections

_OBSTACLES = (
    (r"bias_[kv]", "a learned key or value appended to the others; clearhead.nn.MultiheadAttention has them"),
    (
        r"(q|k|query|key)_?(norm|layernorm|ln)\..*",
        "normalises queries or keys head by head; checkpoints.from_transformers reads it with its eps",
    ),
    (r"sinks?", "sinks, which checkpoints.from_transformers reads"),
    (
        r".*(relative_attention_bias|relative_position_bias_table|distance_embedding|rel_pos).*",
        "relative positions, which change the scores; checkpoints.from_transformers reads T5's",
    ),
    (r".*lora_.*", "LoRA: merge it into the weights first"),
)
_T5 = re.compile(r"(.*\.)?(SelfAttention|EncDecAttention)\.")


@dataclass(frozen=True)
class Finding:
    """The result of `identify`.

    Args:
        naming: the naming that fits.
        prefix: the prefix of its keys. It ends in a dot unless it is empty.
        embed_dim: E, features of the output.
        qdim: features of the query input.
        kdim: features of the key input.
        vdim: features of the value input.
        inner_dim: H·D, features of all query heads together.
        kv_inner_dim: Hkv·D, features of all key/value heads together. It is less than `inner_dim` with grouped heads.
        biases: the projections that have a bias.
        ignored: keys of the block that attention does not need.
        obstacles: the reason for each key that `load` refuses.

    Example:
        >>> import torch, clearhead
        >>> found = clearhead.checkpoints.identify(torch.nn.TransformerEncoderLayer(12, 3))
        >>> found.naming.name, found.prefix, found.naming.fused, found.embed_dim
        ('torch', 'self_attn.', True, 12)
    """

    naming: Naming
    prefix: str
    embed_dim: int
    qdim: int
    kdim: int
    vdim: int
    inner_dim: int
    kv_inner_dim: int
    biases: tuple[Role, ...]
    ignored: tuple[str, ...]
    obstacles: Mapping[str, str]

    def __str__(self) -> str:
        naming = self.naming
        heads = f"all heads {self.inner_dim}"
        if self.kv_inner_dim != self.inner_dim:
            heads += f", grouped key/value heads {self.kv_inner_dim}"
        lines = [
            f"{naming.name}: {naming.description}",
            f"  weights: {', '.join(naming.keys)}" + (f" (under {self.prefix!r})" if self.prefix else ""),
            f"  sizes: query {self.qdim}, key {self.kdim}, value {self.vdim}, {heads}, output {self.embed_dim}",
            f"  biases: {', '.join(self.biases) or 'none'}",
        ]
        lines += [f"  ignored: {', '.join(self.ignored)}"] if self.ignored else []
        lines += [f"  no place for {key}: {reason}" for key, reason in self.obstacles.items()]
        return "\n".join(lines)


def describe(tensors: Mapping[str, Tensor], naming: Naming, prefix: str, projections: Projections) -> Finding:
    """The sizes, biases and other keys of a block."""
    query, key, value, output = (projections[role].weight for role in ROLES)
    known = {prefix + entry.key for entry in naming.weights + naming.biases}
    unknown = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix) and name not in known]
    ignored = tuple(name for name in unknown if any(re.fullmatch(pattern, name) for pattern in naming.ignored))
    obstacles = {name: _reason(name) for name in unknown if name not in ignored}
    if _T5.fullmatch(prefix):
        obstacles[naming.keys[0]] = (
            "T5: its scores are not scaled and have a relative bias; checkpoints.from_transformers reads both"
        )
    return Finding(
        naming,
        prefix,
        embed_dim=output.shape[0],
        qdim=query.shape[1],
        kdim=key.shape[1],
        vdim=value.shape[1],
        inner_dim=query.shape[0],
        kv_inner_dim=key.shape[0],
        biases=tuple(role for role in ROLES if projections[role].bias is not None),
        ignored=ignored,
        obstacles=obstacles,
    )


def _reason(name: str) -> str:
    reasons = (reason for pattern, reason in _OBSTACLES if re.fullmatch(pattern, name))
    return next(reasons, "no part of attention that is known here")
