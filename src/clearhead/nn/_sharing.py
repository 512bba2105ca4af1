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

#: Modules that hand the same mask tensors to all their layers.
STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)

_Held = dict[Hashable, tuple[tuple[Tensor | None, ...], "Mask | None"]]


class _Forwards(threading.local):
    running: tuple[_Held, ...] = ()


_forwards = _Forwards()


def share_masks(stack: nn.Module) -> None:
    """Let the attention modules of a stack share what they make of its masks, from now on."""
    if not has_hook(stack, _begin):
        stack.register_forward_pre_hook(_begin)
        stack.register_forward_hook(_end, always_call=True)


def stop_sharing(stack: nn.Module) -> None:
    """Undo `share_masks`."""
    remove_hook(stack, _begin)
    remove_hook(stack, _end)


def shared_in_forward(
    tensors: tuple[Tensor | None, ...], rest: Hashable, translate: Callable[[], Mask | None]
) -> Mask | None:
    """What `translate` makes of mask tensors, shared by the layers of the stack whose forward is running.

    Args:
        tensors: the very tensors that the layers are given; held until the forward ends, so that none takes the place
            of another.
        rest: what else the translation depends on.
        translate: makes the mask.
    """
    # What one graph made is no tensor of another.
    if not _forwards.running or is_tracing():
        return translate()
    held = _forwards.running[-1]
    # By identity: comparing values would cost what sharing saves, and these tensors live until the forward ends.
    key = tuple(map(id, tensors)), rest
    if key not in held:
        held[key] = tensors, shared(translate())
    return held[key][1]


def _begin(module: nn.Module, args: tuple[Any, ...]) -> None:
    if not is_tracing():
        _forwards.running = (*_forwards.running, {})


def _end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not is_tracing():
        _forwards.running = _forwards.running[:-1]
