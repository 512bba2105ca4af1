"""Reading tensors from a file, without running any code that lies in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError


def read_file(path: Path) -> Mapping[str, Any]:
    """Read a state dict, onto the CPU, from a ``.safetensors`` file or one that `torch.save` wrote.

    The latter only as ``torch.load(weights_only=True)`` reads it, which unpickles tensors and plain containers and
    nothing that could run.

    Raises:
        CheckpointError: for another kind of file, one that cannot be read, or one that holds no state dict.
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
    # What torch.load raises depends on the bytes; any of it means that these are not plain tensors.
    except Exception as error:
        raise _unreadable(
            path,
            error,
            "a file of tensors alone, as torch.save(module.state_dict(), path) writes it",
            "A file that holds a whole pickled module runs code when it is opened and is not read here.",
        ) from error


def _unreadable(path: Path, error: Exception, expected: str, fix: str = "") -> CheckpointError:
    said = str(error).strip().splitlines()
    got = f"{path}, which fails with {type(error).__name__}" + (f" ({said[0].rstrip('. ')})" if said else "")
    return CheckpointError("source", expected=expected, got=got, fix=fix)


_READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".bin": _read_torch,
}
