"""`cache_for`: small key/value caches for the `generate` of transformers.

What a model attends to is decided in two places: the cache hands out keys, and the model's mask says which of them a
query sees. transformers makes that mask for keys that stand side by side. The caches here keep others, so a hook before
the decoder's forward replaces the mask by that of the keys which the cache will hand out, in the form of the model's
attention implementation. Which keys these are depends on the padding alone, but for heavy hitters: there the mask
carries the cache to the attention function (`Carried`), which shows it queries and keys.
"""

from __future__ import annotations

import functools
from inspect import signature
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .._checks import choice, is_probability, module, number, shown, size
from ..caches import EvictingKVCache, EvictionPolicy, HeavyHitters, SinksAndRecent, SlidingKVCache
from ..errors import ArgumentError, CacheError, DTypeError, ShapeError, shape_text
from ._cache_layers import Bounded, BoundedLayer, FullLayer, MakeBounded, Within, not_croppable
from ._lazy_mask import Carried, carrying

Kind = Literal["full", "sliding", "heavy_hitters", "sinks_and_recent"]

#: What every kind is made with; the others are refused.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "full": ("max_length",),
    "sliding": ("window",),
    "heavy_hitters": ("budget", "recent"),
    "sinks_and_recent": ("budget", "sinks"),
}
_DEFAULTS: dict[str, object] = {"window": None, "budget": None, "sinks": 4, "recent": 0.5, "max_length": None}

#: The ``model_type`` of the models that all kinds serve, and of those that "full" alone does, with the reason.
_SERVED = ("llama", "mistral", "qwen3", "gemma2", "gpt_oss", "gpt_neox", "gpt2", "deepseek_v2", "deepseek_v3")
_FULL_ONLY = {
    "bloom": "its attention adds a bias to every column, whatever stands there",
    "t5": "its attention adds a bias to every column, whatever stands there",
}
#: Those whose `forward` takes one mask per type of layer.
_MASK_PER_TYPE = ("qwen3", "gemma2", "gpt_oss")
_IMPLEMENTATIONS = ("eager", "sdpa", "clearhead")


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

    A decoding step reads all keys that a cache holds. ``"full"`` holds every one, and gives the tokens of transformers'
    `DynamicCache`. The others hold a fixed number, and give what the model gives under the dense mask of what is held:
    exact as long as nothing had to go, an approximation from then on. A prompt's tokens attend to each other before
    anything is evicted; with ``"sliding"`` they too see no further than the window.

    Layers with a sliding window of their own (Mistral, Gemma 2, gpt-oss, some of Qwen3) keep no more than that window,
    and evict first what it has passed.

    Args:
        model: a decoder of transformers: llama, mistral, qwen3, gemma2, gpt_oss, gpt_neox, gpt2, deepseek_v2,
            deepseek_v3; with ``"full"`` also bloom and t5. Kinds other than ``"full"`` leave two forward hooks at its
            decoder, which do nothing without such a cache, and need the attention implementation ``eager``, ``sdpa``
            or ``clearhead``.
        kind: ``"full"``; ``"sliding"``, the last `window` tokens (`clearhead.caches.SlidingKVCache`);
            ``"heavy_hitters"``, in every head the keys that received the most weight and the latest
            (`clearhead.caches.HeavyHitters`), for which the model must have attention ``clearhead``;
            ``"sinks_and_recent"``, the first and the latest (`clearhead.caches.SinksAndRecent`). Default ``"full"``.
        window: how many tokens a query sees, itself included; of ``"sliding"``, which needs it.
        budget: how many keys of every layer and head stay after a step; of ``"heavy_hitters"`` and
            ``"sinks_and_recent"``, which need it.
        sinks: how many of the first tokens stay, fewer than the budget; of ``"sinks_and_recent"``. Default 4.
        recent: the share of the budget for the latest tokens, in [0, 1]; of ``"heavy_hitters"``. Default 0.5.
        max_length: how many tokens room is made for at once; more are refused. Of ``"full"``, which makes more room
            whenever it is used up by default.

    Returns:
        The cache, for one batch: pass it as ``past_key_values``, or `reset` it for the next. Beam search reorders it;
        rows may be padded on any side. Only ``"full"`` can take tokens back, which assisted decoding needs.
        ``cache.layers[i].keys`` are those held, (B, Hkv, S, D), and but for ``"full"`` ``cache.layers[i].positions``
        where they stand in their texts, (B, Hkv or 1, S).

    Raises:
        ArgumentError, DTypeError: for a model that cannot be served, an argument that the kind does not use, a missing
            one, or one out of bounds. The model is then as it was.
        CacheError: when used, for more than `max_length` tokens, for tokens to be taken back, and for a model that the
            cache was not made for.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from clearhead.integrations.transformers import cache_for
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=31, eos_token_id=None, **sizes)).eval()
        >>> cache = cache_for(model, "sinks_and_recent", budget=8, sinks=2)
        >>> prompt = torch.arange(1, 6)[None]
        >>> texts = model.generate(prompt, max_new_tokens=20, do_sample=False, past_key_values=cache, pad_token_id=0)
        >>> texts.shape, cache.layers[0].positions[0, 0].sort().values.tolist()
        (torch.Size([1, 25]), [0, 1, 18, 19, 20, 21, 22, 23])
    """
    choice("kind", kind, tuple(_ARGUMENTS))
    given = {"window": window, "budget": budget, "sinks": sinks, "recent": recent, "max_length": max_length}
    _require_used(kind, given)
    served = _served(model, kind)
    if kind == "full":
        return _full(served, max_length)
    policy: EvictionPolicy = HeavyHitters(recent) if kind == "heavy_hitters" else SinksAndRecent(sinks)
    make = functools.partial(_layer_cache, window, budget, policy)
    cache = BoundedCache(kind, make, _windows(served.config))
    _require_implementation(kind, served.base_model.config)
    _hook(served.base_model)
    return cache


@final
class FullCache(Cache):
    """Everything, as `DynamicCache`; layers with a sliding window of their own keep that."""

    def __init__(self, layers: list[Any], max_length: int | None) -> None:
        super().__init__(layers=layers)
        self._max_length = max_length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        held, new = self.get_seq_length(layer_idx), key_states.shape[2]
        if self._max_length is not None and held + new > self._max_length:
            raise CacheError(
                "past_key_values",
                expected=f"at most max_length = {self._max_length} tokens",
                got=f"{held} held and {new} more, {held + new}",
                fix="Make it with a larger max_length, or with none: cache_for(model). Or reset() it.",
            )
        layer: Any = self.layers[layer_idx]
        keys = layer.keys
        _require_rows(0 if keys is None else keys.shape[0], key_states.shape[0])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@final
class BoundedCache(Cache):
    """A part of the keys, which a window or a policy chooses.

    Args:
        kind: what `cache_for` was given.
        make: the cache of a layer, from that layer's own window or ``None``, its first keys and values.
        windows: of the model's layers.
    """

    layers: list[BoundedLayer]

    def __init__(self, kind: str, make: MakeBounded, windows: list[int | None]) -> None:
        super().__init__(layers=[BoundedLayer(make, window) for window in windows])
        self.kind = kind
        self._observing = kind == "heavy_hitters"
        # What a window or a policy keeps without looking at weights is the same in all layers of one window: a layer of
        # a single feature goes ahead of them, to tell what they will hand out.
        self._ahead = {} if self._observing else {each: BoundedLayer(make, each) for each in dict.fromkeys(windows)}
        self._expected: tuple[Tensor | int, int] | None = None  # positions of the forward's tokens, and how many

    def __repr__(self) -> str:
        layer = self.layers[0]
        held = "empty" if layer.held is None else f"{layer.held!r} in the first of {len(self.layers)} layers"
        return f"{type(self).__name__}({self.kind}, {held})"

    def begin(self, decoder: PreTrainedModel, tokens: Tensor, given: object) -> Tensor | dict[str, Tensor]:
        """Prepare for the tokens of a forward, and return the masks it shall run with.

        Args:
            decoder: the model that runs.
            tokens: ids (B, L) or embeddings (B, L, E).
            given: its ``attention_mask``.
        """
        config: Any = decoder.config
        _require_implementation(self.kind, config)
        batch_size, length = tokens.shape[:2]
        self._require_ready(config, batch_size)
        positions = self._positions(given, batch_size, length)
        masks: dict[int | None, Tensor] = {}
        for window in dict.fromkeys(layer.window for layer in self.layers):
            if self._observing:
                masks[window] = carrying(
                    Carried(None, self), _unreadable, (batch_size, 1, length, 1), decoder.dtype, tokens.device
                )
            else:
                seen = self._seen_ahead(window, positions, batch_size, length, tokens.device)
                masks[window] = _as_implemented(config, seen, decoder.dtype)
        self._expected = positions, length
        if config.model_type not in _MASK_PER_TYPE:
            return masks[self.layers[0].window]
        return {kind: masks[layer.window] for kind, layer in zip(config.layer_types, self.layers, strict=True)}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        expected = self._expected
        if expected is None or expected[1] != key_states.shape[2]:
            raise _of_another_model()
        if layer_idx > 0:
            self.layers[layer_idx - 1].evict()  # its attention is over
        return self.layers[layer_idx].update(key_states, value_states, expected[0])

    def end(self) -> None:
        """A forward is over."""
        self._expected = None
        self.layers[-1].evict()

    def reset(self) -> None:
        super().reset()
        for layer in self._ahead.values():
            layer.reset()
        self._expected = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        for layer in (*self.layers, *self._ahead.values()):
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in (*self.layers, *self._ahead.values()):
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in (*self.layers, *self._ahead.values()):
            layer.batch_select_indices(indices)

    def activate_past_recording(self) -> None:
        raise not_croppable("past_key_values")

    def _require_ready(self, config: Any, batch_size: int) -> None:
        if len(self.layers) != config.num_hidden_layers or [each.window for each in self.layers] != _windows(config):
            raise _of_another_model()
        taken = {layer.get_seq_length() for layer in (*self.layers, *self._ahead.values())}
        if len(taken) > 1:
            raise CacheError(
                "past_key_values",
                expected="a cache whose layers have taken the same tokens",
                got="one that an interrupted forward left halfway",
                fix="reset() it and begin with the prompt.",
            )
        _require_rows(self.layers[0].rows, batch_size)

    def _positions(self, given: object, batch_size: int, length: int) -> Tensor | int:
        """Where the new tokens stand in their texts: an int, or (B, L) with −1 for padding."""
        first, taken = self.layers[0].next_positions(), self.get_seq_length()
        if given is None:
            return first if isinstance(first, int) else first + torch.arange(length, device=first.device)
        expected = f"the tokenizer's marks of all tokens so far, {shape_text((batch_size, taken + length))}"
        if not isinstance(given, Tensor) or tuple(given.shape) != (batch_size, taken + length):
            fix = "The cache makes the masks of its keys itself."
            raise ShapeError("attention_mask", expected=expected, got=shown(given), fix=fix)
        real = given.bool()
        if taken > 0 and bool((real[:, :taken].sum(1, keepdim=True) != first).any()):
            raise CacheError(
                "attention_mask",
                expected="the same marks as before for the tokens in the cache",
                got="others",
                fix="A token stays padding, or stays real, once it is in the cache. Call reset() to start again.",
            )
        new = real[:, taken:]
        if isinstance(first, int) and bool(new.all()):
            return first
        return (new.cumsum(1) - 1 + first).masked_fill(~new, -1)  # (B, L)

    def _seen_ahead(
        self, window: int | None, positions: Tensor | int, batch_size: int, length: int, device: torch.device
    ) -> Tensor:
        """Bool (B, 1, L, S): which of the keys that the layers of one window will hand out the queries see."""
        ahead, new = self._ahead[window], torch.zeros(batch_size, 1, length, 1, device=device)
        keys, _ = ahead.update(new, new, positions)
        mask, query_positions, key_positions = ahead.seen
        return mask.dense(
            length,
            keys.shape[2],
            batch_size=batch_size,
            num_heads=1,
            query_positions=query_positions,
            key_positions=key_positions,
        )


def _require_rows(held: int, given: int) -> None:
    if held not in (0, given):
        fix = "Make a cache for each batch, or reset() it before the next."
        raise ShapeError("past_key_values", expected=f"a batch of {held} rows", got=str(given), fix=fix)


def _require_used(kind: str, given: dict[str, Any]) -> None:
    """Raise unless the arguments are those of the kind, and within their bounds."""
    used = _ARGUMENTS[kind]
    for name, value in given.items():
        default = _DEFAULTS[name]
        if name not in used and not (type(value) is type(default) and value == default):
            of = " and ".join(repr(each) for each, names in _ARGUMENTS.items() if name in names)
            fix = f"{name} is for {of}."
            raise ArgumentError(name, expected=f"nothing for kind={kind!r}", got=shown(value), fix=fix)
    for name in ("window", "budget"):
        if name in used:
            size(name, given[name])
    if "sinks" in used and size("sinks", given["sinks"], 0) >= given["budget"]:
        raise ArgumentError(
            "sinks",
            expected=f"fewer than budget={given['budget']}, so that the latest tokens have room",
            got=str(given["sinks"]),
        )
    if "recent" in used:
        number("recent", given["recent"], "a share in [0, 1]", is_probability)
    if "max_length" in used and given["max_length"] is not None:
        size("max_length", given["max_length"])


def _served(model: object, kind: str) -> PreTrainedModel:
    """The model of transformers in `model`, which may be wrapped (peft, torch.compile)."""
    found = next((each for each in module("model", model).modules() if isinstance(each, PreTrainedModel)), None)
    if found is None:
        raise DTypeError("model", expected="a model of transformers", got=shown(type(model).__name__))
    config: Any = found.config
    known = (*_SERVED, *_FULL_ONLY) if kind == "full" else _SERVED
    name = config.model_type
    whole = bool(config.is_encoder_decoder) == (name == "t5") and not getattr(config, "add_cross_attention", False)
    if name not in known or not whole:
        reason = f" {name}: {_FULL_ONLY[name]}; kind='full' serves it." if whole and name in _FULL_ONLY else ""
        raise ArgumentError(
            "model",
            expected=f"for kind={kind!r} a decoder of type {', '.join(known)}",
            got=f"{type(found).__name__}, type {name}",
            fix=f"Without past_key_values= generate makes transformers' own cache.{reason}",
        )
    return found


def _windows(config: Any) -> list[int | None]:
    """The sliding window of every layer, or ``None``."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if each == "sliding_attention" else None for each in types]


def _full(served: PreTrainedModel, max_length: int | None) -> Cache:
    # transformers' own choice of the layers that need no more than a window.
    dynamic = DynamicCache(config=served.get_decoder().config).layers
    layers = [FullLayer(max_length) if type(each) is DynamicLayer else each for each in dynamic]
    if any(type(each) not in (FullLayer, DynamicSlidingWindowLayer) for each in layers):
        raise ArgumentError(
            "model",
            expected="layers with attention to all tokens or to a sliding window",
            got=", ".join(sorted({type(each).__name__ for each in layers} - {"FullLayer"})),
        )
    cache = FullCache(layers, max_length)
    return EncoderDecoderCache(cache, DynamicCache()) if served.config.is_encoder_decoder else cache


def _layer_cache(
    window: int | None, budget: int | None, policy: EvictionPolicy, own: int | None, key: Tensor, value: Tensor
) -> Bounded:
    """The cache of a layer with the window `own`: of the last `window` tokens, or of what a policy keeps."""
    shape = key.shape[0], key.shape[1]
    options: dict[str, Any] = {"value_head_dim": value.shape[3], "dtype": key.dtype, "device": key.device}
    if budget is None:
        windows = [each for each in (window, own) if each is not None]
        return SlidingKVCache(*shape, min(windows), key.shape[3], **options)
    if own is None:
        return EvictingKVCache(*shape, budget, key.shape[3], policy=policy, **options)
    if own - 1 <= budget:  # the window is the budget: nothing that it reaches has to go
        return SlidingKVCache(*shape, own, key.shape[3], **options)
    return EvictingKVCache(*shape, budget, key.shape[3], policy=Within(policy, own), **options)


def _require_implementation(kind: str, config: Any) -> None:
    found = config._attn_implementation
    takes = ("clearhead",) if kind == "heavy_hitters" else _IMPLEMENTATIONS
    if found not in takes:
        raise ArgumentError(
            "model",
            expected=f"for kind={kind!r} the attention implementation {' or '.join(map(repr, takes))}",
            got=repr(found),
            fix='Set it with model.set_attn_implementation("clearhead").',
        )


def _of_another_model() -> CacheError:
    return CacheError(
        "past_key_values",
        expected="a cache that was made for this model",
        got="one of another",
        fix="Make it with clearhead.integrations.transformers.cache_for(model, ...).",
    )


def _unreadable() -> Tensor:
    raise CacheError(
        "past_key_values",
        expected="attention 'clearhead', outside of compiled and exported graphs: the keys differ between heads",
        got="a mask of heavy hitters that is read by something else",
        fix='Use model.set_attn_implementation("clearhead") and do not compile the model.',
    )


def _as_implemented(config: Any, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask (B, 1, L, S) in the form that the model's attention implementation takes."""

    def mask_function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return seen[batch, 0, query, key]

    return ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
        batch_size=seen.shape[0],
        q_length=seen.shape[2],
        kv_length=seen.shape[3],
        mask_function=mask_function,
        attention_mask=None,
        allow_is_causal_skip=False,
        dtype=dtype,
        device=seen.device,
        config=config,
    )


def _hook(decoder: nn.Module) -> None:
    """Let caches of this kind take part in the decoder's forward, however many there are."""
    if not any(hook is _before_forward for hook in decoder._forward_pre_hooks.values()):  # pyright: ignore
        decoder.register_forward_pre_hook(_before_forward, with_kwargs=True)
        decoder.register_forward_hook(_after_forward, with_kwargs=True, always_call=True)


def _before_forward(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the mask by that of the cache."""
    names = list(signature(decoder.forward).parameters)
    named = dict(zip(names, args, strict=False)) | kwargs
    cache = named.get("past_key_values")
    tokens = named.get("input_ids") if named.get("inputs_embeds") is None else named["inputs_embeds"]
    if not isinstance(cache, BoundedCache) or tokens is None:  # without tokens: for the model to refuse
        return None
    made = cache.begin(decoder, tokens, named.get("attention_mask"))
    place = names.index("attention_mask")
    if place < len(args):
        return (*args[:place], made, *args[place + 1 :]), kwargs
    return args, kwargs | {"attention_mask": made}


def _after_forward(decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
    for each in (*args, *kwargs.values()):
        if isinstance(each, BoundedCache):
            each.end()
