"""The mask that a transformers model passes from its mask function to its attention layers.

The model's own code runs between the two. It is written for the additive mask of ``eager``, and may slice the mask, add
to it or concatenate it. So the mask has the dtype, shape and values of the mask of ``eager``. In addition it carries a
Clearhead mask, which `clearhead.attention` applies faster. ``None`` means that no key is masked, as for ``eager``.

Outside of a traced graph, the additive values are computed when an operator first reads them. From then on only the
values count, because the operator may have changed them.
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
    """The meaning of an additive mask.

    Args:
        mask: shared by the layers of a forward. ``None`` is causal with the last query at the last key.
        cache: the `BoundedCache` that has the mask instead, if its layers and heads hold different keys.
    """

    mask: Mask | None
    cache: Any = None


class _LazyMask(Tensor):
    """An additive mask (B, 1, L, S) whose values are computed when an operator first reads them."""

    _carried: Carried
    _build: Callable[[], Tensor]
    _computed: Tensor | None

    # Operators call `__torch_dispatch__`. Shape, dtype and device are read without a call.
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

    # These methods read a tensor without an operator.

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


def carrying(carried: Carried, build: Callable[[], Tensor], shape: tuple[int, int, int, int], **options: Any) -> Tensor:
    """Return the additive mask of ``build``, of this shape, dtype and device, which carries its meaning."""
    if is_tracing() or is_transformed() or not has_wrappers:  # a graph cannot compute values later
        return build()
    mask = wrapper_of(_LazyMask, shape, **options)
    mask.describe(carried, build)
    return mask


def carried_by(mask: Tensor) -> Carried | None:
    """Return the meaning of the mask, or ``None`` if only its values have it."""
    return mask.carried if isinstance(mask, _LazyMask) else None


def values_of(mask: Tensor) -> Tensor:
    """Return the mask as an ordinary tensor."""
    return mask.computed() if isinstance(mask, _LazyMask) else mask


def _values(argument: Any) -> Any:
    """An argument of an operator, with the values of lazy masks in it."""
    if isinstance(argument, dict):
        return {name: _values(item) for name, item in argument.items()}
    if isinstance(argument, (list, tuple)):
        return type(argument)([_values(item) for item in argument])
    return values_of(argument) if isinstance(argument, Tensor) else argument
