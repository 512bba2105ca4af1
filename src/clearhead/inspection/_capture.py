"""Capturing attention that other libraries compute with PyTorch's functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._call.call import AttentionCall, build_call
from .._call.observers import is_computing
from .._call.request import Request
from .._environment import autocast_off, cast_for_autocast
from .._torch_private import graph_break, is_vmapped
from ..masks._base import Mask
from ..masks._grid import Grid
from ..nn._convention import hidden_mask
from ..nn._projection import append_keys, project
from ..nn.functional import translate
from ._grouping import regroup
from ._unseen import SOFTMAX

_SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax}
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
#: Names of others' kernels, such as ``flash_attn._flash_attn_forward`` or ``aten._scaled_dot_product_cudnn_attention``.
_KERNELS = re.compile("attention|attn|flash|fmha")
_MHA = inspect.signature(F.multi_head_attention_forward)


class Sink(Protocol):
    """Where captured calls go."""

    def captured(self, inputs: Iterable[object], read: Callable[[], AttentionCall]) -> None:
        """Record the call that `read` returns, if the running module is recorded and its inputs can be."""
        ...

    @property
    def running_module(self) -> nn.Module:
        """The module that computes the call."""
        ...

    def missed(self, what: str) -> None:
        """Note something that may be attention and cannot be recorded."""
        ...


class CaptureMode(TorchFunctionMode):
    """Hands every attention that goes through PyTorch's functions to a sink; the model's results stay its own.

    `nn.MultiheadAttention` and the Transformer layers leave their inference fast path under any such mode and arrive
    as one call of `F.multi_head_attention_forward`. Inside a handled call the mode is off, so nothing is seen twice.
    """

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_computing():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            read = partial(_read_sdpa, self._sink)
        elif func is F.multi_head_attention_forward:
            read = _read_mha
        else:
            what = _unreadable(func, args, kwargs)
            if what is not None:
                _step_out_of_graph()
                self._sink.missed(what)
            return func(*args, **kwargs)
        _step_out_of_graph()
        self._sink.captured((*args, *kwargs.values()), partial(read, *args, **kwargs))
        return func(*args, **kwargs)


def _step_out_of_graph() -> None:
    """Break the compiler's graph: calls inside one cannot be observed."""
    if torch.compiler.is_dynamo_compiling():
        graph_break()


def obstacle(inputs: Iterable[object]) -> str | None:
    """What attention over such inputs is called, if it cannot be folded into statistics."""
    tensors = [tensor for tensor in inputs if isinstance(tensor, Tensor)]
    if any(tensor.is_nested for tensor in tensors):
        return "attention over nested tensors"
    return "attention under torch.vmap" if any(is_vmapped(tensor) for tensor in tensors) else None


def _unreadable(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What a function computes, if that may be attention in a form that cannot be read."""
    if func in _SOFTMAX:
        scores = args[0] if args else kwargs.get("input")
        return SOFTMAX if isinstance(scores, Tensor) and scores.dim() == 4 else None
    if isinstance(func, _OPERATORS) and _KERNELS.search(str(func)):
        return f"the kernel {func}"
    return None


def _read_sdpa(
    sink: Sink,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    query, key, value = cast_for_autocast(query, key, value)
    query, key, value, attn_mask, grouped = regroup(sink.running_module, query, key, value, attn_mask)
    _, (q, k, v), mask = translate(query, key, value, attn_mask, is_causal, grouped or enable_gqa)
    return _call(q, k, v, mask, scale)


def _read_mha(*args: Any, **kwargs: Any) -> AttentionCall:
    bound = _MHA.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key, value = given["query"], given["key"], given["value"]
    separate = (given["q_proj_weight"], given["k_proj_weight"], given["v_proj_weight"])
    packed = None if given["use_separate_proj_weight"] else given["in_proj_weight"]
    projected = project(query, key, value, packed, given["in_proj_bias"], separate)
    unbatched = query.dim() == 2
    q, k, v = (x.unsqueeze(0) if unbatched else x.transpose(0, 1) for x in projected)  # (N, L or S, E)
    keys = k.shape[1]
    k, v = append_keys(k, v, given["bias_k"], given["bias_v"], given["add_zero_attn"])
    heads = given["num_heads"]
    grid = Grid(q.shape[0], heads, q.shape[1], keys, q.device)
    padding = given["key_padding_mask"]
    if padding is not None and padding.dim() == 1:
        padding = padding.unsqueeze(0)
    attn_mask, causal = given["attn_mask"], False
    if given["is_causal"] and padding is None and not given["need_weights"]:
        attn_mask, causal = None, True  # PyTorch takes the hint and drops the mask here
    mask = hidden_mask(attn_mask, padding, causal, grid, k.shape[1] - keys)
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # (N, H, L or S, D)
    return _call(*cast_for_autocast(q, k, v), mask=mask, scale=None)


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None) -> AttentionCall:
    with autocast_off(q):
        return build_call(q, k, v, Request(mask, scale))
