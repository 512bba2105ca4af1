"""The four projections: views of the tensors of one naming, and copies of them as the parameters of a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import kind
from .._multihead import MultiHeadAttention
from ..errors import CheckpointError, shape_text
from ._namings import ROLES, Entry, Naming, Projection, Role

Projections = Mapping[Role, Projection]


def unpack(tensors: Mapping[str, Tensor], naming: Naming, prefix: str) -> Projections:
    """Split fused tensors, and transpose weights that are stored (in, out)."""
    weights: dict[Role, Tensor] = {}
    biases: dict[Role, Tensor] = {}
    for entries, dimensions, tensors_of in ((naming.weights, 2, weights), (naming.biases, 1, biases)):
        for entry in entries:
            if prefix + entry.key in tensors:
                tensor = _require_plain(prefix + entry.key, tensors[prefix + entry.key], dimensions)
                tensor = tensor.t() if naming.transposed and dimensions == 2 else tensor  # (out, in)
                tensors_of.update(_split(prefix, entry, tensor))
    projections: Projections = {role: Projection(weights[role], biases.get(role)) for role in ROLES}
    _require_fit(naming, prefix, projections)
    return projections


def _require_plain(key: str, tensor: Tensor, dimensions: int) -> Tensor:
    plain = not tensor.is_nested and tensor.layout is torch.strided and tensor.is_floating_point()
    if not plain or tensor.dim() != dimensions or tensor.numel() == 0:
        expected = f"a strided floating point tensor with {dimensions} dimension(s)"
        is_strided = tensor.layout is torch.strided
        got = kind(tensor) if is_strided else f"{kind(tensor)} of layout {tensor.layout}"
        raise CheckpointError(key, expected=expected, got=got, fix="" if is_strided else "Convert it with .to_dense().")
    return tensor


def _split(prefix: str, entry: Entry, tensor: Tensor) -> dict[Role, Tensor]:
    count = len(entry.holds)
    if tensor.shape[0] % count:
        expected = f"{', '.join(entry.holds)} of one size, so an output size that {count} divides"
        raise CheckpointError(prefix + entry.key, expected=expected, got=shape_text(tensor.shape))
    return dict(zip(entry.holds, tensor.chunk(count), strict=True))


def _require_fit(naming: Naming, prefix: str, projections: Projections) -> None:
    rows = {role: projection.weight.shape[0] for role, projection in projections.items()}
    problems = [
        f"the {role} bias has {projection.bias.shape[0]} entries and its weight {rows[role]} outputs"
        for role, projection in projections.items()
        if projection.bias is not None and projection.bias.shape[0] != rows[role]
    ]
    output_features = projections["output"].weight.shape[1]
    if rows["query"] != output_features:
        problems.append(f"queries have {rows['query']} features and the output takes {output_features}")
    if rows["key"] != rows["value"]:
        problems.append(f"keys have {rows['key']} features and values {rows['value']}")
    if problems:
        expected = f"sizes that fit together in the naming {naming.name}" + (f" under {prefix!r}" if prefix else "")
        fix = "" if naming.transposed else "Stored as (in, out), a weight has to be transposed first."
        raise CheckpointError("source", expected=expected, got="; ".join(problems), fix=fix)


#: The names of the projections in `MultiHeadAttention`.
LINEARS = dict(zip(ROLES, ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True))


def fill(module: MultiHeadAttention, projections: Projections) -> None:
    """Replace the parameters of the module's projections by copies of the tensors."""
    for role, (weight, bias) in projections.items():
        linear: Any = getattr(module, LINEARS[role])
        linear.weight = parameter(weight)
        if bias is not None:
            linear.bias = parameter(bias)
        elif linear.bias is not None:
            linear.bias = nn.Parameter(weight.new_zeros(weight.shape[0]))


def parameter(tensor: Tensor) -> nn.Parameter:
    """A parameter with a copy of the tensor."""
    return nn.Parameter(copied(tensor))


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy of the tensor, outside of any graph."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
