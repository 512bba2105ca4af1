"""``attn_implementation="clearhead_flash"``: the route that transformers has for flash attention, on Clearhead.

Where the name of an implementation contains "flash", transformers and sentence-transformers leave padding out: masks
stay (B, S), texts are concatenated, `cu_seq_lens_q` and positions that restart separate packed sequences. The functions
of that route are found by a private function of transformers, `_lazy_imports`. This is the only file that knows it and
the function that calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.masking_utils import flash_attention_mask

from .. import masks
from .._attention import attention
from ..backend import flash_attn_func, flash_attn_varlen_func
from ..errors import ArgumentError, ShapeError, shape_text
from ._class_tables import class_tables
from ._keywords import WITHOUT_EFFECT, refuse_unknown

NAME = "clearhead_flash"
_route: Any = modeling_flash_attention_utils
#: The arguments of transformers' function on this route, and what changes nothing.
_KNOWN = (
    WITHOUT_EFFECT - {"cache"} | signature(_route._flash_attention_forward).parameters.keys() | {"output_attentions"}
)


def flash_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute one attention layer by transformers' route for flash attention. transformers calls it.

    Args:
        module: the layer.
        query: (B, H, L, D).
        key, value: (B, Hkv, S, D) and (B, Hkv, S, Dv).
        attention_mask: (B, S), 1 at real tokens, or ``None``.
        dropout, scaling, sliding_window, softcap, s_aux: as for `attention_forward`.
        is_causal: default ``module.is_causal``.
        options: the others of transformers' flash attention.

    Returns:
        The output (B, L, H, Dv), and ``None``.

    Raises:
        ArgumentError: for a keyword that may change the result and that flash attention does not have, such as the
            `position_bias` of T5.
        ShapeError: for a mask of another shape.
    """
    refuse_unknown(options, _KNOWN, NAME, "clearhead")
    _require_separate_texts(module, options)
    fix = f'Use model.set_attn_implementation("clearhead") instead of "{NAME}".'
    if options.get("output_attentions"):
        raise ArgumentError("output_attentions", expected="False with flash attention", got="True", fix=fix)
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ShapeError("attention_mask", expected="(B, S)", got=shape_text(attention_mask.shape), fix=fix)
    causal = module.is_causal if is_causal is None else is_causal
    numbers: dict[str, Any] = {"dropout": dropout, "softmax_scale": scaling, "softcap": softcap, "s_aux": s_aux}
    if attention_mask is not None and not causal:
        # transformers would take the mask for that of the queries too, which are other tokens in cross-attention.
        mask = masks.keep(keys=attention_mask)
        if sliding_window is not None and sliding_window < key.shape[2]:
            mask = mask & masks.sliding_window(sliding_window - 1, sliding_window - 1)
        scores: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
        return attention(query, key, value, mask, dropout_p=dropout, **scores).transpose(1, 2), None
    output = _route._flash_attention_forward(
        query.transpose(1, 2),  # (B, L, H, D), and keys and values likewise
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        query_length=query.shape[2],
        is_causal=causal,
        sliding_window=sliding_window,
        attn_implementation=NAME,
        **numbers,
        **options,
    )
    return output, None


def _require_separate_texts(module: Any, options: dict[str, Any]) -> None:
    """Raise for concatenated texts in a model whose embedding mixes neighbouring tokens, and so neighbouring texts."""
    config = getattr(module, "config", None)
    if options.get("cu_seq_lens_q") is not None and getattr(config, "trigram_input", False):
        fix = f'Use model.set_attn_implementation("clearhead") instead of "{NAME}".'
        expected = "a padded batch, because the embedding of mobilebert mixes neighbouring tokens"
        raise ArgumentError("attn_implementation", expected=expected, got="concatenated texts", fix=fix)


def flash_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **options: Any
) -> Tensor | None:
    """The mask (B, S) of a call, or ``None`` if all keys are real. transformers calls it.

    Raises:
        ArgumentError: for a type of model that has no route for flash attention. Its own code would read such a mask
            as one of another shape.
    """
    config: Any = options.get("config")
    if config is not None and not _has_flash_route(type(config)):
        fix = 'Use "clearhead", or clearhead.upgrade(model).'
        expected = f"a type of model with a route for flash attention, for {NAME!r}"
        raise ArgumentError("attn_implementation", expected=expected, got=config.model_type, fix=fix)
    sizes: dict[str, Any] = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    mask = flash_attention_mask(batch_size, **sizes, **options)
    if options.get("attention_mask") is not None or "allow_is_causal_skip" not in options:
        return mask
    # transformers aligns the last query with the last key, and a static cache has free places after the last token. It
    # cuts keys and values to the length of a mask.
    filled = q_offset + q_length - kv_offset
    if isinstance(filled, int) and filled >= kv_length:
        return mask
    return torch.ones(batch_size, min(int(filled), kv_length), dtype=torch.bool, device=options.get("device"))


@cache
def _has_flash_route(kind: type) -> bool:
    """Whether the code of a type of model calls the attention function of its configuration with a (B, S) mask."""
    found: Any = MODEL_MAPPING.get(kind, None)  # pyright: ignore[reportArgumentType]
    models = found if isinstance(found, tuple) else () if found is None else (found,)
    # Where classes are looked up in a table, that for flash attention calls flash-attn itself.
    tables = any(class_tables(model.__module__) for model in models)
    return not tables and all(getattr(model, "_supports_flash_attn", True) for model in models)


def register_flash() -> None:
    """Register the name for transformers. The import of `clearhead.integrations.transformers` calls it."""
    AttentionInterface.register(NAME, flash_forward)
    AttentionMaskInterface.register(NAME, flash_mask)
    if not getattr(_route._lazy_imports, "finds_clearhead", False):
        _route._lazy_imports = _with_ours(_route._lazy_imports)


def _with_ours(imports: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(imports)
    def functions(implementation: str | None, *others: Any, **options: Any) -> Any:
        if implementation != NAME:
            return imports(implementation, *others, **options)
        return flash_attn_func, flash_attn_varlen_func, None, _route._pad_input, _route._unpad_input

    setattr(functions, "finds_clearhead", True)  # noqa: B010
    return functions
