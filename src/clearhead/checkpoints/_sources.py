"""The tensors of a module, a state dict, a mapping of the four projections, or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import shown
from ..errors import CheckpointError, DTypeError

Source = nn.Module | Mapping[str, Tensor | nn.Linear] | str | os.PathLike[str]
Tensors = dict[str, Tensor]

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
