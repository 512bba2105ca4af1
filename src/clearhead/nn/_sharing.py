"""Masks of PyTorch's stacks of layers: translated and lowered once per forward, and dropped at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, nn

from .._environment import is_tracing
from .._torch_private import has_hook, remove_hook
from ..masks._base import Mask
from ..masks._prepared import shared

#: Modules that pass the same mask tensors to all their layers.
STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)


class _Forwards(threading.local):
    #: For each running forward, mask tensors and their translation.
    running: tuple[dict[Hashable, tuple[object, Mask | None]], ...] = ()


_forwards = _Forwards()


def share_masks(stack: nn.Module) -> None:
    """Let the attention modules of a stack share their translated masks, from now on."""
    if not has_hook(stack, _begin):
        stack.register_forward_pre_hook(_begin)
        stack.register_forward_hook(_end, always_call=True)


def stop_sharing(stack: nn.Module) -> None:
    """Undo `share_masks`."""
    remove_hook(stack, _begin)
    remove_hook(stack, _end)


def shared_in_forward(
    tensors: tuple[Tensor | None, ...], settings: Hashable, translate: Callable[[], Mask | None]
) -> Mask | None:
    """The mask that `translate` returns, shared by the layers of the stack whose forward runs.

    The translation depends on the mask tensors of the call and on `settings`. The tensors are kept until the forward
    ends, so that no id is used twice.
    """
    # Tensors of a graph do not exist outside it.
    if not _forwards.running or is_tracing():
        return translate()
    masks = _forwards.running[-1]
    # By identity, because comparing values would cost what sharing saves.
    key = tuple(map(id, tensors)), settings
    if key not in masks:
        masks[key] = tensors, shared(translate())
    return masks[key][1]


def _begin(module: nn.Module, args: tuple[Any, ...]) -> None:
    if not is_tracing():
        _forwards.running = (*_forwards.running, {})


def _end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not is_tracing():
        _forwards.running = _forwards.running[:-1]
