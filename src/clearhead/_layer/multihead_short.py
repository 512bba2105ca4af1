"""The short ways through `MultiHeadAttention`: for tiny calls, where Python costs most, and for padded batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from .._attention import attention
from .._multihead_checks import complete, require_keys
from ..masks._base import Mask
from ..masks._tensors import as_mask
from .linear import eager_linear
from .one_step import may_be_one_step, one_step
from .padding import Costs, find_padding
from .plain import apply_linear, bare_parameters, plain_parameters

if TYPE_CHECKING:
    from .._multihead import MultiHeadAttention

__all__ = ["short_way", "short_way_with_weights"]


def short_way(
    module: MultiHeadAttention, query: Tensor, key: Tensor | None, value: Tensor | None, mask: Mask | Tensor | None
) -> Tensor | None:
    """The output of a layer that is only its four projections, none of which anything hangs on.

    Returns:
        (B, L, E); ``None`` where there is more to the call, where nothing is to be gained, and where an input is wrong:
        what is wrong with it is left for the long way to say.
    """
    if not _has_projections_only(module):
        return None
    found = _at_once(module, (query, *complete(query, key, value)), mask, None)
    if found is not None:
        return found[0]
    if mask is not None:
        return _without_padding(module, query, key, value, mask)
    return _alone(module, query) if key is None and value is None else None


def short_way_with_weights(
    module: MultiHeadAttention,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    mask: Mask | Tensor | None,
    average: bool,
) -> tuple[Tensor, Tensor] | None:
    """The same with the weights (B, L, S), or (B, H, L, S) if not averaged, for tiny calls alone."""
    if not _has_projections_only(module):
        return None
    found = _at_once(module, (query, *complete(query, key, value)), mask, average)
    return None if found is None else cast("tuple[Tensor, Tensor]", found)


def _has_projections_only(module: MultiHeadAttention) -> bool:
    if module.position is not None or module.q_norm is not None or module.k_norm is not None:
        return False
    parameters = module.__dict__["_parameters"]  # looked up here, attributes of modules take their time
    return module.mask is None and module.softcap is None and parameters.get("sinks") is None


def _at_once(
    module: MultiHeadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Mask | Tensor | None,
    average: bool | None,
) -> tuple[Tensor, Tensor | None] | None:
    """A tiny call."""
    if not may_be_one_step(inputs[0]) or (module.training and (type(module.dropout) is not float or module.dropout)):
        return None
    modules: dict[str, nn.Module | None] = module.__dict__["_modules"]
    parameters = bare_parameters(*map(modules.get, ("q_proj", "k_proj", "v_proj", "out_proj")))
    if parameters is None or (mask is not None and not _is_small(module, *inputs)):
        return None
    heads = (module.num_heads, module.num_kv_heads, module.head_dim, True)
    return one_step(inputs, parameters, heads, module.scale, None if mask is None else as_mask(mask), average)


def _is_small(module: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether nothing is to be gained by leaving padding out."""
    if any(type(x) is not Tensor or x.is_nested or x.dim() != 3 for x in (query, key, value)):
        return False
    return _costs(module, query, key, value).are_low(query.shape[1], key.shape[1])


def _costs(module: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor) -> Costs:
    inner, kv_inner = module.num_heads * module.head_dim, module.num_kv_heads * module.head_dim
    of_key = (key.shape[2] + value.shape[2]) * kv_inner
    return Costs((query.shape[2] + module.embed_dim) * inner, of_key, 2 * inner)


def _alone(module: MultiHeadAttention, x: Tensor) -> Tensor | None:
    """Self-attention without a mask, in as little Python as it takes."""
    parameters = plain_parameters((x, module.q_proj), (x, module.k_proj), (x, module.v_proj))
    if parameters is None:
        return None
    multiply, sizes = eager_linear(), (-1, module.head_dim)  # unflattened, because −1 is ambiguous in an empty batch
    q, k, v = [multiply(x, weight, bias).unflatten(2, sizes).transpose(1, 2) for weight, bias in parameters]
    mixed = attention(q, k, v, scale=module.scale, dropout_p=module.dropout if module.training else 0.0)
    return apply_linear(module.out_proj, mixed.transpose(1, 2).flatten(2))  # (B, L, E)


def _without_padding(
    module: MultiHeadAttention, query: Tensor, key: Tensor | None, value: Tensor | None, mask: Mask | Tensor
) -> Tensor | None:
    """Attention with padding left out."""
    key, value = complete(query, key, value)
    parameters = plain_parameters((query, module.q_proj), (key, module.k_proj), (value, module.v_proj))
    if parameters is None:
        return None
    require_keys(module, query, key, value)
    padding = find_padding(as_mask(mask), query, key, module.num_heads, _costs(module, query, key, value))
    if padding is None:
        return None
    multiply, inputs = eager_linear(), padding.take(query, key, value)
    q, k, v = (multiply(x, *both) for x, both in zip(inputs, parameters, strict=True))  # (T, H·D), (Tk, Hkv·D)
    mixed = padding.attend(q, k, v, module.head_dim, module.scale, module.dropout if module.training else 0.0)
    return padding.finish(mixed, module.out_proj, apply_linear)
