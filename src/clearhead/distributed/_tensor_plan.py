"""The changes that `tensor_parallel` makes in a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._checks import kind
from .._multihead import MultiHeadAttention
from ..errors import ArgumentError, DTypeError
from ..masks._grid import Offset
from ..positions import RelativeBias
from ..transformer import FeedForward, SwiGLU
from ._description import attention_parts, facts_of_module
from ._heads import (
    WHERE,
    LocalHeads,
    distribute,
    features_of_output,
    place_input,
    placed,
    split_linear,
    split_norm,
    split_output,
    summed_output,
)
from ._methods import heads_divide

Placements = dict[str, Placement]

#: Placements of the parameters of a linear layer, or of LoRA's around one; others are replicated.
_COLUMNS: Placements = {"weight": Shard(0), "bias": Shard(0), "lora_B": Shard(0)}
_ROWS: Placements = {"weight": Shard(1), "lora_A": Shard(1)}


@dataclass
class Splitting:
    """The changes that split a module. They are collected first, so that a refusal changes nothing.

    Args:
        mesh: the mesh of the processes.
        changes: the changes, which are made when every process has collected them.
        roles: for each part and parameter its first name, and how it is split. Layers may share a part.
    """

    mesh: DeviceMesh
    changes: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    roles: dict[int, tuple[str, object]] = field(default_factory=dict[int, tuple[str, object]])

    def add(self, module: nn.Module) -> dict[str, int]:
        """Collect the changes of a module. Raise if a part cannot be split.

        Returns:
            The facts of the module that the processes agree on.
        """
        attentions, other_parts = attention_parts(WHERE, module)
        for name, attention in attentions:
            self._add_attention(name, attention)
        for name, part in other_parts:
            self._add_part(name, part)
        for name, parameter in module.named_parameters():
            if id(parameter) not in self.roles:  # each process would train it for itself
                raise ArgumentError(
                    f"module.{name}",
                    expected="a parameter of a projection, norm, sink or relative bias",
                    got=f"a {parameter.dtype} parameter that cannot be split",
                    fix="Leave the part that holds it out, or replace it.",
                )
        return facts_of_module(module, attentions, other_parts)

    def _add_part(self, name: str, part: nn.Module) -> None:
        if isinstance(part, FeedForward):
            _require_no_parameters(f"{name}.activation", part.activation)
            self._add_linear(f"{name}.linear1", part.linear1, _COLUMNS)
            self._add_linear(f"{name}.linear2", part.linear2, _ROWS)
        elif isinstance(part, SwiGLU):
            if self._is_new(name, part, "gated"):
                self.changes.append(
                    partial(place_input, part, partial(placed, self.mesh, Replicate(), f"the input of {name}"))
                )
            self._add_linear(f"{name}.gate_proj", part.gate_proj, _COLUMNS)
            self._add_linear(f"{name}.up_proj", part.up_proj, _COLUMNS)
            self._add_linear(f"{name}.down_proj", part.down_proj, _ROWS)
        elif isinstance(part, nn.LayerNorm | nn.RMSNorm) or not list(part.parameters()):
            self._add_norm(name, part, Replicate(), {key: Replicate() for key, _ in part.named_parameters()})
        else:
            fix = "Feed-forward parts are FeedForward or SwiGLU, and norms nn.LayerNorm or nn.RMSNorm."
            raise DTypeError(name, expected="a part that can be split", got=kind(part), fix=fix)

    def _add_attention(self, name: str, module: MultiHeadAttention) -> None:
        shard = _heads_of(name, module, self.mesh)
        if not self._is_new(name, module, "attention"):
            return
        kv_placements, kv_features, splits_keys = _COLUMNS, None, module.num_kv_heads % self.mesh.size() == 0
        if not splits_keys:
            start = shard.offset.head * module.num_kv_heads // module.num_heads * module.head_dim
            kv_placements, kv_features = {}, slice(start, start + module.head_dim)
        self._add_linear(f"{name}.q_proj", module.q_proj, _COLUMNS)
        self._add_linear(f"{name}.k_proj", module.k_proj, kv_placements, kv_features)
        self._add_linear(f"{name}.v_proj", module.v_proj, kv_placements, kv_features)
        if module.gate_proj is not None:
            self._add_linear(f"{name}.gate_proj", module.gate_proj, _COLUMNS)
        self._add_linear(f"{name}.out_proj", module.out_proj, _ROWS)
        self._add_head_norm(f"{name}.q_norm", module.q_norm, module.num_heads, module.head_dim, True)
        self._add_head_norm(f"{name}.k_norm", module.k_norm, module.num_kv_heads, module.head_dim, splits_keys)
        _require_no_parameters(f"{name}.position", module.position)
        if module.sinks is not None:
            self._add_parameter(f"{name}.sinks", module, "sinks", Shard(0))
        for part in () if module.mask is None else module.mask.parts():
            if isinstance(part, RelativeBias):
                self._add_parameter(f"{name}.mask", part, "weight", Shard(1))
        self.changes.append(lambda: setattr(module, "head_shard", shard))

    def _add_linear(self, name: str, module: nn.Module, placements: Placements, features: slice | None = None) -> None:
        """Split a linear layer, or LoRA's layer around one.

        Args:
            name, module: the layer.
            placements: the placements of its parameters by name. Other parameters are replicated.
            features: the features of the output that this process keeps, if no parameter is split.
        """
        if not _is_linear(module):
            expected = "a linear layer, or peft's LoRA layer of one without DoRA"
            fix = "Split the module before it is replaced."
            raise DTypeError(name, expected=expected, got=kind(module), fix=fix)
        if not self._is_new(name, module, (sorted(placements), str(features))):
            return
        for key, parameter in module.named_parameters():
            placement = placements.get(key.removeprefix("base_layer.").split(".")[0], Replicate())
            size = parameter.shape[placement.dim] if isinstance(placement, Shard) else 0
            if size % self.mesh.size():
                expected = f"a multiple of the mesh's W = {self.mesh.size()} features"
                raise ArgumentError(name, expected=expected, got=str(size), fix="Use a mesh of another size.")
            self._add_parameter(f"{name}.{key}", module, key, placement)
        input = Shard(-1) if placements is _ROWS else Replicate()
        leave = split_output if features is None else partial(features_of_output, features)
        leave = partial(summed_output, name) if placements is _ROWS else leave
        self.changes.append(partial(split_linear, module, self.mesh, input, name, leave))

    def _add_norm(self, name: str, module: nn.Module, input: Placement, placements: Placements) -> None:
        """Split a norm, whose output is placed like its input."""
        if placements and self._is_new(name, module, (str(input), sorted(map(str, placements.items())))):
            for key, placement in placements.items():
                self._add_parameter(f"{name}.{key}", module, key, placement)
            self.changes.append(partial(split_norm, module, self.mesh, input, name))

    def _add_head_norm(self, name: str, norm: nn.Module | None, heads: int, dim: int, splits: bool) -> None:
        placements: Placements = {}
        for key, parameter in () if norm is None else norm.named_parameters():
            per_head = parameter.dim() > 1 and parameter.shape[0] == heads
            if tuple(parameter.shape) != (dim,) and not (per_head and splits):
                expected = f"parameters ({dim},) of all heads" + (f", or of each head ({heads}, …)" if splits else "")
                raise ArgumentError(name, expected=expected, got=f"{key} {tuple(parameter.shape)}")
            placements[key] = Shard(0) if per_head else Replicate()
        if norm is not None:
            self._add_norm(name, norm, Shard(1), placements)

    def _add_parameter(self, name: str, module: nn.Module, path: str, placement: Placement) -> None:
        parameter: Any = module.get_parameter(path)
        if isinstance(parameter, DTensor):
            fix = "Split every module once, before fully_shard."
            raise ArgumentError(name, expected="a plain parameter", got="a DTensor", fix=fix)
        owner, _, key = path.rpartition(".")
        owner_module = module.get_submodule(owner)
        if self._is_new(name, parameter, (id(owner_module), key)):
            self.changes.append(partial(distribute, name, owner_module, key, self.mesh, placement))

    def _is_new(self, name: str, part: nn.Module | nn.Parameter, role: object) -> bool:
        """Whether a part or parameter, which layers may share, is met for the first time. Raise if its roles differ."""
        first_name, first_role = self.roles.setdefault(id(part), (name, role))
        if first_role != role:
            expected, got = "a part or parameter that is split in one way", f"that of {first_name}"
            fix = "Splitting would untie them: give each its own, or share the whole part or layer."
            raise ArgumentError(name, expected=expected, got=got, fix=fix)
        return first_name == name


def _heads_of(name: str, module: MultiHeadAttention, mesh: DeviceMesh) -> LocalHeads:
    """The heads of this process. Raise if the heads of the module cannot be split."""
    if module.head_shard is not None or module.sequence_shard is not None:
        before = WHERE if module.head_shard is not None else "context_parallel"
        fix = "Split every module once, over heads first and over sequences then."
        raise ArgumentError(name, expected="a whole attention", got=f"one after {before}", fix=fix)
    heads, kv_heads, world = module.num_heads, module.num_kv_heads, mesh.size()
    if not heads_divide(heads, kv_heads, world):
        raise ArgumentError(
            f"{name}: num_heads, num_kv_heads",
            expected=f"H a multiple of the mesh's W = {world}, and Hkv a multiple or a divisor of it",
            got=f"H = {heads}, Hkv = {kv_heads}",
            fix="Use a mesh of another size.",
        )
    local = heads // world
    offset = Offset(heads, mesh.get_local_rank() * local)
    return LocalHeads(name, mesh, offset, kv_heads, local, max(kv_heads // world, 1))


def _require_no_parameters(name: str, part: object) -> None:
    if isinstance(part, nn.Module) and list(part.parameters()):
        fix = "Its gradient would be another on every process."
        raise ArgumentError(name, expected="a part that learns nothing", got=kind(part), fix=fix)


def _is_linear(module: nn.Module) -> bool:
    """Whether it computes W x + b, or W x + b + s B A x as peft's LoRA layers do (Hu et al., "LoRA", 2021)."""
    base = getattr(module, "base_layer", None)
    if base is None:
        return isinstance(module, nn.Linear)
    inside = {name for name, part in module.named_children() if list(part.parameters())}
    return isinstance(base, nn.Linear) and inside <= {"base_layer", "lora_A", "lora_B"}
