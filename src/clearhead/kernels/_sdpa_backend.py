"""Which of its fused kernels PyTorch takes for a call, and what keeps the call from a faster one."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from .._call.heads import fold_group
from .._torch_private import fused_sdpa_choice, sdpa_settings
from ._base import Backend

_HALF = (torch.float16, torch.bfloat16)
_GOOD_HEAD = 64  # every fused kernel takes this head size
#: PyTorch's kernels by their numbers in `SDPBackend`, the fastest one first. 0 builds all scores.
_NAMES = {3: "cuDNN", 1: "flash", 2: "efficient", 0: "math"}
_RANKS = list(_NAMES)
#: Where `sdpa_settings` says whether a kernel is switched on, and whether algorithms must be deterministic.
_SWITCHES = {1: 0, 2: 1, 3: 2}
_DETERMINISTIC = 4


class FusedCall(NamedTuple):
    """What PyTorch's choice depends on.

    Args:
        shapes: of query, key and value.
        whole_rows: whether the elements of their rows lie side by side.
        dtype, device: of all three.
        mask_dtype: of the lowered mask, or ``None`` without one.
        drops: whether there is dropout.
        gradients: whether gradients are recorded.
        causal: whether the causal flag is set.
        folded: whether the heads of a group become rows.
    """

    shapes: tuple[tuple[int, ...], ...]
    whole_rows: tuple[bool, ...]
    dtype: torch.dtype
    device: torch.device
    mask_dtype: torch.dtype | None
    drops: bool
    gradients: bool
    causal: bool
    folded: bool


def is_fused(call: FusedCall) -> bool:
    """Whether PyTorch takes a fused kernel, and does not build all scores."""
    return _choice(call, sdpa_settings()) != 0


def name_of(call: FusedCall) -> str:
    """The name of the kernel that PyTorch takes; ``"cpu"`` on the CPU, where it has one."""
    return "cpu" if call.device.type == "cpu" else _NAMES.get(_choice(call, sdpa_settings()), "of another library")


def fits_a_kernel(dtype: torch.dtype, dim: int, value_dim: int, masked: bool) -> bool:
    """Whether a fused kernel for CUDA takes a dtype and head sizes.

    A graph cannot ask PyTorch, because its sizes may be symbols. These two rules are PyTorch's own.
    """
    if dtype not in (*_HALF, torch.float32):
        return False
    alignment = 4 if dtype == torch.float32 else 8
    if dim % alignment == 0 and value_dim % alignment == 0:
        return True
    return dtype != torch.float32 and not masked and dim == value_dim and dim <= 256  # flash attention pads heads


def backend_of(call: FusedCall) -> Backend:
    """The kernel that PyTorch takes, and what would have to change for a faster one."""
    settings = sdpa_settings()
    chosen = _choice(call, settings)
    faster = _RANKS[: _RANKS.index(chosen)] if chosen in _RANKS else []
    advice = [f"{_NAMES[each]} is switched off" for each in faster if not settings[_SWITCHES[each]]]
    if settings[_DETERMINISTIC] and chosen != 3:
        advice.append("cuDNN is off under torch.use_deterministic_algorithms")
    return Backend(name_of(call), (*advice, *_advice(call, chosen, settings)))


def _advice(call: FusedCall, chosen: int, settings: tuple[object, ...]) -> list[str]:
    """The fewest changes of a call for which PyTorch takes a faster kernel."""
    changes = _changes(call)
    for count in range(1, len(changes) + 1):
        faster: list[str] = []
        for names in combinations(changes, count):
            changed = call
            for name in names:
                changed = _changes(changed).get(name, changed)
            other = _choice(changed, settings)
            if _rank(other) < _rank(chosen):
                faster.append(f"{_NAMES[other]} {' and '.join(names)}")
        if faster:
            return faster
    return []


def _changes(call: FusedCall) -> dict[str, FusedCall]:
    """A call with one thing changed that keeps PyTorch from some kernel, by what is changed."""
    (query, key, value), changes = call.shapes, dict[str, FusedCall]()
    if call.mask_dtype is not None:
        changes["without a mask, or with causal() alone"] = call._replace(mask_dtype=None)
    if call.dtype not in _HALF:
        mask_dtype = None if call.mask_dtype is None else torch.bfloat16
        changes["in bfloat16"] = call._replace(dtype=torch.bfloat16, mask_dtype=mask_dtype)
    if query[3] != value[3] or query[3] % 8 or query[3] > 128:
        shapes = tuple((*shape[:3], _GOOD_HEAD) for shape in call.shapes)
        changes["with D = Dv, a multiple of 8 up to 128"] = call._replace(shapes=shapes)
    if call.drops:
        changes["without dropout"] = call._replace(drops=False)
    if call.causal and query[2] != key[2]:
        shapes = (query, *((*shape[:2], query[2], shape[3]) for shape in (key, value)))
        changes["with as many keys as queries"] = call._replace(shapes=shapes)
    return changes


def _rank(backend: int) -> int:
    return _RANKS.index(backend) if backend in _RANKS else len(_RANKS)


@lru_cache(256)
def _choice(call: FusedCall, settings: tuple[object, ...]) -> int:
    """PyTorch's choice, which depends on the settings too."""
    if fused_sdpa_choice is None:
        return 0

    # PyTorch decides by shapes, strides and dtypes: tensors without memory of their own are enough.
    def like(shape: tuple[int, ...], whole_rows: bool) -> Tensor:
        """A tensor of one row of memory."""
        size = shape[-1] if whole_rows else 1
        return torch.empty(size, dtype=call.dtype, device=call.device, requires_grad=call.gradients).expand(shape)

    query, key, value = map(like, call.shapes, call.whole_rows)
    grouped = query.shape[1] != key.shape[1] and not call.folded
    if call.folded:
        query = fold_group(query, key.shape[1])
    mask = None
    if call.mask_dtype is not None:
        # `_with_whole_rows` gives the lowered mask such rows too.
        keys = key.shape[2]
        mask = torch.empty(keys, dtype=call.mask_dtype, device=call.device).expand((*query.shape[:3], keys))
    return fused_sdpa_choice(query, key, value, mask, 0.5 if call.drops else 0.0, call.causal, enable_gqa=grouped)
