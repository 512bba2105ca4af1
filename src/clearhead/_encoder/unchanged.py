"""Whether modules are as they were when they were read: the same code, hooks, settings and numbers."""

from __future__ import annotations

import itertools
import operator
import random
from array import array
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._native import extension

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_SAMPLES = 32  # words of a parameter


class Picture:
    """A picture of modules, compared with them before every call.

    PyTorch does not count what is written through ``parameter.data``, as a merged adapter is: samples of the numbers,
    spread over all of a parameter, are compared too.

    Args:
        modules: and all that they hold.
        others: dictionaries of other settings.
    """

    def __init__(self, modules: list[nn.Module], *others: dict[str, Any]) -> None:
        self._modules, self._kinds = modules, list(map(type, modules))
        self._code = code_of(self._kinds)
        fields = [module.__dict__ for module in modules]
        inside = [each[name] for each in fields for name in ("_modules", "_parameters", *HOOKS)]
        self._dictionaries = [*others, *fields, *inside]
        self._objects = [tuple(each.values()) for each in self._dictionaries]
        parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
        self._read = [each for each in parameters if type(each) is nn.Parameter and each.layout is torch.strided]
        self._counted = [each for each in self._read if not each.is_inference()]
        self._places = self._read_places()
        self._samples = samples_of([each for each in self._read if each.is_cpu and each.is_contiguous()])
        self._digest = digest(self._samples)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        code = code_of(self._kinds)
        if len(code) != len(self._code) or any(map(operator.is_not, code, self._code)):
            return False
        if list(map(type, self._modules)) != self._kinds or not _extension.hold(self._dictionaries, self._objects):
            return False
        return self._read_places() == self._places and digest(self._samples) == self._digest

    def _read_places(self) -> tuple[list[int], list[int], bool]:
        """Where the parameters lie, and how often they were written. Another tensor may have been put into one."""
        addresses = [each.data_ptr() for each in self._read]
        return addresses, [each._version for each in self._counted], all(map(Tensor.is_contiguous, self._read))


def code_of(kinds: list[type[nn.Module]]) -> list[object]:
    """The forwards of classes, and everything else that classes outside of PyTorch define."""
    once = dict.fromkeys(kinds)
    others = (vars(kind).values() for kind in once if not kind.__module__.startswith("torch."))
    return [*(kind.forward for kind in once), *itertools.chain.from_iterable(others)]


def samples_of(tensors: Sequence[Tensor]) -> bytes:
    """Addresses of words of contiguous tensors on the CPU, one in each of equal parts, for `digest`."""
    draw, samples = random.Random(0), array("q")
    for tensor in tensors:
        words = tensor.nbytes // 4 if tensor.data_ptr() else 0
        bounds = [words * part // _SAMPLES for part in range(_SAMPLES + 1)]
        parts = ((start, stop) for start, stop in itertools.pairwise(bounds) if start < stop)
        samples.extend(tensor.data_ptr() + 4 * draw.randrange(start, stop) for start, stop in parts)
    return samples.tobytes()


def digest(samples: bytes) -> int:
    """A number that depends on the words at these addresses, which must still be those of the tensors."""
    return _extension.digest(samples)


_extension = cast(Any, extension)
