"""Clearhead as an attention implementation of Hugging Face transformers. The import of this module registers it.

    import clearhead.integrations.transformers

    model.set_attn_implementation("clearhead")
    outputs = model(**inputs, output_attentions=True)

Models then compute with `clearhead.attention`, and grouped heads are never copied. ``output_attentions=True`` in the
call returns the exact weights before dropout. Other calls do not compute them. transformers refuses
``config.output_attentions = True`` for all implementations except ``eager``.

A layer computes the result of ``eager``. The mask of a call is complete: transformers has already added the causal,
window and padding patterns. ``None`` masks nothing, for any ``module.is_causal``. `make_mask` therefore always makes
the causal mask, which ``sdpa`` omits. Its values are only computed if the model's own code reads them (`_masks`).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import output_capturing

from .. import masks
from .._call.call import Call
from .._call.naming import add_module
from .._checks import flag, shown, size, strided
from .._environment import read_environment
from .._layer.mixing import MIXED, MIXED_ONCE
from .._layer.plan import attend
from .._layer.positions import positions_of_keys
from .._torch_private import in_backward
from ..errors import ClearheadError, DTypeError, ShapeError, in_words_of, shape_text
from ._cache_for import cache_for
from ._cache_layers import BoundedCacheLayer
from ._class_tables import accept_in_tables
from ._first_call import eager_instead
from ._flash_name import register_flash
from ._keywords import WITHOUT_EFFECT, refuse_unknown, unknown_keyword
from ._masks import carried_by, causal_mask, make_mask, read_mask
from ._packed_row import sequences_of
from ._selected_keys import pools_padding, selected_keys, with_means_of_values

if TYPE_CHECKING:
    from ._trainer import AttentionMonitorCallback

__all__ = ["AttentionMonitorCallback", "attention_forward", "cache_for", "make_mask", "register"]

NAME = "clearhead"
#: The names of transformers for the arguments in errors.
_NAMES = {
    "scale": "scaling",
    "dropout_p": "dropout",
    "sinks": "s_aux",
    "bias": "position_bias",
    "masks.bias": "position_bias",
    "mask bias(...)": "position_bias or attention_mask",
    "cu_seqlens_q": "cu_seq_lens_q",
    "cu_seqlens_k": "cu_seq_lens_k",
    "masks.keep": "attention_mask",
    "mask keep(...)": "attention_mask",
    "mask selected(...)": "indices or block_indices",
}

# Layers of these models do not pass ``output_attentions`` on, and transformers' hooks do not collect from them. Their
# output contains the weights that the attention function returns.
_WEIGHTS_IN_EVERY_CALL = frozenset({"bridgetower_text_model", "pix2struct_vision_model"})
# Of these models one layer does so: the one that reads the image, which has no index because it has no cache.
_WEIGHTS_OF_IMAGE = frozenset({"kosmos_2_text_model", "kosmos_2_5_text_model"})


def __getattr__(name: str) -> object:
    """Import the callback only where it is used, because its import takes a tenth of the time to read a model."""
    if name != "AttentionMonitorCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._trainer import AttentionMonitorCallback

    return AttentionMonitorCallback


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute one attention layer of a transformers model. transformers calls it under the name ``clearhead``.

    Args:
        module: the layer. Dropout applies in training. Its ``is_causal`` has no effect, as for ``eager``.
        query: (B, H, L, D). A batch of 1 is expanded to the batch of the keys.
        key, value: (B, Hkv, S, D) and (B, Hkv, S, Dv), without repeated heads.
        attention_mask: bool (``True`` = may attend) or additive, (B or 1, H or 1, L or 1, S). The lowest number of its
            dtype masks a key, as −inf does. ``None`` masks nothing.
        scaling: factor of q·k. Default 1/√D.
        dropout: probability, applied in training.
        softcap: c of c·tanh(s/c).
        s_aux: (H,) sink logits.
        sinks: (B or 1, H, L, 1) sink logits of each query (Inkling 2).
        sliding_window: in a causal call without a mask, and in packed sequences, keys more than ``sliding_window`` − 1
            positions away are masked. Otherwise it masks nothing, as for ``eager``: the mask has the window.
        is_causal: without a mask, ``True`` makes the call causal, with the last query at the last key.
        position_bias: bias of the scores, (B or 1, H or 1, L or 1, S).
        indices: int (B, L, k), the keys that an indexer selects for each query. Masked keys among them stay masked.
        block_indices: int (B, Hkv, L, k), the blocks of ``module.config.index_block_size`` keys that it selects, −1 for
            none. Without a mask the call is causal.
        cu_seq_lens_q, cu_seq_lens_k: (n + 1,) boundaries of packed sequences. Causal masks and windows then apply
            within each sequence.
        output_attentions: whether to return the weights.

    Returns:
        The output (B, L, H, Dv), and on request the weights (B, H, L, S) in its dtype. Gradients of the output
        pass through them, as for ``eager``.

    Raises:
        ArgumentError: names a keyword that may change the result and is not supported.
        DTypeError, MaskTypeError, ShapeError: for a mask that cannot be read.

    Example:
        >>> import torch
        >>> from clearhead.integrations.transformers import attention_forward
        >>> query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
        >>> output, weights = attention_forward(torch.nn.Module(), query, key, key, None, output_attentions=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 5, 4, 8]), torch.Size([2, 4, 5, 7]))
    """
    unknown = unknown_keyword(others, WITHOUT_EFFECT)
    if unknown is not None:
        eager = eager_instead(module, unknown) or refuse_unknown(others, WITHOUT_EFFECT, NAME, "eager")
        others |= {"softcap": softcap, "s_aux": s_aux, "sliding_window": sliding_window, "is_causal": is_causal}
        others |= {"position_bias": position_bias, "sinks": sinks, "output_attentions": output_attentions}
        others |= {"indices": indices, "block_indices": block_indices}
        given = {name: value for name, value in others.items() if value is not None}
        return eager(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **given)
    try:
        query, key, value = _same_batch(query=query, key=key, value=value)
        if not hasattr(module, "training"):
            raise DTypeError("module", expected="a torch.nn.Module", got=shown(module))
        cache_layer = _carried_layer(module, attention_mask)
        queries_at = keys_at = None
        if cache_layer is not None:
            mask, queries_at = cache_layer.mask, cache_layer.query_positions
            keys_at = positions_of_keys(cache_layer.attended(key), None, query.shape[1])
        elif attention_mask is not None:
            mask = read_mask(attention_mask, query, key)
        else:
            causal = flag("is_causal", is_causal) or block_indices is not None
            window = sliding_window if causal or cu_seq_lens_q is not None else None
            mask, queries_at = _mask_of_call(query, key, window, causal)
        if sinks is not None:
            s_aux = _sinks_of_queries(sinks, query)
        selected = selected_keys(module, indices, block_indices)
        if selected is not None:
            mask = _combined(mask, selected)
        if position_bias is not None:
            mask = _combined(mask, masks.bias(position_bias))
        dropout_p = dropout if module.training else 0.0
        sequences = sequences_of(query, key, cu_seq_lens_q, cu_seq_lens_k)
        weights = _weights_wanted(module, output_attentions)
        pools = pools_padding(module)
        options = mask, scaling, softcap, s_aux, dropout_p, queries_at, keys_at, pools, weights, sequences
        output, lse, weights = attend(Call(query, key, value, *options), read_environment())
        if lse is not None:
            output = with_means_of_values(output, lse, value)
        if cache_layer is not None:
            cache_layer.observe(Call(query, key, value, *options))
        return output.transpose(1, 2).contiguous(), weights  # (B, L, H, Dv)
    except ClearheadError as error:
        renamed = in_words_of(error, _NAMES if sinks is None else {**_NAMES, "sinks": "sinks"})
        if isinstance(module, nn.Module):
            add_module(renamed, module)
        raise renamed from error.__cause__


def _sinks_of_queries(sinks: Tensor, query: Tensor) -> Tensor:
    """Sinks (B or 1, H, L, 1) of a query (B, H, L, D) as (B, H, L)."""
    batch, heads, length = query.shape[:3]
    if strided("sinks", sinks).shape not in ((1, heads, length, 1), (batch, heads, length, 1)):
        expected = f"(B or 1, H, L, 1) with B = {batch}, H = {heads}, L = {length}"
        raise ShapeError("sinks", expected=expected, got=shape_text(sinks.shape))
    return sinks.squeeze(-1).expand(batch, -1, -1)


def register() -> None:
    """Register the name ``clearhead`` for ``model.set_attn_implementation``. The import of this module calls it.

    Example:
        >>> import clearhead.integrations.transformers
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
        >>> model = BertModel(BertConfig(vocab_size=11, **sizes)).eval()
        >>> model.set_attn_implementation("clearhead")
        >>> model(torch.tensor([[1, 2, 3]]), output_attentions=True).attentions[0].shape
        torch.Size([1, 2, 3, 3])
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)
    register_flash()
    accept_in_tables(NAME)


#: The keywords that models may pass.
KEYWORDS = WITHOUT_EFFECT | inspect.signature(attention_forward).parameters.keys()


def _same_batch(**inputs: Tensor) -> list[Tensor]:
    """Expand a batch of 1 (learned queries, shared keys) to the largest batch."""
    for name, tensor in inputs.items():
        if strided(name, tensor).dim() != 4:
            raise ShapeError(name, expected="(B, H, L, D)", got=shape_text(tensor.shape))
    batch = max(tensor.shape[0] for tensor in inputs.values())
    return [t.expand(batch, -1, -1, -1) if t.shape[0] == 1 < batch else t for t in inputs.values()]


def _carried_layer(module: Any, attention_mask: Tensor | None) -> BoundedCacheLayer | None:
    """The layer of the cache that the mask carries, if its heads hold different keys."""
    carried = carried_by(attention_mask)
    return None if carried is None or carried.cache is None else carried.cache.layers[module.layer_idx]


def _mask_of_call(
    query: Tensor, key: Tensor, sliding_window: int | None, is_causal: bool
) -> tuple[masks.Mask | None, int | None]:
    """The mask of a call without `attention_mask`, and the position of its first query."""
    length, keys = query.shape[2], key.shape[2]
    mask = causal_mask(length, keys) if is_causal else None
    if sliding_window is None or size("sliding_window", sliding_window) >= keys:
        return mask, None
    mask = _combined(mask, masks.sliding_window(sliding_window - 1, sliding_window - 1))
    return mask, keys - length if length < keys else None  # the last query is at the last key


def _combined(first: masks.Mask | None, second: masks.Mask) -> masks.Mask:
    return second if first is None else first & second


def _weights_wanted(module: nn.Module, output_attentions: bool | None) -> str | None:
    """The weights that the model's caller requested, as in `Request`.

    Some models pass ``output_attentions`` on. In others, transformers' hooks collect the returned weights, and some of
    these models still pass on a default of ``False``. The collector of the hooks therefore decides as well. It is gone
    when checkpointing computes a layer again, in a backward pass.
    """
    config = getattr(module, "config", None)
    if output_attentions is not None and flag("output_attentions", output_attentions):
        return MIXED
    collected = None if in_backward() else _hooked_outputs()
    if any(name.endswith("attentions") for name in collected or ()):
        return MIXED_ONCE
    model_type = getattr(config, "model_type", None)
    if model_type in _WEIGHTS_OF_IMAGE and getattr(module, "layer_idx", None) is None:
        return MIXED
    if output_attentions is not None or collected is not None:
        return None
    if model_type in _WEIGHTS_IN_EVERY_CALL:
        return MIXED
    return MIXED_ONCE if getattr(config, "output_attentions", False) else None


def _hooked_outputs() -> dict[str, list[Any]] | None:
    # transformers has no public name for it. Without it, models that do not pass `output_attentions` return no weights.
    collector = getattr(output_capturing, "_active_collector", None)
    if collector is None or (torch.compiler.is_compiling() and not collector.compiling):
        return None
    return collector.get()


register()
