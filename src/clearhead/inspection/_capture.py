"""Captures attention that other libraries compute with PyTorch's functions, and lists what could not be captured."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._call.call import Call, build_call
from .._call.observers import is_computing
from .._environment import autocast_off, cast_for_autocast
from .._torch_private import graph_break, is_vmapped
from ..errors import RecordError, UnseenAttentionWarning
from ..nn._convention import hidden_mask
from ..nn._inputs import append_keys, linear_of_any_bias, project
from ..nn.functional import translate
from ._advice import advice_for
from ._flow import Flow
from ._naming import ModuleNames

_SOFTMAXES = {torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax}
_SOFTMAX = "a softmax over four dimensions"  # in a warning
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
#: Names of other kernels, such as ``flash_attn._flash_attn_forward`` or ``aten._scaled_dot_product_cudnn_attention``.
_KERNELS = re.compile("attention|attn|flash|fmha")
_MHA = inspect.signature(F.multi_head_attention_forward)


class CaptureMode(TorchFunctionMode):
    """Reports every attention call that goes through PyTorch's functions. The model's results do not change.

    `nn.MultiheadAttention` and the Transformer layers leave their inference fast path under any such mode, and become
    one call of `F.multi_head_attention_forward`. The mode is off inside a reported call, so nothing is reported twice.

    Args:
        captured: receives the inputs of a call, query and key first, and a function that reads the `Call` of
            the running module. It returns the origins of the call's output.
        missed: receives the description of a computation that may be attention and that cannot be read.
        flow: follows what tensors are computed from.
    """

    def __init__(
        self,
        captured: Callable[[Sequence[Any], Callable[[nn.Module], Call]], int],
        missed: Callable[[str], None],
        flow: Flow,
    ) -> None:
        super().__init__()
        self._captured, self._missed, self._flow = captured, missed, flow

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_computing():
            result = func(*args, **kwargs)
            self._flow.follow(args, kwargs, result)
            return result
        read = _READERS.get(func)
        what = _unreadable(func, args, kwargs) if read is None else None
        # Calls inside a compiled graph cannot be observed.
        if torch.compiler.is_dynamo_compiling():
            if read is None and what is None:
                return func(*args, **kwargs)
            graph_break()
        if read is None:
            if what is not None:
                self._missed(what)
            result = func(*args, **kwargs)
            self._flow.follow(args, kwargs, result)
            return result
        named = dict(zip(("query", "key"), args, strict=False)) | kwargs
        inputs = (named.get("query"), named.get("key"), *args[2:], *kwargs.values())
        origins = self._captured(inputs, lambda module: read(module, *args, **kwargs))
        result = func(*args, **kwargs)
        self._flow.mark(result, origins)
        return result


def obstacle(inputs: Iterable[object]) -> str | None:
    """A description of attention over such inputs, if it has no statistics."""
    tensors = [tensor for tensor in inputs if isinstance(tensor, Tensor)]
    if any(tensor.is_nested for tensor in tensors):
        return "attention over nested tensors"
    return "attention under torch.vmap" if any(is_vmapped(tensor) for tensor in tensors) else None


def _unreadable(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """A description of the function, if it may be attention whose operands are unknown."""
    if func in _SOFTMAXES:
        scores = args[0] if args else kwargs.get("input")
        return _SOFTMAX if isinstance(scores, Tensor) and scores.dim() == 4 else None
    if isinstance(func, _OPERATORS) and _KERNELS.search(str(func)):
        return f"the kernel {func}"
    return None


def _read_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    query, key, value = cast_for_autocast(query, key, value)
    query, key, value, attn_mask, grouped = _regroup(module, query, key, value, attn_mask)
    _, (q, k, v), mask = translate(query, key, value, attn_mask, is_causal, grouped or enable_gqa)
    with autocast_off(q):
        return build_call(Call(q, k, v, mask, scale))


def _regroup(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    """Restore H query heads and Hkv key/value heads in a call of a transformers attention module.

    With grouped heads, transformers usually repeats keys and values for every query head. For a single query it moves
    the heads of a group into the query axis: (B, H, 1, D) → (B, Hkv, G, D).

    Args:
        module: the calling module. Modules of transformers have ``num_key_value_groups`` and a config.
        query, key, value, attn_mask: the arguments of PyTorch's attention.

    Returns:
        Query (B, H, L, D), key and value (B, Hkv, S, D), mask, and whether heads are grouped.
    """
    group = getattr(module, "num_key_value_groups", 1)
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if not isinstance(group, int) or group < 2 or heads is None or query.dim() != 4:
        return query, key, value, attn_mask, False
    batch, query_heads, rows, dim = query.shape
    if query_heads * group == heads and rows == group and key.shape[1] == query_heads:
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[2] == group:
            kv_heads = attn_mask.shape[1]
            attn_mask = attn_mask.reshape(attn_mask.shape[0], kv_heads * group, 1, -1)
            attn_mask = attn_mask[:, :1] if kv_heads == 1 else attn_mask
        return query.reshape(batch, heads, 1, dim), key, value, attn_mask, True
    if query_heads == heads and key.shape[1] == heads:
        return query, key[:, ::group], value[:, ::group], attn_mask, True
    return query, key, value, attn_mask, False


def _read_mha(_: nn.Module, *args: Any, **kwargs: Any) -> Call:
    bound = _MHA.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    separate = (arguments["q_proj_weight"], arguments["k_proj_weight"], arguments["v_proj_weight"])
    packed = None if arguments["use_separate_proj_weight"] else arguments["in_proj_weight"]
    projected = project(query, key, value, packed, arguments["in_proj_bias"], separate, linear_of_any_bias)
    unbatched = query.dim() == 2
    q, k, v = (x.unsqueeze(0) if unbatched else x.transpose(0, 1) for x in projected)  # (N, L or S, E)
    key_length = k.shape[1]
    k, v = append_keys(k, v, arguments["bias_k"], arguments["bias_v"], arguments["add_zero_attn"])
    heads = arguments["num_heads"]
    sizes = q.shape[0], heads, q.shape[1], key_length
    padding = arguments["key_padding_mask"]
    if padding is not None and padding.dim() == 1:
        padding = padding.unsqueeze(0)
    attn_mask, causal = arguments["attn_mask"], False
    if arguments["is_causal"] and padding is None and not arguments["need_weights"]:
        attn_mask, causal = None, True  # PyTorch also ignores the mask in this case
    mask = hidden_mask(attn_mask, padding, causal, sizes, k.shape[1] - key_length)
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # (N, H, L or S, D)
    q, k, v = cast_for_autocast(q, k, v)
    with autocast_off(q):
        return build_call(Call(q, k, v, mask))


_READERS: dict[Callable[..., Any], Callable[..., Call]] = {
    F.scaled_dot_product_attention: _read_sdpa,
    F.multi_head_attention_forward: _read_mha,
}


class Unseen:
    """Collects computations that could not be recorded.

    Args:
        running: follows the recorded model.
    """

    def __init__(self, running: ModuleNames) -> None:
        self._running = running
        self._modules: dict[str, list[str]] = {}  # from a description of the computation to names of modules

    def note(self, what: str) -> None:
        """Note that the running module computed something that may be attention, such as ``"a softmax …"``."""
        name, names = self._running.current, self._modules.setdefault(what, [])
        if name is not None and name not in names:
            names.append(name)

    def report(self, recorded: Collection[str]) -> None:
        """Warn of the noted computations.

        Args:
            recorded: names of the modules in the record. A softmax in one of them most likely computes weights.

        Raises:
            RecordError: if nothing was recorded.
        """
        names = {
            what: [name for name in names if what != _SOFTMAX or name not in recorded]
            for what, names in self._modules.items()
        }
        names = {what: of_what for what, of_what in names.items() if of_what}
        if not recorded:
            sentences = [f"{what} was computed by {self._described(of_what)}. " for what, of_what in names.items()]
            noted = "".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
            advice = advice_for(self._running.model, [name for of_what in names.values() for name in of_what])
            raise RecordError(
                f"record: no attention was seen. {noted}Attention is seen in Clearhead's modules, "
                "torch.nn.MultiheadAttention and wherever F.scaled_dot_product_attention is called, uncompiled. "
                + (advice or "Of a compiled model record model._orig_mod.")
            )
        for what, of_what in names.items():
            warnings.warn(
                f"record: {what} that is not in the record was computed by {self._described(of_what)}. "
                f"If that is attention: {advice_for(self._running.model, of_what)}",
                UnseenAttentionWarning,
                stacklevel=4,
            )

    def _described(self, names: Iterable[str]) -> str:
        kinds = {name: type(self._running.model.get_submodule(name)).__name__ for name in names}
        return ", ".join(f"{name or 'the model itself'} ({kind})" for name, kind in kinds.items())
