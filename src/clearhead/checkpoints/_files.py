"""Tensors of a file, read without running code of the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError


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
