"""`attention`, and `explain`."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from ._call.call import Call, valid_call
from ._environment import cast_for_autocast, read_environment
from ._layer.linear import describe_backend
from ._layer.plan import attend
from ._proxies import recorded_call
from .errors import ClearheadError
from .kernels._choice import Explanation, explain_call
from .masks._base import Mask
from .masks._tensors import as_mask


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention with one meaning on every kernel.

    ::

        s_ij  = scale · q_i·k_j;  with a soft-cap s ← c·tanh(s/c);  then + bias_ij;  −∞ where hidden
        lse_i = log(Σ_j exp s_ij + exp sink_h)      the sink term only if there are sinks
        o_i   = Σ_j dropout(exp(s_ij − lse_i)) · v_j

    Sources: Vaswani et al., "Attention is all you need", 2017. The soft-cap is from Gemma 2 (2024), sinks are from
    gpt-oss (2025).

    A fully masked row has o = 0 and lse = −∞, never NaN. With sinks its lse is the sink. NaN or inf in a key or value
    that is masked for every query of its batch item reaches neither output nor gradients. float16 and bfloat16 are
    scored and accumulated in float32. Autocast casts the inputs as for PyTorch's own attention.

    Args:
        query: (B, H, L, D), or (H, L, D) without a batch. The dtype is float64, float32, bfloat16 or float16.
        key: (B, Hkv, S, D). Hkv divides H (grouped heads).
        value: (B, Hkv, S, Dv).
        mask: from `clearhead.masks`, or a bool tensor with ``True`` = may attend. Default: no key is hidden.
        scale: factor of the scores. Default 1/√D.
        dropout_p: probability in [0, 1] that a weight is dropped. Default 0. This function has no training mode.
        softcap: c > 0 limits scores to (−c, c). Default: none.
        sinks: (H,) logits that only enlarge the denominator of the softmax. Default: none.
        query_positions: absolute positions, which masks use. An int p means p … p + L − 1. A tensor has integers (L,)
            or (B, L). Default 0 … L−1.
        key_positions: likewise an int, (S,) or (B, S). (B, H, S) is for heads that hold different keys.
            Default 0 … S−1.
        return_lse: also return lse.

    Returns:
        Output (B, H, L, Dv) in the query's dtype. With `return_lse` also lse (B, H, L), a natural logarithm in float32
        (float64 for float64 inputs). Unbatched inputs return unbatched outputs.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError, MaskTypeError: for invalid arguments. The error names the
            argument, the expected value, the value that came, and the fix.
        KernelError: if the forced kernel cannot run this call.

    Example:
        >>> import torch, clearhead
        >>> query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 3)
        >>> clearhead.attention(query, key, value, clearhead.masks.causal()).shape
        torch.Size([2, 4, 5, 3])
    """
    try:
        options = scale, softcap, sinks, dropout_p, query_positions, key_positions, return_lse
        results = attend(Call(query, key, value, as_mask(mask), *options), read_environment())
    except ClearheadError as error:
        return recorded_call(attention, error, locals())
    return results.output if results.lse is None else (results.output, results.lse)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    return_lse: bool = False,
) -> Explanation:
    """Return which kernel `attention` would run for these arguments, and every kernel's reasons against them.

    It computes no attention.

    Args:
        query, key, value, mask, scale, dropout_p, softcap, sinks, query_positions, key_positions, return_lse:
            as for `attention`.

    Returns:
        An `Explanation`. It has ``.kernel``, ``.reasons`` by kernel, ``.projections``, and a readable ``str``. On a GPU
            it has ``.backend``, PyTorch's kernel, and ``.faster``.

    Raises:
        ClearheadError: for bad arguments, as `attention` does.

    Example:
        >>> import torch, clearhead
        >>> x = torch.randn(1, 2, 3, 4)
        >>> print(clearhead.explain(x, x, x, softcap=30.0, sinks=torch.zeros(2)))  # doctest: +ELLIPSIS
        runs on: ...
          sdpa       it has no soft-cap
          chunked    can run it
          flex       it has no sinks...
          reference  can run it
        projections: ...
    """
    query, key, value = cast_for_autocast(query, key, value)
    options = scale, softcap, sinks, dropout_p, query_positions, key_positions, return_lse
    call = valid_call(Call(query, key, value, as_mask(mask), *options))
    return explain_call(call, describe_backend() if call.query.is_cpu else "")
