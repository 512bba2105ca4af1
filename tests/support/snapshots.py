"""What an object holds, as something that can be compared later: for tests that nothing has changed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._environment import forced_kernels, forced_linears, state
from clearhead.caches import Cache
from clearhead.masks import Mask


def snapshot(held: Any, depth: int = 7) -> Any:
    """Equal for objects that hold the same.

    Of a cache what its methods return, not what its memory holds behind that; of a mask the tensors it was given.
    """
    if isinstance(held, Tensor):
        return _of_tensor(held)
    if isinstance(held, Cache):
        return _of_cache(held)
    if isinstance(held, Mask):
        return type(held).__name__, held.describe(), tuple(map(_of_tensor, held.tensors()))
    if depth == 0 or isinstance(held, (type, str, bytes, int, float, bool, type(None))):
        return repr(held)
    if isinstance(held, dict):
        return tuple((repr(key), snapshot(item, depth - 1)) for key, item in held.items())
    if isinstance(held, (list, tuple)):
        return type(held).__name__, tuple(snapshot(item, depth - 1) for item in held)
    if isinstance(held, nn.Module):
        return type(held).__name__, snapshot(vars(held), depth)
    return type(held).__name__


def _of_tensor(tensor: Tensor) -> Any:
    about = (type(tensor).__name__, tensor.dtype, str(tensor.device), tensor.layout, tensor.requires_grad)
    lazy = nn.parameter.is_lazy(tensor)
    if lazy or tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return about
    grad = None if not tensor.is_leaf or tensor.grad is None else _of_tensor(tensor.grad)
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().as_subclass(Tensor).reshape(-1))
    return *about, tuple(tensor.shape), tensor.stride(), flat.view(torch.uint8).numpy().tobytes(), grad


def _of_cache(cache: Cache) -> Any:
    known = cache.length, repr(cache), snapshot(cache.next_positions(2)), snapshot(cache.get())
    key = getattr(cache, "_key", None)
    if not isinstance(key, Tensor) or key.dim() != 4 or cache.get() is not None:
        return known
    # What the next token attends to, and after rows have changed places; of copies, so that this changes nothing.
    other, value = deepcopy(cache), cache._value  # type: ignore[attr-defined]
    new = [torch.ones(*x.shape[:2], 1, x.shape[3], dtype=x.dtype, device=x.device) for x in (key, value)]
    try:
        with torch.no_grad():
            result = other.update(*new)
    except Exception as error:
        return *known, repr(error)
    mask = None if result.mask is None else result.mask.describe()
    held = result.key, result.value
    if result.positions is not None:  # what stands nowhere is hidden, whatever it is
        places = result.positions if result.positions.dim() == 3 else result.positions[:, None]
        held = tuple(x.masked_fill((places < 0)[..., None], 0) for x in held)
    return *known, snapshot((*held, result.positions)), mask


def surroundings() -> Any:
    """What context managers change in this thread."""
    modes = torch.overrides._get_current_function_mode_stack()
    forced = [(each.value, each.outer) for each in (forced_kernels, forced_linears)]
    own = state.observers, state.computing, forced
    switches = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return own, len(modes), switches, torch.get_default_dtype(), torch.get_num_threads()


def observers() -> Any:
    """Recorders and interventions of this thread."""
    return state.observers
