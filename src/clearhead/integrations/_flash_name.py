"""``attn_implementation="clearhead_flash"``: the route that transformers has for flash attention, on Clearhead.

Where the name of an implementation contains "flash", transformers and sentence-transformers leave padding out: masks
stay (B, S), texts are concatenated, `cu_seq_lens_q` and positions that restart separate packed sequences. The functions
of that route are found by a private function of transformers, `_lazy_imports`. This is the only file that knows it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from ..backend import flash_attn_func, flash_attn_varlen_func
from ..errors import ArgumentError, ShapeError, shape_text
from ._keywords import WITHOUT_EFFECT, refuse_unknown

NAME = "clearhead_flash"
#: The arguments of transformers' functions on this route, and what changes nothing.
_KNOWN = WITHOUT_EFFECT.union(
    *(
        signature(function).parameters
        for function in (
            flash_attention_forward,
            modeling_flash_attention_utils._flash_attention_forward,  # pyright: ignore[reportPrivateUsage]
        )
    ),
    {"output_attentions"},
)


def flash_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute one attention layer by transformers' route for flash attention. transformers calls it.

    Args:
        module: the layer.
        query: (B, H, L, D).
        key, value: (B, Hkv, S, D) and (B, Hkv, S, Dv).
        attention_mask: (B, S), 1 at real tokens, or ``None``.
        options: those of transformers' flash attention.

    Returns:
        The output (B, L, H, Dv), and ``None``.

    Raises:
        ArgumentError: for a keyword that may change the result and that flash attention does not have, such as the
            `position_bias` of T5.
        ShapeError: for a mask of another shape.
    """
    refuse_unknown(options, _KNOWN, NAME, "clearhead")
    if options.get("output_attentions"):
        fix = f'Use model.set_attn_implementation("clearhead") instead of "{NAME}".'
        raise ArgumentError("output_attentions", expected="False with flash attention", got="True", fix=fix)
    if attention_mask is not None and attention_mask.dim() != 2:
        fix = f'Use model.set_attn_implementation("clearhead") instead of "{NAME}".'
        raise ShapeError("attention_mask", expected="(B, S)", got=shape_text(attention_mask.shape), fix=fix)
    return flash_attention_forward(module, query, key, value, attention_mask, **options)


def register_flash() -> None:
    """Register the name for transformers. The import of `clearhead.integrations.transformers` calls it."""
    AttentionInterface.register(NAME, flash_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    private: Any = modeling_flash_attention_utils
    if not hasattr(private._lazy_imports, "__wrapped__"):
        private._lazy_imports = _with_ours(private._lazy_imports)


def _with_ours(imports: Callable[..., Any]) -> Callable[..., Any]:
    private: Any = modeling_flash_attention_utils

    @wraps(imports)
    def functions(implementation: str | None, *others: Any, **options: Any) -> Any:
        if implementation != NAME:
            return imports(implementation, *others, **options)
        return flash_attn_func, flash_attn_varlen_func, None, private._pad_input, private._unpad_input

    return functions
