"""A cache of transformers that holds some of the keys, and the masks that a model needs for it.

The cache returns keys, and the model's mask selects those that a query attends to. transformers makes this mask for
consecutive keys. This cache returns other keys. A hook before the decoder's forward therefore replaces the mask. The
new mask is for the keys that the cache will return, in the form of the model's attention implementation. These keys
depend only on the padding. Heavy hitters are the exception: there the mask carries the cache to the attention function
(`Carried`), which passes queries and keys to the cache.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .._checks import shown
from .._torch_private import has_hook
from ..errors import ArgumentError, CacheError, ShapeError, shape_text
from ._cache_layers import BoundedCacheLayer, MakeBounded, not_croppable, require_rows
from ._masks import Carried, carrying

#: Models whose `forward` takes one mask per type of layer.
_MASK_PER_TYPE = ("qwen3", "gemma2", "gpt_oss")
_IMPLEMENTATIONS = ("eager", "sdpa", "clearhead")


@final
class BoundedCache(Cache):
    """A cache whose window or policy chooses the keys that it holds.

    Args:
        kind: the argument of `cache_for`.
        make: makes the cache of a layer.
        windows: the sliding window of each layer, or ``None``.
    """

    layers: list[BoundedCacheLayer]

    def __init__(self, kind: str, make: MakeBounded, windows: list[int | None]) -> None:
        super().__init__(layers=[BoundedCacheLayer(make, window) for window in windows])
        self.kind = kind
        # A window, and a policy that needs no weights, keep the same keys in all layers of one window. A layer with one
        # feature runs ahead of them and finds the keys that they will return.
        self._ahead = {} if kind == "heavy_hitters" else {window: BoundedCacheLayer(make, window) for window in windows}
        self._with_ahead = Cache(layers=[*self.layers, *self._ahead.values()])
        self._expected: tuple[Tensor | int, int] | None = None  # positions of the forward's tokens, and how many

    def __repr__(self) -> str:
        cache = self.layers[0].cache
        content = "empty" if cache is None else f"{cache!r} in the first of {len(self.layers)} layers"
        return f"{type(self).__name__}({self.kind}, {content})"

    def begin(self, decoder: PreTrainedModel, tokens: Tensor, attention_mask: object) -> Tensor | dict[str, Tensor]:
        """Prepare for the tokens of a forward, and return its masks.

        Args:
            decoder: the model that runs.
            tokens: ids (B, L) or embeddings (B, L, E).
            attention_mask: the argument of the model's call.
        """
        config: Any = decoder.config
        require_implementation(self.kind, config)
        batch_size, length = tokens.shape[:2]
        self._require_ready(config, batch_size)
        positions = self._positions(attention_mask, batch_size, length)
        if self._ahead:
            masks = {window: _mask_ahead(decoder, layer, tokens, positions) for window, layer in self._ahead.items()}
        else:
            shape = batch_size, 1, length, 1
            mask = carrying(Carried(None, self), _unreadable, shape, dtype=decoder.dtype, device=tokens.device)
            masks = dict.fromkeys((layer.window for layer in self.layers), mask)
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
            self.layers[layer_idx - 1].evict()  # after its attention
        return self.layers[layer_idx].update(key_states, value_states, expected[0])

    def end(self) -> None:
        """Finish a forward."""
        self._expected = None
        self.layers[-1].evict()

    def reset(self) -> None:
        self._with_ahead.reset()
        self._expected = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._with_ahead.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._with_ahead.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._with_ahead.batch_select_indices(indices)

    def activate_past_recording(self) -> None:
        raise not_croppable("past_key_values")

    def _require_ready(self, config: Any, batch_size: int) -> None:
        if len(self.layers) != config.num_hidden_layers or [layer.window for layer in self.layers] != windows(config):
            raise _of_another_model()
        if len({layer.get_seq_length() for layer in (*self.layers, *self._ahead.values())}) > 1:
            expected, got = "layers that have taken the same tokens", "a cache that an interrupted forward left halfway"
            fix = "reset() it and begin with the prompt."
            raise CacheError("past_key_values", expected=expected, got=got, fix=fix)
        require_rows(self.layers[0].batch_size, batch_size)

    def _positions(self, attention_mask: object, batch_size: int, length: int) -> Tensor | int:
        """The positions of the new tokens in their texts: an int, or (B, L) with −1 for padding."""
        first, cached = self.layers[0].next_positions(), self.get_seq_length()
        if attention_mask is None:
            return first if isinstance(first, int) else first + torch.arange(length, device=first.device)
        shape = batch_size, cached + length
        if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != shape:
            expected = f"the tokenizer's marks of all tokens so far, {shape_text(shape)}"
            fix = "The cache makes the masks of its keys itself."
            raise ShapeError("attention_mask", expected=expected, got=shown(attention_mask), fix=fix)
        real = attention_mask.bool()
        if cached > 0 and bool((real[:, :cached].sum(1, keepdim=True) != first).any()):
            expected = "the same marks as before for the tokens in the cache"
            fix = "A token stays padding, or stays real, once it is in the cache. Call reset() to start again."
            raise CacheError("attention_mask", expected=expected, got="others", fix=fix)
        new = real[:, cached:]
        if isinstance(first, int) and bool(new.all()):
            return first
        return (new.cumsum(1) - 1 + first).masked_fill(~new, -1)  # (B, L)


def _mask_ahead(decoder: PreTrainedModel, ahead: BoundedCacheLayer, tokens: Tensor, positions: Tensor | int) -> Tensor:
    """The mask (B, 1, L, S) of the keys that the layers of one window will return.

    It has the form of the model's attention implementation.
    """
    config: Any = decoder.config
    batch_size, length = tokens.shape[:2]
    feature = torch.zeros(batch_size, 1, length, 1, device=tokens.device)
    keys, _ = ahead.update(feature, feature, positions)
    count = keys.shape[2]
    at: dict[str, Any] = {"query_positions": ahead.query_positions, "key_positions": ahead.key_positions}
    visible = ahead.mask.dense(length, count, batch_size=batch_size, num_heads=1, **at)

    def mask_function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return visible[batch, 0, query, key]

    return ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
        batch_size=batch_size,
        q_length=length,
        kv_length=count,
        mask_function=mask_function,
        attention_mask=None,
        allow_is_causal_skip=False,
        dtype=decoder.dtype,
        device=visible.device,
        config=config,
    )


def windows(config: Any) -> list[int | None]:
    """The sliding window of every layer, or ``None``."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def require_implementation(kind: str, config: Any) -> None:
    implementation = config._attn_implementation
    allowed = ("clearhead",) if kind == "heavy_hitters" else _IMPLEMENTATIONS
    if implementation not in allowed:
        expected = f"for kind={kind!r} the attention implementation {' or '.join(map(repr, allowed))}"
        fix = 'Set it with model.set_attn_implementation("clearhead").'
        raise ArgumentError("model", expected=expected, got=repr(implementation), fix=fix)


def _of_another_model() -> CacheError:
    fix = "Make it with clearhead.integrations.transformers.cache_for(model, ...)."
    expected = "a cache that was made for this model"
    return CacheError("past_key_values", expected=expected, got="one of another", fix=fix)


def _unreadable() -> Tensor:
    expected = "attention 'clearhead', outside of compiled and exported graphs: the keys differ between heads"
    got = "a mask of heavy hitters that is read by something else"
    fix = 'Use model.set_attn_implementation("clearhead") and do not compile the model.'
    raise CacheError("past_key_values", expected=expected, got=got, fix=fix)


def hook(decoder: nn.Module) -> None:
    """Register the forward hooks of all bounded caches at a decoder, once."""
    if not has_hook(decoder, _before_forward):
        decoder.register_forward_pre_hook(_before_forward, with_kwargs=True)
        decoder.register_forward_hook(_after_forward, with_kwargs=True, always_call=True)


def _before_forward(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the mask by the mask of the cache."""
    names = list(signature(decoder.forward).parameters)
    named = dict(zip(names, args, strict=False)) | kwargs
    # By type, because the argument is called past_key_values, and cache since transformers 5.24.
    cache = next((value for value in named.values() if isinstance(value, BoundedCache)), None)
    tokens = named.get("input_ids") if named.get("inputs_embeds") is None else named["inputs_embeds"]
    if cache is None or tokens is None:  # the model refuses a call without tokens
        return None
    mask = cache.begin(decoder, tokens, named.get("attention_mask"))
    index = names.index("attention_mask")
    if index < len(args):
        return (*args[:index], mask, *args[index + 1 :]), kwargs
    return args, kwargs | {"attention_mask": mask}


def _after_forward(decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, BoundedCache):
            argument.end()
