"""The tensors of a module, a state dict, a mapping of the four projections, or a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
            fix = "Its keys are the names of the tensors."
            got = f"a key {shown(name)}"
            raise CheckpointError("source", expected="a state dict with strings as keys", got=got, fix=fix)
        if isinstance(value, nn.Module):
            tensors |= value.state_dict(prefix=f"{name}.")
        elif isinstance(value, Tensor):
            tensors[f"{name}.weight" if name in _BY_HAND else name] = value
        elif not name.endswith("_extra_state"):
            raise CheckpointError(
                "source",
                expected="a state dict, with a tensor under every name",
                got=f"{type(value).__name__} under {name!r}",
                fix=f"If the state dict lies inside, pass source[{name!r}]; read a file with "
                "torch.load(path, weights_only=True) first."
                if isinstance(value, Mapping)
                else "",
            )
    return tensors


def read_file(path: Path) -> Mapping[str, Any]:
    """Read a state dict onto the CPU, from a ``.safetensors`` file or from a file that `torch.save` wrote.

    Files of `torch.save` are read with ``weights_only=True``, which unpickles only tensors and plain containers.
    """
    read = _READERS.get(path.suffix)
    if read is None:
        raise CheckpointError(
            "source",
            expected="a file that ends in " + ", ".join(_READERS),
            got=f"{path}",
            fix="A sharded checkpoint is given one of its files at a time.",
        )
    if not path.is_file():
        raise CheckpointError("source", expected="a file", got=f"{path}, which is none")
    content = read(path)
    if not isinstance(content, Mapping):
        expected = "a file with a state dict, names and tensors"
        raise CheckpointError("source", expected=expected, got=f"{type(content).__name__} in {path}")
    return content


def _read_safetensors(path: Path) -> object:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(
            "source",
            expected="the package safetensors, to read .safetensors files",
            got="no such package here",
            fix='Install it with pip install "clearhead[hf]".',
        ) from error
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, error, "a readable .safetensors file") from error


def _read_torch(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # The exception depends on the bytes. Each one means that these are not plain tensors.
    except Exception as error:
        raise _unreadable(
            path,
            error,
            "a file of tensors alone, as torch.save(module.state_dict(), path) writes it",
            "A file that holds a whole pickled module runs code when it is opened and is not read here.",
        ) from error


def _unreadable(path: Path, error: Exception, expected: str, fix: str = "") -> CheckpointError:
    lines = str(error).strip().splitlines()
    got = f"{path}, which fails with {type(error).__name__}" + (f" ({lines[0].rstrip('. ')})" if lines else "")
    return CheckpointError("source", expected=expected, got=got, fix=fix)


_READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": _read_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin"), _read_torch),
}
