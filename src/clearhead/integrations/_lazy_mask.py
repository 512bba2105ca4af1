"""The mask that a transformers model hands from its mask function to its attention layers.

Between the two runs the model's own code, which was written for the additive mask of ``eager``: it may slice it, add to
it, concatenate it, or never call an attention function at all. So a mask is always what ``eager`` would get, by dtype,
shape and value, and carries beside it what `clearhead.attention` computes faster with. ``None`` means that no key is
hidden, as it does for ``eager``.

Outside of a traced graph the additive values do not exist until an operator reads them. From then on the values count
and not what was carried, since they may have been written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._environment import is_tracing, is_transformed
from .._torch_private import disabled_torch_function, has_wrappers, wrapper_of
from ..masks._base import Mask


class Carried(NamedTuple):
    """What an additive mask stands for."""

    mask: Mask | None
    """Shared by the layers of a forward; ``None`` for causal with the last query at the last key."""
    cache: Any = None
    """The cache that says instead, where every layer and head holds keys of its own (`BoundedCache`)."""


class _LazyMask(Tensor):
    """An additive mask (B, 1, L, S) whose values are computed when an operator first reads them."""

    _carried: Carried
    _build: Callable[[], Tensor]
    _computed: Tensor | None

    # Shape, dtype and device are read without coming here; operators arrive in `__torch_dispatch__`.
    __torch_function__ = disabled_torch_function

    def describe(self, carried: Carried, build: Callable[[], Tensor]) -> None:
        self._carried, self._build, self._computed = carried, build, None

    @property
    def carried(self) -> Carried | None:
        return self._carried if self._computed is None else None

    def computed(self) -> Tensor:
        if self._computed is None:
            self._computed = self._build()
        return self._computed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_values(args), **_values(kwargs or {}))

    # What reads a tensor without an operator.

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.computed())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.computed().clone()

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.computed().__reduce_ex__(proto)

    def numpy(self, *, force: bool = False) -> Any:
        return self.computed().numpy(force=force)

    def tolist(self) -> Any:
        return self.computed().tolist()


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query may attend and the lowest number of ``dtype`` elsewhere, as ``eager`` writes it."""
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)


def carrying(
    carried: Carried,
    build: Callable[[], Tensor],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Return the additive mask that ``build`` makes, of this shape and dtype, and what it stands for beside it."""
    if is_tracing() or is_transformed() or not has_wrappers:  # a graph holds no values that are computed later
        return build()
    mask = wrapper_of(_LazyMask, shape, dtype=dtype, device=device)
    mask.describe(carried, build)
    return mask


def carried_by(mask: Tensor) -> Carried | None:
    """Return what the mask stands for, or ``None`` where its values alone say it."""
    return mask.carried if isinstance(mask, _LazyMask) else None


def values_of(mask: Tensor) -> Tensor:
    """Return the mask as an ordinary tensor."""
    return mask.computed() if isinstance(mask, _LazyMask) else mask


def _values(given: Any) -> Any:
    """Arguments of an operator with the values of lazy masks among them."""
    if isinstance(given, dict):
        return {name: _values(each) for name, each in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)([_values(each) for each in given])
    return values_of(given) if isinstance(given, Tensor) else given
