"""`cache_for`: small key/value caches for the `generate` of transformers, and the models that they serve."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any, Literal, final

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from .._checks import choice, module, shown, size
from ..caches import EvictingKVCache, EvictionPolicy, HeavyHitters, SinksAndRecent, SlidingKVCache
from ..errors import ArgumentError, CacheError, DTypeError
from ._bounded_cache import BoundedCache, hook, require_implementation, windows
from ._cache_layers import Bounded, FullCacheLayer, Within, cache_like, require_rows

Kind = Literal["full", "sliding", "heavy_hitters", "sinks_and_recent"]

#: The arguments of each kind. It refuses the others.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "full": ("max_length",),
    "sliding": ("window",),
    "heavy_hitters": ("budget", "recent"),
    "sinks_and_recent": ("budget", "sinks"),
}

#: The ``model_type`` of models that all kinds serve, and of those that only "full" serves.
_SERVED = ("llama", "mistral", "qwen3", "gemma2", "gpt_oss", "gpt_neox", "gpt2", "deepseek_v2", "deepseek_v3")
_FULL_ONLY = ("bloom", "t5")


def cache_for(
    model: nn.Module,
    kind: Kind = "full",
    *,
    window: int | None = None,
    budget: int | None = None,
    sinks: int = 4,
    recent: float = 0.5,
    max_length: int | None = None,
) -> Cache:
    """Make a key/value cache for the `generate` of a transformers model.

    A decoding step reads all keys of a cache. ``"full"`` holds every key, and gives the tokens of transformers'
    `DynamicCache`. The other kinds hold a fixed number of keys. They give the results of the model under the dense mask
    of these keys. This is exact until a key is evicted, and an approximation from then on. The tokens of a prompt
    attend to each other before a key is evicted. With ``"sliding"`` they attend only within the window.

    Layers with a sliding window (Mistral, Gemma 2, gpt-oss, some of Qwen3) never keep more than that window, and first
    evict the keys behind it.

    * ``"full"`` keeps all tokens. It also serves bloom and t5.
    * ``"sliding"`` keeps the last `window` tokens (`clearhead.caches.SlidingKVCache`).
    * ``"heavy_hitters"`` keeps, in every head, the latest keys and the keys that received the most weight
      (`clearhead.caches.HeavyHitters`). The model must have attention ``clearhead``.
    * ``"sinks_and_recent"`` keeps the first and the latest tokens (`clearhead.caches.SinksAndRecent`).

    Args:
        model: a decoder of transformers (llama, mistral, qwen3, gemma2, gpt_oss, gpt_neox, gpt2, deepseek_v2,
            deepseek_v3). Kinds other than ``"full"`` register two forward hooks at its decoder, which do nothing
            without such a cache. They need the attention implementation ``eager``, ``sdpa`` or ``clearhead``.
        kind: one of the kinds above. Default ``"full"``.
        window: number of tokens that a query attends to, its own included. Only ``"sliding"`` has it, and needs it.
        budget: number of keys of every layer and head that stay after a step. Only ``"heavy_hitters"`` and
            ``"sinks_and_recent"`` have it, and need it.
        sinks: number of first tokens that stay, fewer than the budget. Only for ``"sinks_and_recent"``. Default 4.
        recent: share of the budget for the latest tokens, in [0, 1]. Only for ``"heavy_hitters"``. Default 0.5.
        max_length: number of tokens that memory is allocated for at once. The cache refuses more. Only for
            ``"full"``. By default a full cache allocates more.

    Returns:
        The cache for one batch. Pass it as ``past_key_values``, and `reset` it before the next batch. Beam search
        reorders it, and rows may be padded on any side. Only ``"full"`` can remove tokens, which assisted decoding
        needs. ``cache.layers[i].keys`` has its keys, (B, Hkv, S, D). Layers of the other kinds also have their
        `positions`, (B, Hkv or 1, S).

    Raises:
        ArgumentError, DTypeError: for a model that cannot be served, or an argument that is unused, missing or out of
            bounds. The model is then unchanged.
        CacheError: raised in use, for more than `max_length` tokens, for tokens to be removed, and for another model.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from clearhead.integrations.transformers import cache_for
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=31, eos_token_id=None, **sizes)).eval()
        >>> cache = cache_for(model, "sinks_and_recent", budget=8, sinks=2)
        >>> prompt = torch.arange(1, 6)[None]
        >>> texts = model.generate(prompt, max_new_tokens=20, do_sample=False, past_key_values=cache, pad_token_id=0)
        >>> texts.shape, cache.layers[0].cache.positions[0, 0].sort().values.tolist()
        (torch.Size([1, 25]), [0, 1, 18, 19, 20, 21, 22, 23])
    """
    choice("kind", kind, tuple(_ARGUMENTS))
    _require_unused(kind, window=window, budget=budget, sinks=sinks, recent=recent, max_length=max_length)
    if kind == "full":
        return _full(_served(model, kind), None if max_length is None else size("max_length", max_length))
    if kind == "sliding":
        make = partial(_sliding, size("window", window))
    else:
        policy = HeavyHitters(recent) if kind == "heavy_hitters" else SinksAndRecent(sinks)
        capacity = size("budget", budget)
        if kind == "sinks_and_recent" and sinks >= capacity:
            expected = f"fewer than budget={budget}, so that the latest tokens have room"
            raise ArgumentError("sinks", expected=expected, got=str(sinks))
        make = partial(_evicting, capacity, policy)
    served = _served(model, kind)
    cache = BoundedCache(kind, make, windows(served.config))
    require_implementation(kind, served.base_model.config)
    hook(served.base_model)
    return cache


@final
class FullCache(Cache):
    """All tokens, as `DynamicCache`. Layers with a sliding window keep only the window."""

    def __init__(self, layers: list[Any], max_length: int | None) -> None:
        super().__init__(layers=layers)
        self._max_length = max_length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        length, new = self.get_seq_length(layer_idx), key_states.shape[2]
        if self._max_length is not None and length + new > self._max_length:
            expected = f"at most max_length = {self._max_length} tokens"
            got = f"{length} held and {new} more, {length + new}"
            fix = "Make it with a larger max_length, or with none: cache_for(model). Or reset() it."
            raise CacheError("past_key_values", expected=expected, got=got, fix=fix)
        layer: Any = self.layers[layer_idx]
        keys = layer.keys
        require_rows(0 if keys is None else keys.shape[0], key_states.shape[0])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _require_unused(kind: str, **arguments: Any) -> None:
    """Raise if an argument belongs to another kind."""
    for name, value in arguments.items():
        default = signature(cache_for).parameters[name].default
        if name not in _ARGUMENTS[kind] and not (type(value) is type(default) and value == default):
            fix = f"It is for {' and '.join(repr(other) for other, names in _ARGUMENTS.items() if name in names)}."
            raise ArgumentError(name, expected=f"nothing for kind={kind!r}", got=shown(value), fix=fix)


def _served(model: object, kind: str) -> PreTrainedModel:
    """The model of transformers in `model`, which may be wrapped (peft, torch.compile)."""
    decoder = next((part for part in module("model", model).modules() if isinstance(part, PreTrainedModel)), None)
    if decoder is None:
        raise DTypeError("model", expected="a model of transformers", got=shown(type(model).__name__))
    config: Any = decoder.config
    known = (*_SERVED, *_FULL_ONLY) if kind == "full" else _SERVED
    name = config.model_type
    fits = bool(config.is_encoder_decoder) == (name == "t5") and not getattr(config, "add_cross_attention", False)
    if name not in known or not fits:
        fix = "Without past_key_values= generate makes transformers' own cache."
        if fits and name in _FULL_ONLY:
            fix += f" {name}: its attention adds a bias to every column; kind='full' serves it."
        expected = f"for kind={kind!r} a decoder of type {', '.join(known)}"
        indexer = any(field.startswith("index_") for field in config.get_text_config().to_dict())
        got = f"{type(decoder).__name__}, type {name}" + ", whose indexer caches keys of its own" * indexer
        raise ArgumentError("model", expected=expected, got=got, fix=fix)
    return decoder


def _full(served: PreTrainedModel, max_length: int | None) -> Cache:
    # transformers chooses the layers that need only a window.
    dynamic = DynamicCache(config=served.get_decoder().config).layers
    layers = [FullCacheLayer(max_length) if type(layer) is DynamicLayer else layer for layer in dynamic]
    if any(type(layer) not in (FullCacheLayer, DynamicSlidingWindowLayer) for layer in layers):
        expected = "layers with attention to all tokens or to a sliding window"
        got = ", ".join(sorted({type(layer).__name__ for layer in layers} - {"FullCacheLayer"}))
        raise ArgumentError("model", expected=expected, got=got)
    cache = FullCache(layers, max_length)
    return EncoderDecoderCache(cache, DynamicCache()) if served.config.is_encoder_decoder else cache


def _sliding(window: int, layer_window: int | None, key: Tensor, value: Tensor) -> Bounded:
    """The cache of a layer for the last `window` tokens, or for the layer's own window if it is smaller."""
    return cache_like(SlidingKVCache, key, value, min(window, layer_window or window))


def _evicting(budget: int, policy: EvictionPolicy, layer_window: int | None, key: Tensor, value: Tensor) -> Bounded:
    """The cache of a layer for the keys that a policy keeps, within the layer's own window if it has one."""
    if layer_window is None:
        return cache_like(EvictingKVCache, key, value, budget, policy=policy)
    if layer_window - 1 <= budget:  # all keys of the window fit into the budget
        return cache_like(SlidingKVCache, key, value, layer_window)
    return cache_like(EvictingKVCache, key, value, budget, policy=Within(policy, layer_window))
