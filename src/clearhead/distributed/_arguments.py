"""The arguments of a call after `context_parallel`, as far as one process can check them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .._call.caching import Positions
from .._call.dropout import draw_seed
from .._call.request import WeightsWanted, weights_wanted
from .._checks import FLOATS, flag, shown
from .._environment import Environment, listening
from .._layer.positions import positions_of_queries
from .._multihead import MultiHeadAttention
from .._multihead_checks import complete, require_cache, require_features, require_inputs
from ..caches._cross import CrossKVCache
from ..errors import ArgumentError, KernelError, RecordError
from ..masks._base import Mask
from ..masks._tensors import as_mask
from ._agreement import fingerprint
from ._decode import SplitCache, sizes_of
from ._methods import mask_fact

WHERE = "context_parallel"


class Arguments(NamedTuple):
    """The arguments of a call.

    Args:
        query, key, value: with a batch.
        mask: the mask of the call, for the heads of this process.
        positions: the positions of the whole sequence.
        cache: the cache of the split module.
        weights: which weights are returned.
        batched: whether the caller passed a batch.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    positions: Positions | None
    cache: SplitCache | None
    weights: WeightsWanted
    batched: bool


def read_arguments(module: MultiHeadAttention, environment: Environment, *arguments: Any) -> Arguments:
    """The checked arguments of a call of a module, which are those of `SequenceShard.call`."""
    query, key, value, mask, positions, cache, need_weights, average_attn_weights = arguments
    cache = _read_cache(module, environment, cache, positions, need_weights)
    _require_supported(module, environment)
    weights = weights_wanted(need_weights, average_attn_weights)
    if isinstance(query, Tensor) and query.is_nested:
        fix = "Pad them and pass masks.lengths(...)."
        raise ArgumentError("query", expected="a padded tensor", got="a jagged one", fix=fix)
    if cache is None or cache.get() is None:
        if isinstance(cache, CrossKVCache) and key is None:
            fix = "The first call needs it; later ones with the same cache do not."
            raise ArgumentError("key", expected="this process's part of the memory", got="None", fix=fix)
        key, value = complete(query, key, value)
        require_inputs(module, query, key, value)
    else:  # a memory whose keys are projected already
        require_features("query", query, module.q_proj)
        key = value = query
    mask = None if mask is None else as_mask(mask)
    if module.head_shard is not None:
        mask = module.head_shard.mask(mask)
    if positions is not None:
        positions_of_queries(positions, None, query.shape[-2])
    batched = query.dim() == 3
    if not batched:  # one tensor stays one
        batches = {id(x): x[None] for x in (query, key, value)}
        query, key, value = (batches[id(x)] for x in (query, key, value))
    return Arguments(query, key, value, mask, positions, cache, weights, batched)


def _read_cache(
    module: MultiHeadAttention, environment: Environment, cache: object, positions: object, need_weights: object
) -> SplitCache | None:
    """The cache. Raise for a cache or a call that does not support decoding with split keys."""
    if cache is None:
        return None
    if not isinstance(cache, SplitCache):
        fix = "module.make_cache(batch_size, max_length) makes one after context_parallel."
        raise ArgumentError("cache", expected="a cache of the split module", got=type(cache).__name__, fix=fix)
    require_cache(cache, module.position)
    weights = flag("need_weights", need_weights) or None
    for name, argument in (("positions", positions), ("need_weights", weights)):
        if argument is not None:
            fix = "Decode with a module that was not split."
            raise ArgumentError(name, expected="nothing beside keys that are split", got=shown(argument), fix=fix)
    if environment.observed:
        raise RecordError(f"{WHERE}: a recorder does not see decoding with keys that are split.")
    if module.training and module.dropout:
        raise ArgumentError("cache", expected="a module in eval()", got="one that drops weights", fix="Call eval().")
    return cache


def _require_supported(module: MultiHeadAttention, environment: Environment) -> None:
    if environment.transformed:
        raise KernelError(f"{WHERE}: torch.func and forward-mode derivatives do not follow exchanges.")
    kernel = environment.kernel
    if module.training and module.dropout and kernel is not None and not kernel.seeds_dropout:
        raise KernelError(
            f"{WHERE}: use_kernel({kernel.name!r}) cannot drop the weights that one process drops. "
            "Leave the choice to Clearhead, or set module.dropout = 0.0."
        )


def facts_of(module: MultiHeadAttention, arguments: Arguments, environment: Environment) -> dict[str, int]:
    """The facts of a call that the processes agree on."""
    query, key, value, mask, positions, cache, weights, batched = arguments
    gradients = [tensor.requires_grad for tensor in (query, key, value, *module.parameters())]
    of_positions = tuple(positions.shape) if isinstance(positions, Tensor) else positions
    return {
        "batch size": query.shape[0],
        "a batch": batched,
        "dtype": FLOATS.index(query.dtype),
        "cache": fingerprint(sizes_of(cache)),
        "key is query": key is query,
        "value is key": value is key,
        "need_weights": weights is not None,
        "average_attn_weights": weights == "average",
        "training": module.training,
        # A process that needs no gradient of the keys joins no exchange of it.
        "gradients": environment.gradients and fingerprint(gradients),
        "autocast": environment.autocast,
        "kernel": fingerprint(getattr(environment.kernel, "name", None)),
        "mask": mask_fact(mask),
        "positions": fingerprint(of_positions),
        "dropout": fingerprint(module.dropout),
        "recorders": fingerprint([observer.wanted() for observer in listening()]) if environment.observed else 0,
        "query": query.shape[1],
        "key": key.shape[1] if cache is None or cache.get() is None else cache.length,
        # Every process draws a seed, so that all generators advance alike. The first process's seed is used.
        "seed": int(draw_seed(query.device)) if module.training and module.dropout else 0,
    }
