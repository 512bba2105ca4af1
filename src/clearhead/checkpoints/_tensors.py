"""The tensors of a module, a state dict, a mapping or a file, and the four projections among them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import kind, shown
from .._multihead import MultiHeadAttention
from ..errors import CheckpointError, DTypeError, shape_text
from ._namings import ROLES, Entry, Naming, Projection, Role

Source = nn.Module | Mapping[str, Tensor | nn.Linear] | str | os.PathLike[str]
Tensors = dict[str, Tensor]
Projections = Mapping[Role, Projection]

# Keys of a mapping that was written by hand: `{"query": linear, …}`. A weight may replace the Linear.
_BY_HAND = ("q", "k", "v", "o", "query", "key", "value", "output")
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def read_source(source: Source) -> tuple[Tensors, nn.Module | None]:
    """The tensors of a source by name, and the source itself if it is a module."""
    if isinstance(source, nn.Module):
        return _flat(source.state_dict()), source
    if isinstance(source, str | os.PathLike):
        source = read_file(Path(source))
    if isinstance(source, Mapping):
        return _flat(source), None
    expected = "a module, a state dict, a mapping of the four projections, or the path of a file"
    raise DTypeError("source", expected=expected, got=type(source).__name__)


def listed(names: list[str], most: int) -> str:
    """The first names in words, and how many others follow."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "no names"


def _flat(mapping: Mapping[str, object]) -> Tensors:
    tensors: Tensors = {}
    for name, value in mapping.items():
        if not isinstance(name, str):
            expected = "a state dict, whose keys are the names of the tensors"
            raise CheckpointError("source", expected=expected, got=f"a key {shown(name)}")
        if isinstance(value, nn.Module):
            tensors |= value.state_dict(prefix=f"{name}.")
        elif isinstance(value, Tensor):
            tensors[f"{name}.weight" if name in _BY_HAND else name] = value
        elif not name.endswith("_extra_state"):
            expected, got = "a state dict, with a tensor under every name", f"{type(value).__name__} under {name!r}"
            read_first = "read a file with torch.load(path, weights_only=True) first."
            fix = f"If the state dict lies inside, pass source[{name!r}]; {read_first}"
            raise CheckpointError("source", expected=expected, got=got, fix=fix if isinstance(value, Mapping) else "")
    return tensors


def read_file(path: Path) -> Mapping[str, Any]:
    """Read a state dict onto the CPU, from a ``.safetensors`` file or from a file that `torch.save` wrote.

    Files of `torch.save` are read with ``weights_only=True``, which unpickles only tensors and plain containers.
    """
    if path.suffix not in _SUFFIXES:
        fix = "A sharded checkpoint is given one of its files at a time."
        raise CheckpointError("source", expected=f"a file that ends in {', '.join(_SUFFIXES)}", got=f"{path}", fix=fix)
    if not path.is_file():
        raise CheckpointError("source", expected="a file", got=f"{path}, which is none")
    content = _content(path)
    if not isinstance(content, Mapping):
        expected = "a file with a state dict, names and tensors"
        raise CheckpointError("source", expected=expected, got=f"{type(content).__name__} in {path}")
    return content


def _content(path: Path) -> object:
    is_safe = path.suffix == ".safetensors"
    try:
        if is_safe:
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except ModuleNotFoundError as error:
        if not is_safe:
            raise
        fix = 'Install it with pip install "clearhead[hf]".'
        raise CheckpointError("source", expected="the package safetensors", got=str(error), fix=fix) from error
    # The exception depends on the bytes. Each one means that these are not plain tensors.
    except Exception as error:
        lines = str(error).strip().splitlines()
        got = f"{path}, which fails with {type(error).__name__}" + (f" ({lines[0].rstrip('. ')})" if lines else "")
        expected = "a file of tensors alone, as safetensors or torch.save(module.state_dict(), path) writes it"
        fix = "" if is_safe else "A pickled module runs code when it is opened, and is not read here."
        raise CheckpointError("source", expected=expected, got=got, fix=fix) from error


_OF_A_HEAD = re.compile(r"((?:.*\.)?heads\.)(\d+)(\.\w+\.(?:weight|bias))")


def join_heads(tensors: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, int]]:
    """Tensors of single heads, such as ``heads.0.key.weight``, joined as ``heads.*.key.weight``; how many of each."""
    heads: dict[str, dict[int, str]] = {}
    for name in tensors:
        if match := _OF_A_HEAD.fullmatch(name):
            heads.setdefault(f"{match[1]}*{match[3]}", {})[int(match[2])] = name
    result, counts = dict(tensors), {}
    for joined, names in heads.items():
        parts = [tensors[names[head]] for head in sorted(names)]
        if (
            sorted(names) == list(range(len(names)))
            and len({(part.shape, part.dtype, part.device) for part in parts}) == 1
        ):
            result[joined], counts[joined] = torch.cat(parts), len(parts)
            for name in names.values():
                del result[name]
    return result, counts


def ungrouped(fused: Tensor, heads: int) -> Tensor:
    """Rows that are sorted by heads, (H·3·D, …), sorted by query, key and value: (3·H·D, …)."""
    return fused.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def grouped(fused: Tensor, heads: int) -> Tensor:
    """Undo `ungrouped`."""
    return fused.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def in_order(projections: Projections, heads: int) -> Projections:
    """Projections of a naming `by_head`, whose rows were split as if all queries came first."""
    inputs = [projections[role] for role in ROLES[:3]]
    weights = ungrouped(torch.cat([weight for weight, _ in inputs]), heads).chunk(3)
    biases = [bias for _, bias in inputs if bias is not None]
    split = ungrouped(torch.cat(biases), heads).chunk(3) if biases else (None,) * 3
    pairs = zip(weights, split, strict=True)
    return {**projections, **{role: Projection(*pair) for role, pair in zip(ROLES[:3], pairs, strict=True)}}


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
    for role, projection in projections.items():
        fill_linear(getattr(module, LINEARS[role]), projection)


def fill_linear(linear: Any, projection: Projection) -> None:
    """Replace the parameters of a linear layer by copies of the tensors."""
    weight, bias = projection
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
