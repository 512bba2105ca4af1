"""Clearhead as an attention implementation of Hugging Face transformers; importing this module registers it.

    import clearhead.integrations.transformers

    model.set_attn_implementation("clearhead")
    outputs = model(**inputs, output_attentions=True)

Models then compute with `clearhead.attention`, grouped heads are never copied out, and ``output_attentions=True``
in the call returns the exact weights (before dropout), which are built only when they are asked for.
(``config.output_attentions = True`` is refused by transformers for everything but ``eager``.)

What a layer computes is what ``eager`` computes. A mask that arrives is the whole truth: transformers has already put
the causal, window and padding patterns in. ``None`` hides nothing, whatever ``module.is_causal`` says. `make_mask`
therefore never leaves a causal mask out, as ``sdpa`` does; it hands over a mask whose values are not computed unless
the model's own code reads them (`lazy_mask`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils import output_capturing

from .. import masks
from .._call.naming import add_module
from .._call.request import Request
from .._call.rows import Rows, within_rows
from .._checks import FLOATS, INTEGERS, flag, integer, require_factory, shown, size, strided
from .._environment import read_environment
from .._layer.plan import attend
from .._weights import attention_weights
from ..errors import (
    ArgumentError,
    ClearheadError,
    DTypeError,
    MaskTypeError,
    ShapeError,
    in_words_of,
    shape_text,
)
from ..masks._prepared import shared
from ._cache_for import cache_for
from ._cache_layers import BoundedLayer
from ._lazy_mask import Carried, additive_mask, carried_by, carrying, values_of
from ._packed_row import rows_of

if TYPE_CHECKING:
    from ._trainer import AttentionMonitorCallback

__all__ = ["AttentionMonitorCallback", "attention_forward", "cache_for", "make_mask", "register"]

NAME = "clearhead"
#: What errors call the arguments, to what transformers calls them.
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
}

# Models pass these to every attention function. They steer caches, outputs, losses or other kernels' settings, and
# transformers' own eager attention ignores each of them as well.
WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "decoder_attention_mask",
        "deterministic",
        "encoder_hidden_states",
        "grid_thw",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    }
)

# Models with layers that neither hand ``output_attentions`` down nor are collected from: the model puts whatever the
# attention function returns into its output.
_WEIGHTS_IN_EVERY_CALL = frozenset({"bridgetower_text_model"})


def __getattr__(name: str) -> object:
    """Import what trains only where it is used: it takes a tenth of the time to read a model."""
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
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute one attention layer of a transformers model; transformers calls it, under the name ``clearhead``.

    Args:
        module: the layer; dropout applies while it trains. Its ``is_causal`` has no effect, as for ``eager``.
        query: (B, H, L, D); a batch of 1 is expanded to the keys' batch.
        key, value: (B, Hkv, S, D) and (B, Hkv, S, Dv), grouped heads not repeated.
        attention_mask: bool (``True`` = may attend) or additive, (B or 1, H or 1, L or 1, S). Its dtype's lowest
            number hides, as −inf does. ``None`` hides nothing.
        scaling: factor of q·k, 1/√D by default.
        dropout: probability, used while the module trains.
        softcap: c of c·tanh(s/c).
        s_aux: (H,) sink logits.
        sliding_window: without a mask, keys further than ``sliding_window`` − 1 positions away are hidden.
        is_causal: without a mask, ``True`` in the call itself hides the future, the last query at the last key.
        position_bias: added to the scores, (B or 1, H or 1, L or 1, S).
        cu_seq_lens_q, cu_seq_lens_k: (n + 1,) boundaries of sequences packed into one row; causal masks and windows
            then count within each.
        output_attentions: return the weights too.

    Returns:
        The output (B, L, H, Dv), and the weights (B, H, L, S) in the query's dtype where they are asked for.

    Raises:
        ArgumentError: for a keyword that would change the result and is not supported, by name.
        DTypeError, MaskTypeError, ShapeError: for a mask that cannot be read.

    Example:
        >>> import torch
        >>> from clearhead.integrations.transformers import attention_forward
        >>> query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
        >>> output, weights = attention_forward(torch.nn.Module(), query, key, key, None, output_attentions=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 5, 4, 8]), torch.Size([2, 4, 5, 7]))
    """
    _refuse_unknown(others)
    try:
        query, key, value = _same_batch(query=query, key=key, value=value)
        options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
        if not hasattr(module, "training"):
            raise DTypeError("module", expected="a torch.nn.Module", got=shown(module))
        held = _held_layer(module, attention_mask)
        if held is not None:
            pattern, places = _seen_of_held(held, query.shape[1])
            options |= places
        elif attention_mask is not None:
            pattern = _given_mask(attention_mask, query, key)
        else:
            pattern = _causal(query, key) if is_causal is not None and flag("is_causal", is_causal) else None
            if sliding_window is not None and size("sliding_window", sliding_window) < key.shape[2]:
                pattern = _both(pattern, masks.sliding_window(sliding_window - 1, sliding_window - 1))
                if query.shape[2] < key.shape[2]:  # the last query stands at the last key
                    options["query_positions"] = key.shape[2] - query.shape[2]
        if position_bias is not None:
            pattern = _both(pattern, masks.bias(position_bias))
        rows = rows_of(query, key, cu_seq_lens_q, cu_seq_lens_k)
        request = Request(pattern, dropout_p=dropout if module.training else 0.0, rows=rows, **options)
        output = attend(query, key, value, request, read_environment()).output
        output = output.transpose(1, 2).contiguous()  # (B, L, H, Dv)
        weights = None
        if _weights_wanted(module, output_attentions):
            weights = attention_weights(query, key, _within(rows, pattern, options), **options).to(query.dtype)
        if held is not None:
            held.observe(query, key, **{name: options[name] for name in ("scale", "softcap", "sinks")})
        return output, weights
    except ClearheadError as error:
        theirs = in_words_of(error, _NAMES)
        if isinstance(module, nn.Module):
            add_module(theirs, module)
        raise theirs from error.__cause__


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
    **rest: Any,
) -> Tensor | None:
    """Build the mask of a transformers model; transformers calls it.

    Args:
        batch_size, q_length, kv_length: B, L and S.
        q_offset, kv_offset: absolute position of the first query and of the first key.
        allow_is_causal_skip: the mask is causal but for windows and padding, so it need not be written out where
            these hide nothing.
        allow_is_bidirectional_skip: whether the model takes ``None`` for a mask that hides nothing.
        dtype: of the additive mask.
        device: where the mask is made.
        rest: what else describes the mask, as for transformers' own ``eager_mask``.

    Returns:
        What transformers' ``eager_mask`` returns: an additive mask (B, 1, L, S), or ``None`` where nothing is hidden
        and the model takes that. Its values are computed when they are first read; `attention_forward` reads the bool
        mask that it carries, or that it is causal.

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
    described: dict[str, Any] = rest | {
        **sizes,
        "q_offset": q_offset,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        "device": device,
    }
    # With a static cache the keys reach further than the last query, so "causal" alone would not say where it stands.
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    may_be_causal = allow_is_causal_skip and aligned and not allow_is_bidirectional_skip
    visible = sdpa_mask(**described, allow_is_causal_skip=may_be_causal)
    if visible is not None:
        build = partial(additive_mask, visible, dtype)
    elif may_be_causal:
        build = partial(eager_mask, **described, dtype=dtype)
    else:
        return None
    mask = None if visible is None else shared(masks.keep(visible))
    return carrying(Carried(mask), build, (batch_size, 1, q_length, kv_length), dtype, device)


def _require_offset(q_offset: object) -> None:
    """An int, or from static caches a tensor of one."""
    if not isinstance(q_offset, Tensor):
        integer("q_offset", q_offset, least=0)
    elif strided("q_offset", q_offset).numel() != 1 or q_offset.dtype not in INTEGERS:
        raise DTypeError("q_offset", expected="an int, or a tensor of one", got=shown(q_offset))


def register() -> None:
    """Make ``clearhead`` a name that ``model.set_attn_implementation`` takes; importing this module does it.

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


def _refuse_unknown(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        raise ArgumentError(
            name,
            expected="no keyword that Clearhead's attention for transformers does not know",
            got=f"a {type(value).__name__} from the model",
            fix='It may change the result, so it is not ignored. Use model.set_attn_implementation("eager").',
        )


def _same_batch(**given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Expand a batch of 1 (learned queries, shared keys) to the others' size."""
    for name, tensor in given.items():
        if strided(name, tensor).dim() != 4:
            raise ShapeError(name, expected="(B, H, L, D)", got=shape_text(tensor.shape))
    tensors = given.values()
    batch = max(tensor.shape[0] for tensor in tensors)
    query, key, value = (t.expand(batch, -1, -1, -1) if t.shape[0] == 1 < batch else t for t in tensors)
    return query, key, value


def _causal(query: Tensor, key: Tensor) -> masks.Mask | None:
    length, keys = query.shape[2], key.shape[2]
    if length == 1:
        return None
    return masks.causal("bottom_right" if length < keys else "top_left")


def _given_mask(given: Tensor, query: Tensor, key: Tensor) -> masks.Mask | None:
    if not isinstance(given, Tensor):
        raise MaskTypeError("attention_mask", expected="a tensor or None", got=type(given).__name__)
    carried = carried_by(given)
    if carried is not None:
        return _causal(query, key) if carried.mask is None else carried.mask
    given = strided("attention_mask", values_of(given))
    if given.dtype == torch.bool:
        return masks.keep(given)
    if given.dtype in FLOATS:
        # transformers writes "hidden" as the lowest number of the dtype.
        lowest = torch.finfo(given.dtype).min
        return masks.bias(given.masked_fill(given <= lowest, float("-inf")))
    raise DTypeError(
        "attention_mask",
        expected="a bool mask (True = may attend) or an additive float mask",
        got=f"{given.dtype} of shape {shape_text(given.shape)}",
        fix="Give 4-D masks as bool.",
    )


def _held_layer(module: Any, given: Tensor | None) -> BoundedLayer | None:
    """The layer of a cache whose heads hold keys of their own, which the mask brings."""
    carried = carried_by(given) if isinstance(given, Tensor) else None
    return None if carried is None or carried.cache is None else carried.cache.layers[module.layer_idx]


def _seen_of_held(held: BoundedLayer, num_heads: int) -> tuple[masks.Mask, dict[str, Any]]:
    """What its queries see of its keys, and the positions of both."""
    mask, positions, keys = held.seen
    if keys is not None and keys.dim() == 3:
        keys = keys.repeat_interleave(num_heads // keys.shape[1], 1)  # (B, H, S)
    return mask, {"query_positions": positions, "key_positions": keys}


def _within(rows: Rows | None, pattern: masks.Mask | None, options: dict[str, Any]) -> masks.Mask | None:
    """The pattern as a mask of all T × Tk weights, which counts in positions within the sequences of a packed row."""
    if rows is None:
        return pattern
    options |= {"query_positions": rows.query_positions[None], "key_positions": rows.key_positions[None]}
    return within_rows(rows, pattern)


def _both(first: masks.Mask | None, second: masks.Mask) -> masks.Mask:
    return second if first is None else first & second


def _weights_wanted(module: nn.Module, output_attentions: bool | None) -> bool:
    """Whether the caller of the model asked for weights.

    Some models hand ``output_attentions`` down; others only let transformers' hooks collect what the attention function
    returns, and some of these hand down a default of ``False`` all the same. So the hooks' collector counts as well.
    """
    if output_attentions is not None:
        output_attentions = flag("output_attentions", output_attentions)
    collected = _hooked_outputs()
    if output_attentions or any(name.endswith("attentions") for name in collected or ()):
        return True
    if output_attentions is not None or collected is not None:
        return False
    config = getattr(module, "config", None)
    return getattr(config, "model_type", None) in _WEIGHTS_IN_EVERY_CALL or bool(
        getattr(config, "output_attentions", False)
    )


def _hooked_outputs() -> dict[str, list[Any]] | None:
    # transformers has no public name for it; without it, the models that hand nothing down return no weights.
    collector = getattr(output_capturing, "_active_collector", None)
    if collector is None or (torch.compiler.is_compiling() and not collector.compiling):
        return None
    return collector.get()


register()
