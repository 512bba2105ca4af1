"""Inputs for a model, from the signature of its forward and its configuration."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .known_inputs import KNOWN
from .modalities import IMAGE_TOKENS, MODALITIES
from .sizes import BATCH

__all__ = ["Inputs", "find_inputs", "padded"]

Inputs = dict[str, Any]

#: Attempts per model; the first that eager attention computes is taken.
ATTEMPTS = 40
#: What is given besides text where the model takes it.
OPTIONAL = ("pixel_values", "image_grid_thw", "input_features", "input_values", "bbox", "past_time_features")
_MISMATCH = re.compile(r"tokens:? ?(?:= )?(\d+).*?features:? ?(?:= )?(\d+)", re.IGNORECASE | re.DOTALL)


def find_inputs(model: PreTrainedModel) -> Inputs:
    """The inputs of its model type, or the first that the model computes, all modalities before text alone.

    Raises:
        Exception: that of the first attempt, if none succeeds.
    """
    if model.config.model_type in KNOWN:
        values = KNOWN[model.config.model_type](model.config)
        run(model, values)
        return values
    first: Exception | None = None
    attempts = itertools.chain(itertools.islice(_attempts(model), ATTEMPTS), _text_alone(model))
    for values in attempts:
        try:
            return _with_placeholders(model, values)
        except Exception as error:
            first = first or error
    raise first or TypeError(
        f"no inputs are known for {type(model).__name__}.forward{inspect.signature(model.forward)}"
    )


def padded(inputs: Inputs, side: str) -> Inputs:
    """The same inputs with an attention mask: the second and the third text are shorter. ``side`` may be ``"no"``."""
    more = dict(inputs)
    for name, ids in (("attention_mask", "input_ids"), ("decoder_attention_mask", "decoder_input_ids")):
        if ids in inputs and isinstance(inputs[ids], Tensor):
            more[name] = _padding(side, inputs[ids].shape[1])
    if "decoder_attention_mask" in inputs:  # of both texts
        more["decoder_attention_mask"] = torch.cat(
            [more["attention_mask"], torch.ones_like(inputs["decoder_input_ids"])], 1
        )
    return more


def _padding(side: str, length: int) -> Tensor:
    mask = torch.ones(BATCH, length, dtype=torch.long)
    for item, missing in ((1, 4), (2, 2)):
        if side == "left":
            mask[item, :missing] = 0
        elif side == "right":
            mask[item, length - missing :] = 0
    return mask


def _attempts(model: PreTrainedModel) -> Iterator[Inputs]:
    parameters = inspect.signature(model.forward).parameters
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    text = [name for name in ("input_ids", "decoder_input_ids") if name in parameters]
    others = [name for name in OPTIONAL if name in parameters]
    names = model.main_input_name if isinstance(model.main_input_name, list) else [model.main_input_name]
    main = [name for name in names if name in parameters]
    choices = [required + text + main + others, required + text + main, required + text, required + main]
    for names in dict.fromkeys(tuple(dict.fromkeys(choice)) for choice in choices):
        makers = [MODALITIES.get(name) for name in names]
        if not names or None in makers:
            continue
        yield from _combinations(model.config, names, makers)


def _text_alone(model: PreTrainedModel) -> Iterator[Inputs]:
    """The text, where images and sounds have more candidates than there are attempts."""
    if "input_ids" in inspect.signature(model.forward).parameters:
        yield from _combinations(model.config, ("input_ids",), [MODALITIES["input_ids"]])


def _combinations(config: PreTrainedConfig, names: tuple[str, ...], makers: list[Any]) -> Iterator[Inputs]:
    candidates = [list(make(config)) for make in makers]
    for values in itertools.product(*candidates):
        yield {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _with_placeholders(model: PreTrainedModel, values: Inputs) -> Inputs:
    """Add as many placeholder tokens to the text as the model expects for an image or a sound."""
    try:
        run(model, values)
        return values
    except Exception as error:
        match = _MISMATCH.search(str(error))
        token = _placeholder(model.config, str(error), values)
        if match is None or token is None or "input_ids" not in values:
            raise
    count = -(-int(match[2]) // BATCH)
    values = {**values, "input_ids": _insert(values["input_ids"], token, count)}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inspect.signature(model.forward).parameters:
            values[name] = (values["input_ids"] == token).long()
    run(model, values)
    return values


def _placeholder(config: PreTrainedConfig, message: str, values: Inputs) -> int | None:
    for word, names in IMAGE_TOKENS.items():
        if word in message.lower():
            return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
    return None


def _insert(ids: Tensor, token: int, count: int) -> Tensor:
    block = torch.full((len(ids), count), token)
    return torch.cat([ids[:, :5], block, ids[:, 5:]], dim=1)


@torch.no_grad()
def run(model: PreTrainedModel, values: Inputs) -> Any:
    return model(**values)
