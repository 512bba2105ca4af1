"""Checks of the arguments of attention modules."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from ._call.caching import Cache
from ._call.naming import add_module
from ._checks import module, size
from ._environment import Environment, cast_for_autocast
from ._layer.linear import Linear, require_same, require_tokens
from ._layer.unmodified import has_hooks, inputs_fit, is_unmodified
from ._torch_private import any_global_hook
from .caches._kv import CrossKVCache
from .errors import ArgumentError, ClearheadError, DeviceError, DTypeError, MaskTypeError, ShapeError, shape_text
from .masks._base import Mask
from .masks._grid import Offset

#: Layers whose weight determines the inputs that they accept.
_LINEARS = (Linear, nn.Linear)


def complete(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Key and value of self-attention, or what was given."""
    if key is None:
        if value is not None:
            raise ArgumentError(
                "key",
                expected="a tensor, because value was given",
                got="None",
                fix="Leave both out for self-attention, or pass key too.",
            )
        key = query
    return key, key if value is None else value


def one_source(query: Tensor, key: Tensor | None, value: Tensor | None) -> Tensor:
    """The input of the latents: one tensor for both keys and values."""
    source = query if key is None else key
    if value is not None and value is not source:
        raise ArgumentError(
            "value",
            expected="the same tensor as key, or None",
            got="another tensor" if key is not None else "a tensor, and no key",
            fix="One latent gives keys and values both; MultiHeadAttention takes them apart.",
        )
    return source


def require_inputs(module: Any, query: Tensor, key: Tensor, value: Tensor, environment: Environment) -> None:
    """Raise unless the projections accept the inputs, and these belong together."""
    modules = vars(module)["_modules"]
    q, k, v = modules.get("q_proj"), modules.get("k_proj"), modules.get("v_proj")
    if not environment.tracing and type(q) in _LINEARS and type(k) in _LINEARS and type(v) in _LINEARS:
        # Read from the dictionaries: attributes of modules are looked up in three of them first.
        q, k, v = vars(q)["_parameters"], vars(k)["_parameters"], vars(v)["_parameters"]
        if inputs_fit(query, key, value, (q.get("weight"), k.get("weight"), v.get("weight"))):
            return
    require_features("query", query, module.q_proj)
    require_features("key", key, module.k_proj)
    require_features("value", value, module.v_proj)
    require_together(query=query, key=key, value=value)


def explain_inputs(module: Any, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
    """Raise what is wrong with an input of a module whose GEMM failed, if it is one of the inputs."""
    try:
        key, value = complete(query, key, value)
        for name, x in (("query", query), ("key", key), ("value", value)):
            require_features(name, x, getattr(module, f"{name[0]}_proj"))
    except ClearheadError as error:
        add_module(error, module)
        raise


def require_parts(position: object, **modules: object) -> None:
    """Raise unless the position part can be called and the others are modules."""
    if isinstance(position, Mask):
        fix = "It biases scores: pass it as mask=."
        raise MaskTypeError("position", expected="what rotates q and k", got=position.describe(), fix=fix)
    if position is not None and not callable(position):
        expected = "a callable (q, k, positions) -> (q, k), such as positions.Rotary"
        raise DTypeError("position", expected=expected, got=type(position).__name__)
    for name, part in modules.items():
        if part is not None:
            module(name, part, "For example torch.nn.RMSNorm(head_dim).")


def require_cache(cache: object, position: object) -> None:
    """Raise unless the cache holds keys as this module's position part rotates them."""
    if cache is not None and not isinstance(cache, Cache):
        got = cache.__name__ if isinstance(cache, type) else type(cache).__name__
        fix = "module.make_cache(batch_size, max_length) makes one."
        raise DTypeError("cache", expected="a cache of clearhead.caches", got=got, fix=fix)
    if isinstance(cache, CrossKVCache) and position is not None:
        raise ArgumentError(
            "cache",
            expected="one of self-attention, because the module has position=",
            got="a CrossKVCache",
            fix="Keys of a memory have no position relative to the queries. Use a module without position=.",
        )


def cache_place(name: str, projection: nn.Module, weight: Tensor) -> dict[str, Any]:
    """The dtype and the device of keys from a projection with this weight, under autocast too.

    The dtype is ``None`` if it is unknown.

    Raises:
        DeviceError: if the weight has no values yet, and hooks load it.
    """
    if weight.is_meta and has_hooks(projection):
        fix = (
            "Make the cache yourself, with device= the device on which the module runs: clearhead.caches.KVCache(...)."
        )
        got = "a weight on meta, and hooks that load it in each call"
        raise DeviceError(name, expected="a weight in memory, which tells the cache's device", got=got, fix=fix)
    dtype = cast_for_autocast(weight[:0])[0].dtype if weight.is_floating_point() else None
    return {"dtype": dtype, "device": weight.device}


def set_mask(owner: Any, mask: Mask | None) -> None:
    """Make a mask a module's own, with what learns in it.

    Raises:
        MaskTypeError: unless it fits calls of any size.
    """
    checked: object = mask
    if checked is not None and not isinstance(checked, Mask):
        fix = "A tensor belongs to a call; give the layer a rule, such as masks.sliding_window(255, 0)."
        raise MaskTypeError("mask", expected="a clearhead Mask", got=type(checked).__name__, fix=fix)
    owner.mask = mask
    if mask is not None and not isinstance(mask, nn.Module):
        # A mask that is no module itself would hide the parameters of its parts from `parameters()`.
        owner.mask_parts = nn.ModuleList(part for part in mask.parts() if isinstance(part, nn.Module))


def draw_projections(*projections: nn.Linear | None) -> None:
    """Draw weights from Xavier's uniform distribution and set biases to zero."""
    for projection in projections:
        if projection is None:
            continue
        nn.init.xavier_uniform_(projection.weight)
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)


def require_features(name: str, x: object, projection: nn.Module, fix: str = "") -> None:
    """Raise unless a projection accepts the input.

    A modified projection checks dtype and device itself: hooks may load or convert its parameters first.
    """
    features = getattr(projection, "in_features", None)
    fix = fix or f"The module is batch first; the features of the {name} input are set by {name[0]}dim=."
    x = require_tokens(name, x, features if isinstance(features, int) else None, fix)
    if is_unmodified(projection) and not any_global_hook():
        require_same(name, x, cast(Tensor, projection.weight))


def require_together(**inputs: Tensor) -> None:
    """Raise unless the inputs, named as the arguments are, belong to one batch and each key has its value."""
    query, key = inputs["query"], inputs["key"]
    if any(x.dim() != query.dim() for x in inputs.values()):
        problem = "inputs that all have a batch, or none"
    elif query.dim() == 3 and any(x.shape[0] != query.shape[0] for x in inputs.values()):
        problem = "equal batch sizes B, or no batch"
    elif key.shape[-2] != inputs.get("value", key).shape[-2]:
        problem = "equal key and value lengths S"
    else:
        return
    got = ", ".join(f"{name} {shape_text(x.shape)}" for name, x in inputs.items())
    raise ShapeError(", ".join(inputs), expected=problem, got=got, fix="Inputs are (B, length, features).")


def unfit_projections(projected: tuple[Tensor, Tensor, Tensor], inner: int, kv_inner: int) -> ShapeError:
    """The error for projections that do not give the features of the module's heads."""
    got = " and ".join(str(each.shape[-1]) for each in projected)
    fix = (
        "A replaced projection must give as many features. Do not split projections by hand: "
        "use clearhead.distributed.tensor_parallel."
    )
    expected = f"H·D = {inner} features of queries, and Hkv·D = {kv_inner} of keys and of values"
    return ShapeError("q_proj, k_proj, v_proj", expected=expected, got=got, fix=fix)


def kv_head_count(num_kv_heads: int | None, num_heads: int) -> int:
    """Hkv, H by default, which must divide H."""
    count = num_heads if num_kv_heads is None else size("num_kv_heads", num_kv_heads)
    if num_heads % count:
        raise ArgumentError(
            "num_kv_heads",
            expected=f"a divisor of num_heads = {num_heads}",
            got=str(num_kv_heads),
            fix="Every key/value head serves the same number of query heads.",
        )
    return count


def refuse_split_dropout(offset: Offset | None) -> None:
    """Raise for jagged inputs of a module whose heads are split over processes and whose weights are dropped."""
    if offset is not None:
        fix = "Pad them and pass masks.lengths(...), or set module.dropout = 0.0."
        expected = "padded inputs where heads are split over processes and weights are dropped"
        raise ArgumentError("query", expected=expected, got="a jagged tensor", fix=fix)


def default_head_dim(embed_dim: int, num_heads: int) -> int:
    """E / H, which must be whole."""
    if embed_dim % num_heads:
        raise ArgumentError(
            "embed_dim",
            expected=f"a multiple of num_heads = {num_heads}",
            got=str(embed_dim),
            fix="Choose other sizes, or set head_dim yourself.",
        )
    return embed_dim // num_heads
