"""What is observed of a model: outputs, weights, cached steps, gradients and what a later token changes."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from .inputs import Inputs, padded
from .sizes import BATCH, FIRST_SPECIAL

__all__ = [
    "CAUSALITY",
    "GENERATION",
    "GRADIENTS",
    "OBSERVATIONS",
    "NotApplicable",
    "Observation",
    "cast",
    "generated",
    "outputs",
]

#: Named tensors, at real tokens only.
Observation = dict[str, Tensor]
CAUSALITY = "causality"
GENERATION = "generation"
#: Tokens that are generated.
NEW_TOKENS = 4
GRADIENTS = "gradients"


class NotApplicable(Exception):
    """The model has nothing of this kind."""


def forward(model: PreTrainedModel, inputs: Inputs, **more: Any) -> Any:
    """One call with every source of random numbers at the same seed."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    return model(**inputs, **more)


def outputs(model: PreTrainedModel, inputs: Inputs, side: str) -> Observation:
    """All floating-point outputs without weights."""
    inputs = _with_padding(inputs, side)
    with torch.no_grad():
        return real_tokens(forward(model, inputs), inputs, side)


def weights(model: PreTrainedModel, inputs: Inputs, side: str) -> Observation:
    """All floating-point outputs of a call that returns the weights too."""
    inputs = _with_padding(inputs, side)
    with torch.no_grad():
        return real_tokens(forward(model, inputs, output_attentions=True), inputs, side)


def cached(
    model: PreTrainedModel, inputs: Inputs, side: str, make_cache: Callable[..., Any] | None = None
) -> Observation:
    """Outputs of each step: a prompt, single tokens one after the other, then several at once."""
    name, mask_name = _text(inputs)
    if mask_name in inputs:
        raise NotApplicable("a canvas, which no cache keeps")
    ids, mask = inputs[name], padded(inputs, side)[mask_name]
    length = ids.shape[1]
    cache = make_cache(model, length) if make_cache else None
    found: Observation = {}
    first = dict(inputs)
    begin = 0
    for end in (length - 5, length - 4, length - 3, length):
        step = {**first, name: ids[:, begin:end], mask_name: mask[:, :end]}
        with torch.no_grad():
            output = forward(model, step, past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        if not isinstance(cache, Cache) and type(cache).__name__ != "EncoderDecoderCache":
            raise NotApplicable("no cache")
        main = next(_floats(output))[1]
        shown = mask[:, begin:end].bool()
        found[f"tokens {begin} to {end}"] = main[shown] if main.shape[:2] == shown.shape else main
        first = _later_inputs(inputs, output)
        begin = end
    return found


def static_cached(model: PreTrainedModel, inputs: Inputs, side: str) -> Observation:
    """The same steps with a static cache, which is longer than what it holds."""
    if "decoder_input_ids" in inputs:
        raise NotApplicable("an encoder and a decoder")
    return cached(model, inputs, side, lambda model, length: StaticCache(config=model.config, max_cache_len=length + 3))


def gradients(model: PreTrainedModel, inputs: Inputs, side: str) -> Observation:
    """Gradients of all parameters for a random combination of the outputs, as one vector."""
    inputs = _with_padding(inputs, side)
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        found = real_tokens(forward(model, inputs), inputs, side)
        terms = [(tensor * _noise_like(name, tensor)).sum() for name, tensor in found.items() if tensor.requires_grad]
        if not terms:
            raise NotApplicable("no gradient")
        torch.stack(terms).sum().backward()
    parts = [
        torch.zeros_like(parameter).flatten() if parameter.grad is None else parameter.grad.flatten()
        for parameter in model.parameters()
        if parameter.is_floating_point()
    ]
    model.zero_grad(set_to_none=True)
    return {GRADIENTS: torch.cat(parts)}


def generated(model: PreTrainedModel) -> Observation:
    """Scores of the tokens that a model generates for texts with padding on the left, greedily."""
    config = model.config.get_text_config()
    ids = torch.randint(
        10, min(config.vocab_size, FIRST_SPECIAL), (BATCH, 7), generator=torch.Generator().manual_seed(7)
    )
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4, [0] + [1] * 6])
    options: dict[str, Any] = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    options |= {"output_scores": True, "return_dict_in_generate": True, "pad_token_id": 0}
    with torch.no_grad():
        found: Any = model.generate(input_ids=ids, attention_mask=mask, **options)
    return {f"token {index}": scores for index, scores in enumerate(found.scores)}


def causality(model: PreTrainedModel, inputs: Inputs, side: str) -> Observation:
    """How much outputs at earlier tokens change, relative to the largest, when one later token is another one."""
    name, _ = _text(inputs)
    ids = inputs[name]
    last = ids.shape[1] - 3
    changed = ids.clone()
    changed[:, last] = torch.where(ids[:, last] == 11, 12, 11)
    with torch.no_grad():
        before = next(_floats(forward(model, inputs)))[1]
        after = next(_floats(forward(model, {**inputs, name: changed})))[1]
    if before.dim() < 3 or before.shape[:2] != ids.shape:
        raise NotApplicable("no output per token")
    difference = (after - before)[:, :last].abs().max() / before.abs().max()
    return {"change": difference.reshape(1)}


def real_tokens(output: Any, inputs: Inputs, side: str) -> Observation:
    """All floating-point tensors of an output where a token is not padding."""
    masks = [inputs[name].bool() for name in ("decoder_attention_mask", "attention_mask") if name in inputs]
    return {name: _select(name, tensor, masks, side) for name, tensor in _floats(output)}


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same inputs with floating-point tensors in another dtype."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _select(name: str, tensor: Tensor, masks: list[Tensor], side: str) -> Tensor:
    for mask in masks:
        if tensor.dim() >= 2 and tensor.shape[:2] == mask.shape:
            return tensor[mask]
        if "attentions" in name and tensor.dim() == 4 and (tensor.shape[0], tensor.shape[2]) == tuple(mask.shape):
            return tensor.transpose(1, 2)[mask]
        if tensor.dim() == 2 and tensor.shape[0] == mask.numel():
            return tensor[mask.flatten()]
    if side == "left" and masks and tensor.dim() >= 2 and tensor.shape[0] == BATCH:
        # What is pooled from the first token is the output at a padding token.
        return tensor[:1]
    return tensor


def _floats(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.numel():
            yield name, output
    elif isinstance(output, dict):
        for key, value in output.items():
            if "past_key_values" not in key:
                yield from _floats(value, f"{name}.{key}" if name else str(key))
    elif isinstance(output, (list, tuple)):
        for index, value in enumerate(output):
            yield from _floats(value, f"{name}[{index}]")


def _with_padding(inputs: Inputs, side: str) -> Inputs:
    more = padded(inputs, side)
    if side and len(more) == len(inputs):
        raise NotApplicable("no text that could be padded")
    return more if side else inputs


def _text(inputs: Inputs) -> tuple[str, str]:
    for name in ("decoder_input_ids", "input_ids"):
        if name in inputs:
            return name, name.replace("input_ids", "attention_mask")
    raise NotApplicable("no text")


def _later_inputs(inputs: Inputs, output: Any) -> Inputs:
    """After the prompt: no images or sounds again, and the encoder's output instead of its input."""
    states = getattr(output, "encoder_last_hidden_state", None)
    if states is None:
        return {}
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=states)}


def _noise_like(name: str, tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


#: By name: what is observed, and which side of the text is padded ("" leaves the attention mask out).
OBSERVATIONS: dict[str, tuple[Callable[..., Observation], str]] = {
    "outputs": (outputs, ""),
    "outputs, left padding": (outputs, "left"),
    "outputs, right padding": (outputs, "right"),
    "weights": (weights, ""),
    "weights, left padding": (weights, "left"),
    "weights, right padding": (weights, "right"),
    "cache": (cached, "no"),
    "cache, left padding": (cached, "left"),
    "static cache, left padding": (static_cached, "left"),
    "gradients": (gradients, ""),
    "gradients, right padding": (gradients, "right"),
    CAUSALITY: (causality, ""),
}
