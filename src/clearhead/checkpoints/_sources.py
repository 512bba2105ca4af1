"""The tensors of a module, a state dict, a mapping of the four projections, or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from .._checks import shown
from ..errors import CheckpointError, DTypeError
from ._files import read_file

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
