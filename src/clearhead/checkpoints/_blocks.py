"""How one kind of model stores its attention; such a layer in a checkpoint; and its module."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from .._checks import is_probability, number, size
from .._latent import MultiHeadLatentAttention
from .._multihead import MultiHeadAttention
from ..errors import ArgumentError, CheckpointError, shape_text
from ..masks._base import Mask
from ._namings import Naming
from ._tensors import Projections, Tensors, fill, fill_linear, ungrouped, unpack

Attention = MultiHeadAttention | MultiHeadLatentAttention


@dataclass(frozen=True)
class StoredAttention:
    """One attention block of a transformers model, as data.

    Args:
        path: the prefix of its tensors, with ``{layer}`` for the number of the layer.
        naming: the names of the tensors below that path.
        reads: functions that read arguments of the module from the configuration, or from further tensors.
        part: ``"self"``, or T5's ``"encoder"``, ``"decoder"`` or ``"cross"``. Default ``"self"``.
        build: makes the module. Default `multi_head`.
        causal: whether the model makes the block causal. Default True.
        dropout: the name of the setting with the dropout of the weights. Default ``"attention_dropout"``.
        bias: whether query, key and value have a bias, or the name of the setting that decides it. Default True.
        out_bias: the same for the output. Default as `bias`.
        layers: the name of the setting with the number of layers. Default ``"num_hidden_layers"``.
    """

    path: str
    naming: Naming
    reads: tuple[Reading, ...] = ()
    part: str = "self"
    build: Callable[[StoredLayer], Attention] | None = None
    causal: bool = True
    dropout: str = "attention_dropout"
    bias: bool | str = True
    out_bias: bool | str | None = None
    layers: str = "num_hidden_layers"


@dataclass
class StoredLayer:
    """A block of a checkpoint and its configuration. Its methods raise an error if the two do not fit.

    Args:
        block: the kind of block.
        config: the model's configuration.
        number: number of the layer, from 0.
        root: the prefix before the block's path.
        tensors: all tensors of the checkpoint.
        shared: modules that all layers of one model share, by name.
    """

    block: StoredAttention
    config: Any
    number: int
    root: str
    tensors: Tensors
    shared: dict[str, nn.Module]
    _read: set[str] = field(default_factory=set[str])

    @property
    def prefix(self) -> str:
        """The prefix of the block's tensors."""
        return self.root + self.block.path.format(layer=self.number)

    def setting(self, name: str) -> Any:
        """A setting that the configuration must have."""
        return setting_of(self.config, name)

    @property
    def embed_dim(self) -> int:
        """E."""
        return size("config.hidden_size", self.setting("hidden_size"))

    @property
    def num_heads(self) -> int:
        """H."""
        return size("config.num_attention_heads", self.setting("num_attention_heads"))

    @property
    def num_kv_heads(self) -> int:
        """Hkv. It is H for a model without grouped heads."""
        count = getattr(self.config, "num_key_value_heads", None)
        return self.num_heads if count is None else size("config.num_key_value_heads", count)

    @property
    def head_dim(self) -> int:
        """D. It is E / H for a configuration without `head_dim`."""
        features = getattr(self.config, "head_dim", None)
        return self.embed_dim // self.num_heads if features is None else size("config.head_dim", features)

    @property
    def dropout(self) -> float:
        """The dropout of the weights."""
        name, dropout = self.block.dropout, self.setting(self.block.dropout)
        return 0.0 if dropout is None else number(f"config.{name}", dropout, "a probability in [0, 1]", is_probability)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor besides the projections, with the shape that the configuration requires."""
        (key,) = self.require([name])
        self._read.add(key)
        tensor = self.tensors[key]
        if tuple(tensor.shape) != shape:
            raise _does_not_fit(key, shape_text(shape), shape_text(tensor.shape))
        return tensor

    def require(self, names: list[str]) -> list[str]:
        """The keys of tensors of the layer. Raise if one is missing."""
        keys = [self.prefix + name for name in names]
        absent = [key for key in keys if key not in self.tensors]
        if absent:
            expected = f"what {self.config.model_type} with this configuration has under {self.prefix!r}"
            raise CheckpointError("source", expected=expected, got=f"no {', '.join(absent)}")
        return keys

    def projections(self) -> Projections:
        """The four projections, with the sizes and biases that the configuration requires."""
        naming, prefix = self.block.naming, self.prefix
        entries = naming.weights + tuple(entry for entry in naming.biases if self._has_bias(entry.holds[0]))
        self.require([entry.key for entry in entries])
        absent = [entry.key for entry in naming.biases if entry not in entries]
        unexpected = [key for key in absent if prefix + key in self.tensors]
        if unexpected:
            raise _does_not_fit("config", "a configuration with these biases", f"none for {', '.join(unexpected)}")
        tensors: Tensors = {}
        for entry in entries:
            key = prefix + entry.key
            sorted_by_head = naming.by_head and len(entry.holds) > 1
            tensors[key] = self._by_projection(key) if sorted_by_head else self.tensors[key]
        self._read.update(tensors)
        projections = unpack(tensors, naming, prefix)
        self._require_sizes(projections)
        return projections

    def require_nothing_left(self) -> None:
        """Raise if a tensor of the block was not read, because the block may compute with it."""
        known = re.compile("|".join(self.block.naming.ignored) or r"(?!)")
        unread = [
            key
            for key in self.tensors
            if key.startswith(self.prefix) and key not in self._read and not known.fullmatch(key, len(self.prefix))
        ]
        if unread:
            fix = "Merge adapters first, and leave out what has nothing to do with attention."
            if any(key.endswith("_scale_inv") for key in unread):
                fix = "The weights are quantised: convert them to bfloat16 first."
            expected = f"nothing but what {self.config.model_type} has under {self.prefix!r}"
            raise CheckpointError("source", expected=expected, got=", ".join(unread), fix=fix)

    def _has_bias(self, role: str) -> bool:
        bias = self.block.bias if role != "output" or self.block.out_bias is None else self.block.out_bias
        return bool(self.setting(bias)) if isinstance(bias, str) else bias

    def _by_projection(self, key: str) -> Tensor:
        tensor, rows = self.tensors[key], 3 * self.num_heads * self.head_dim
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise _does_not_fit(key, f"{rows} rows", shape_text(tensor.shape))
        return ungrouped(tensor, self.num_heads)

    def _require_sizes(self, projections: Projections) -> None:
        inner = self.num_heads * self.head_dim
        keys = (self.num_kv_heads * self.head_dim, self.embed_dim)
        shapes = {"query": (inner, self.embed_dim), "key": keys, "value": keys, "output": (self.embed_dim, inner)}
        for role, (weight, _) in projections.items():
            if tuple(weight.shape) != shapes[role]:
                where = f"the weight of the {role} under {self.prefix!r}"
                raise _does_not_fit(where, shape_text(shapes[role]), shape_text(weight.shape))


#: Reads arguments of `MultiHeadAttention` from a layer.
Reading = Callable[[StoredLayer], dict[str, Any]]


def setting_of(config: Any, name: str) -> Any:
    """A setting that the configuration must have."""
    if not hasattr(config, name):
        expected = f"the setting {name}, as configurations of {config.model_type} have it"
        raise ArgumentError("config", expected=expected, got=f"a {type(config).__name__} without it")
    return getattr(config, name)


def _does_not_fit(what: str, expected: str, got: str) -> CheckpointError:
    fix = "Does the configuration (hidden_size, num_attention_heads, …) belong to these weights (source)?"
    return CheckpointError(what, expected=expected, got=got, fix=fix)


def multi_head(layer: StoredLayer) -> MultiHeadAttention:
    """Attention with copies of the layer's tensors, and with the settings of its configuration."""
    projections = layer.projections()
    parts: dict[str, Any] = {}
    for read in layer.block.reads:
        parts |= read(layer)
    layer.require_nothing_left()
    sinks, gate = parts.pop("sinks", None), parts.pop("gate", None)
    module = MultiHeadAttention(
        layer.embed_dim,
        layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        bias=projections["query"].bias is not None,
        out_bias=projections["output"].bias is not None,
        dropout=layer.dropout,
        sinks=sinks is not None,
        gate=None if gate is None else "elementwise",
        device="meta",
        **parts,
    )
    fill(module, projections)
    if gate is not None:
        fill_linear(module.gate_proj, gate)
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
    lines += ["  sinks: one per head"] * (sinks is not None) + ["  gate: elementwise"] * (gate is not None)
    report(module, lines, causal=layer.block.causal)
    return module


def gated_queries(layer: StoredLayer) -> MultiHeadAttention:
    """`multi_head` of a layer whose query projection holds, head by head, the query and then its gate."""
    tensors, heads = dict(layer.tensors), layer.num_heads
    for name in ("q_proj.weight", "q_proj.bias"):
        rows = tensors.get(key := layer.prefix + name)
        if rows is not None and rows.shape[0] == 2 * heads * layer.head_dim:  # other sizes are refused as they are
            query, gate = rows.unflatten(0, (heads, 2, -1)).unbind(1)  # (H, D, …) each
            tensors[key], tensors[layer.prefix + name.replace("q_", "gate_")] = query.flatten(0, 1), gate.flatten(0, 1)
    return multi_head(replace(layer, tensors=tensors))


def report(module: Attention, lines: list[str], *, causal: bool) -> None:
    """Store in `loaded_from` what was read, and whether the model is causal. The module itself is not causal."""
    here = "here, but hidden in the model. Pass mask=masks.causal()"
    dropout = [f"  dropout: {module.dropout}"] if module.dropout else []
    text = "\n".join([*lines, *dropout, f"  the future: not hidden {here if causal else 'in the model'}"])
    module.loaded_from = text  # pyright: ignore[reportArgumentType]
