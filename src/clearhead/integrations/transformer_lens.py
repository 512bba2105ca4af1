"""TransformerLens: a bridge model whose attention patterns are not built unless a hook asks for them.

A bridge of TransformerLens 4 computes softmax(q kᵀ) v by itself, with hooks on the scores and on the pattern between
the products. `fused` replaces the products by `clearhead.attention` where nothing hangs on these hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._attention import attention
from .._checks import module
from ..errors import ArgumentError
from ..masks import causal
from ..masks._base import Mask
from ._masks import read_mask
from .transformers import NAME

__all__ = ["fused"]

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_APPLY_MASK = "_apply_reconstruct_attention_mask"
_HOOKS = ("hook_attn_scores", "hook_pattern")


@contextmanager
def fused(bridge: nn.Module) -> Generator[None]:
    """Let a bridge model compute attention by `clearhead.attention` inside the block.

    Outputs stay the same, and no (B, H, L, S) tensor is built. Inside the block `clearhead.record` and
    `clearhead.census` see every layer. A layer with a hook on its scores or its pattern (``hook_attn_scores``,
    ``hook_pattern``) computes the whole tensor as before, because the hook asks for it: filter such names out of
    ``run_with_cache``. So does one whose formula is not softmax(scale · q kᵀ + mask) v.

    Args:
        bridge: a `TransformerBridge`.

    Raises:
        ArgumentError: for a model without attention components of a bridge.

    Example:
        >>> with fused(bridge), clearhead.record(bridge, keep="queries_keys") as rec:  # doctest: +SKIP
        ...     bridge(tokens)
        >>> rec.weights("blocks.0.attn", head=3, queries=[-1])  # doctest: +SKIP
    """
    module("bridge", bridge)
    parts = [each for each in bridge.modules() if hasattr(each, _APPLY_MASK) and hasattr(each, "hook_pattern")]
    if not parts:
        expected = "a TransformerBridge, with attention components"
        raise ArgumentError("bridge", expected=expected, got=f"a {type(bridge).__name__}")
    with ExitStack() as undo:
        running = _Running()
        for part in parts:
            undo.callback(part.register_forward_pre_hook(running.enter, prepend=True).remove)
            undo.callback(part.register_forward_hook(running.leave, always_call=True).remove)
            for name, replacement in _METHODS.items():
                if hasattr(part, name):
                    object.__setattr__(part, name, partial(replacement, getattr(part, name)))
                    undo.callback(partial(object.__delattr__, part, name))
        for config in {id(c): c for c in (getattr(each, "config", None) for each in bridge.modules()) if c}.values():
            if isinstance(getattr(config, "_attn_implementation", None), str):
                undo.callback(partial(setattr, config, "_attn_implementation", config._attn_implementation))
                config._attn_implementation = NAME  # its masks carry a rule, and their values are not computed
        undo.enter_context(running)
        yield


class _Running(TorchFunctionMode):
    """Finds the product of queries and keys inside a running attention component."""

    def __init__(self) -> None:
        super().__init__()
        self._components: list[nn.Module] = []

    def enter(self, component: nn.Module, _: object) -> None:
        self._components.append(component)

    def leave(self, *_: object) -> None:
        component: Any = self._components.pop()
        if isinstance(getattr(component, "_pattern", None), _Pattern):
            component._pattern = None  # nothing reads it, and it would keep queries and keys of every layer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS and self._components and not kwargs and _is_scores(*args):
            component = self._components[-1]
            if not any(_has_hooks(getattr(component, name, None)) for name in _HOOKS):
                return _Scores(args[0], args[1].transpose(-2, -1), component)
        return func(*args, **(kwargs or {}))


def _has_hooks(point: Any) -> bool:
    """Whether a user's hook hangs on a hook point. A record has hooks of its own on every module."""
    return bool(getattr(point, "fwd_hooks", ()) or getattr(point, "bwd_hooks", ()))


def _is_scores(left: object, right: object) -> bool:
    """Whether it may be (B, H, L, D) times (B, H, D, S), with the keys transposed as a view."""
    if not (isinstance(left, Tensor) and isinstance(right, Tensor) and left.dim() == right.dim() == 4):
        return False
    return left.shape[:2] == right.shape[:2] and right.stride(-2) == 1 and right.stride(-1) != 1


def _with_mask(apply: Callable[..., Any], **arguments: Any) -> Any:
    """The component's own method, or the mask noted at scores that are not computed yet."""
    scores, mask = arguments["attn_scores"], arguments.get("attention_mask")
    if not isinstance(scores, _Scores):
        return apply(**arguments)
    component, causes = scores.component, cast(Any, scores.component)
    is_causal = bool(causes.is_causal) and not getattr(component, "is_cross_attention", False)
    if mask is None:
        return scores.masked(causal("bottom_right") if is_causal else None)
    if mask.dim() >= 4 and mask.shape[-1] == scores.key.shape[2]:
        return scores.masked(read_mask(mask, scores.query, scores.key))
    return apply(**{**arguments, "attn_scores": scores.computed()})


def _softmax(softmax: Callable[..., Any], scores: Any, dtype: torch.dtype | None = None) -> Any:
    """The component's own method, which reads all scores to find fully masked rows. `attention` has zeros there."""
    return _Pattern(scores) if isinstance(scores, _Scores) else softmax(scores, dtype=dtype)


def _without_nan(scrub: Callable[..., Any], pattern: Any) -> Any:
    return pattern if isinstance(pattern, _Pattern) else scrub(pattern)


#: Methods of a component that would build (B, H, L, S) tensors, by name.
_METHODS = {_APPLY_MASK: _with_mask, "_masked_softmax": _softmax, "_scrub_compatibility_pattern_nans": _without_nan}


class _Lazy:
    """A (B, H, L, S) tensor that is computed when anything but attention reads it."""

    def computed(self) -> Tensor:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.computed(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = [each.computed() if isinstance(each, _Lazy) else each for each in args]
        named = {name: x.computed() if isinstance(x, _Lazy) else x for name, x in (kwargs or {}).items()}
        return func(*read, **named)


class _Scores(_Lazy):
    """scale · q kᵀ, with a mask."""

    def __init__(self, query: Tensor, key: Tensor, component: nn.Module, scale: float = 1.0) -> None:
        self.query, self.key, self.component, self.scale = query, key, component, scale
        self.mask: Mask | None = None

    def __mul__(self, factor: Any) -> Any:
        if self.mask is None and (isinstance(factor, (int, float)) or getattr(factor, "numel", lambda: 0)() == 1):
            return _Scores(self.query, self.key, self.component, self.scale * float(factor))
        return self.computed() * factor

    def masked(self, mask: Mask | None) -> _Scores:
        """The same with a mask."""
        self.mask = mask
        return self

    def computed(self) -> Tensor:
        scores = self.query @ self.key.transpose(-2, -1) * self.scale
        if self.mask is None:
            return scores
        shape = scores.shape
        visible = self.mask.dense(shape[2], shape[3], batch_size=shape[0]).to(scores.device)
        in_compatibility = getattr(self.component, "compatibility_mode", False)
        return scores.masked_fill(~visible, float("-inf") if in_compatibility else torch.finfo(scores.dtype).min)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (F.softmax, torch.softmax) and args and isinstance(args[0], _Scores):
            return _Pattern(args[0])
        return super().__torch_function__(func, types, args, kwargs)


class _Pattern(_Lazy):
    """softmax(scores)."""

    def __init__(self, scores: _Scores) -> None:
        self.scores = scores

    def to(self, *_: object, **__: object) -> _Pattern:
        """The same: weights have the dtype of the queries."""
        return self

    def computed(self) -> Tensor:
        scores = self.scores.computed()
        softmax = getattr(type(self.scores.component), "_masked_softmax", None)
        if softmax is not None:
            return softmax(self.scores.component, scores, dtype=torch.float32).to(scores.dtype)
        return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        pattern = args[0] if args else None
        if func in _PRODUCTS and isinstance(pattern, _Pattern):
            scores = pattern.scores
            return attention(scores.query, scores.key, args[1], scores.mask, scale=scores.scale)
        if func is F.dropout and isinstance(pattern, _Pattern) and not _drops(*args[1:], **(kwargs or {})):
            return pattern
        return super().__torch_function__(func, types, args, kwargs)


def _drops(p: float = 0.5, training: bool = True, **_: object) -> bool:
    """Whether `F.dropout` with these arguments changes anything."""
    return training and p > 0
