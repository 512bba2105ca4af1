"""The masks of transformers' models: `make_mask` makes them, and `read_mask` reads them.

The model's own code runs between the two. It is written for the additive mask of ``eager``, and may slice the mask, add
to it or concatenate it. So the mask has the dtype, shape and values of the mask of ``eager``. In addition it carries a
Clearhead mask, which `clearhead.attention` applies faster. ``None`` means that no key is masked, as for ``eager``.

Outside of a traced graph, the additive values are computed when an operator first reads them. Once one of them was
written, only the values count. Reading changes nothing, because a layer that checkpointing computes again must find the
mask that it found before another layer has read it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask

from .. import masks
from .._checks import FLOATS, INTEGERS, flag, integer, kind, require_factory, shown, strided
from .._environment import has_values
from .._torch_private import disabled_torch_function, has_wrappers, wrapper_of, writes_to
from ..errors import DTypeError, MaskTypeError
from ..masks._base import Mask
from ..masks._prepared import shared
from ..masks._tensors import KeepKeys
from ._packed_row import Row


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **description: Any,
) -> Tensor | None:
    """Build the mask of a transformers model. transformers calls it.

    Args:
        batch_size, q_length, kv_length: B, L and S.
        q_offset, kv_offset: absolute position of the first query and of the first key.
        allow_is_causal_skip: whether windows and padding are the only additions to a causal mask. If they mask
            nothing, the mask carries only that it is causal.
        allow_is_bidirectional_skip: whether the model accepts ``None`` for a mask that masks nothing.
        dtype: dtype of the additive mask.
        device: device of the mask.
        description: further arguments of transformers' ``eager_mask``.

    Returns:
        The result of transformers' ``eager_mask``: an additive mask (B, 1, L, S), or ``None`` if nothing is masked and
        the model accepts that. Its values are computed when they are first read. `attention_forward` reads the bool
        mask that it carries instead.

    Example:
        >>> from clearhead.integrations.transformers import make_mask
        >>> make_mask(batch_size=2, q_length=5, kv_length=5).shape
        torch.Size([2, 1, 5, 5])
    """
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset}
    for name, value in sizes.items():
        integer(name, value, least=0)
    _require_offset(q_offset)
    require_factory(device, dtype)
    allow_is_causal_skip = flag("allow_is_causal_skip", allow_is_causal_skip)
    allow_is_bidirectional_skip = flag("allow_is_bidirectional_skip", allow_is_bidirectional_skip)
    if description.get("attention_mask") is not None and not has_values():
        # Whether padding hides anything is a value, which neither a transform nor a tracer may read.
        allow_is_causal_skip = allow_is_bidirectional_skip = False
    arguments: dict[str, Any] = description | {
        **sizes,
        "q_offset": q_offset,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        "device": device,
    }
    # With a static cache there are keys behind the last query, so a causal mask needs the position of the query.
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    may_be_causal = allow_is_causal_skip and aligned and not allow_is_bidirectional_skip
    build = partial(eager_mask, **arguments | {"allow_is_bidirectional_skip": False}, dtype=dtype)
    padding = _padding_of(arguments) if aligned else None
    if padding is not None and arguments["mask_function"] is bidirectional_mask_function:
        # One read for both: whether anything is hidden, and whether an item is nothing but padding.
        fewest = min(padding.sum(1).tolist())
        if fewest == kv_length and allow_is_bidirectional_skip:
            return None
        mask = shared(KeepKeys("keep", padding, keyed=fewest > 0))
    elif padding is not None:
        hides = not (may_be_causal and bool(padding.all()))
        rule, keys = causal_mask(q_length, kv_length), masks.keep(keys=padding)
        mask = shared(keys if rule is None else rule & keys) if hides else None
    else:
        visible = sdpa_mask(**arguments, allow_is_causal_skip=may_be_causal)
        if visible is None and not may_be_causal:
            return None
        mask = None if visible is None else shared(masks.keep(visible))
        # From the same values: the model's rule is not called a second time.
        build = build if visible is None else partial(additive_mask, visible, dtype)
    return carrying(Carried(mask), build, (batch_size, 1, q_length, kv_length), dtype=dtype, device=device)


def _padding_of(arguments: dict[str, Any]) -> Tensor | None:
    """Bool (B, S), false at padding, if a mask hides nothing else, or only keys behind the query as well."""
    padding = arguments.get("attention_mask")
    simple = arguments.get("mask_function") in (bidirectional_mask_function, causal_mask_function)
    if not simple or arguments.get("local_size") is not None or arguments.get("use_vmap"):
        return None
    if type(padding) is not Tensor or padding.dtype != torch.bool or padding.is_meta:
        return None
    if not has_values():
        return None
    fits = tuple(padding.shape) == (arguments["batch_size"], arguments["kv_length"]) and padding.numel() > 0
    return padding if fits and padding.device == torch.device(arguments["device"]) else None


def _require_offset(q_offset: object) -> None:
    """Raise if the offset is not an int, or the tensor with one int of a static cache."""
    if not isinstance(q_offset, Tensor):
        integer("q_offset", q_offset, least=0)
    elif strided("q_offset", q_offset).numel() != 1 or q_offset.dtype not in INTEGERS:
        raise DTypeError("q_offset", expected="an int, or a tensor of one", got=shown(q_offset))


def read_mask(attention_mask: Tensor, query: Tensor, key: Tensor) -> masks.Mask | None:
    """The meaning of a model's mask, which may be a mask of `make_mask`."""
    if not isinstance(attention_mask, Tensor):
        raise MaskTypeError("attention_mask", expected="a tensor or None", got=type(attention_mask).__name__)
    carried = carried_by(attention_mask)
    if carried is not None:
        return causal_mask(query.shape[2], key.shape[2]) if carried.mask is None else carried.mask
    attention_mask = strided("attention_mask", values_of(attention_mask))
    if attention_mask.dtype == torch.bool:
        return masks.keep(attention_mask)
    if attention_mask.dtype in FLOATS:
        # transformers writes "hidden" as the lowest number of the dtype.
        lowest = torch.finfo(attention_mask.dtype).min
        return masks.bias(attention_mask.masked_fill(attention_mask <= lowest, float("-inf")))
    expected = "a bool mask (True = may attend) or an additive float mask"
    raise DTypeError("attention_mask", expected=expected, got=kind(attention_mask), fix="Give 4-D masks as bool.")


def causal_mask(length: int, keys: int) -> masks.Mask | None:
    """Causal with the last query at the last key, or ``None`` if that masks nothing."""
    if length == 1:
        return None
    return masks.causal("bottom_right" if length < keys else "top_left")


class Carried(NamedTuple):
    """The meaning of an additive mask.

    Args:
        mask: shared by the layers of a forward. ``None`` is causal with the last query at the last key.
        cache: the `BoundedCache` that has the mask instead, if its layers and heads hold different keys.
        row: the texts of one row, of which the mask is that each sees itself.
    """

    mask: Mask | None
    cache: Any = None
    row: Row | None = None


class _LazyMask(Tensor):
    """An additive mask (B, 1, L, S) whose values are computed when an operator first reads them."""

    _carried: Carried
    _build: Callable[[], Tensor]
    _computed: Tensor | None
    _writes: int | None  # so far
    _views: list[tuple[Tensor, int | None]]  # of the values, that operators have returned, with the writes to each

    # Operators call `__torch_dispatch__`. Shape, dtype and device are read without a call.
    __torch_function__ = disabled_torch_function

    def describe(self, carried: Carried, build: Callable[[], Tensor]) -> None:
        self._carried, self._build, self._computed = carried, build, None
        self._writes, self._views = writes_to(self), []

    @property
    def carried(self) -> Carried | None:
        if self._computed is None:
            return self._carried
        seen = (self, self._writes), *self._views
        return self._carried if all(before is not None and writes_to(x) == before for x, before in seen) else None

    def computed(self) -> Tensor:
        if self._computed is None:
            self._computed = self._build()
        return self._computed

    def watch(self, result: Any) -> None:
        """Watch the result of an operator for writes, if it is a view of the values."""
        results = result if isinstance(result, (list, tuple)) else (result,)
        for tensor in results:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() == self._address:
                self._views.append((tensor, writes_to(tensor)))

    @property
    def _address(self) -> int:
        return self.computed().untyped_storage().data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        carried = args[0].carried if func is torch.ops.aten.detach.default else None
        if carried is not None and carried.row is not None:  # reentrant checkpointing detaches what it keeps
            return carrying(carried, args[0]._build, args[0].shape, dtype=args[0].dtype, device=args[0].device)
        result = func(*_values(args), **_values(kwargs or {}))
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, _LazyMask):
                argument.watch(result)
        return result

    # These methods read a tensor without an operator.

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.computed())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.computed().clone()

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.computed().__reduce_ex__(proto)

    def numpy(self, *, force: bool = False) -> Any:
        array = self.computed().numpy(force=force)
        self._writes = None  # those through an array are not counted
        return array

    def tolist(self) -> Any:
        return self.computed().tolist()


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query may attend and the lowest number of ``dtype`` elsewhere, as ``eager`` writes it."""
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)


def carrying(carried: Carried, build: Callable[[], Tensor], shape: tuple[int, ...], **options: Any) -> Tensor:
    """Return the additive mask of ``build``, of this shape, dtype and device, which carries its meaning."""
    if not has_values() or not has_wrappers:  # a graph cannot compute values later
        return build()
    mask = wrapper_of(_LazyMask, shape, **options)
    mask.describe(carried, build)
    return mask


def mask_of_row(row: Row, dtype: torch.dtype) -> Tensor:
    """The additive mask (1, 1, T, T) by which each text of a row sees itself only."""
    tokens, device = row.positions.shape[0], row.positions.device
    bounds = row.boundaries[1:].to(device)
    texts = torch.searchsorted(bounds, torch.arange(tokens, device=device), right=True)
    mask = masks.documents(texts)

    def build() -> Tensor:
        return additive_mask((texts[:, None] == texts)[None, None], dtype)

    return carrying(Carried(mask, row=row), build, (1, 1, tokens, tokens), dtype=dtype, device=device)


def carried_by(mask: object) -> Carried | None:
    """Return the meaning of the mask, or ``None`` if only its values have it."""
    return mask.carried if isinstance(mask, _LazyMask) else None


def values_of(mask: Any) -> Any:
    """Return a lazy mask as an ordinary tensor, and anything else as it is."""
    return mask.computed() if isinstance(mask, _LazyMask) else mask


def _values(argument: Any) -> Any:
    """An argument of an operator, with the values of lazy masks in it."""
    if isinstance(argument, dict):
        return {name: _values(item) for name, item in argument.items()}
    if isinstance(argument, (list, tuple)):
        return type(argument)([_values(item) for item in argument])
    return values_of(argument)
