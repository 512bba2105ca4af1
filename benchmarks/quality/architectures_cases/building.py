"""A random model of one architecture whose attention matters, and the same model by another route."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configs import small_config
from .types import Architecture

__all__ = ["build", "build_config", "construct", "copy_hidden_buffers", "twin", "with_config"]

#: Standard deviation of a linear layer's output for inputs of variance 1: scores well above 1, so that attention is
#: far from uniform and a lost mask shows.
GAIN = 1.5
#: Where layers are not normalized, or scores not scaled, the same gain makes scores of a thousand, or amplifies
#: rounding beyond what can be compared.
GAINS = {
    "conditional_detr": 0.5,
    "detr": 0.5,
    "dia_encoder": 0.7,
    "mobilebert": 0.5,
    "sam3": 0.7,
    "sam3_lite_text": 0.7,
    "vits": 0.3,
}
MOST_PARAMETERS = 40_000_000


def build_config(architecture: Architecture) -> PreTrainedConfig:
    """The tiny configuration of an architecture."""
    config = small_config(CONFIG_MAPPING[architecture.model_type])
    if architecture.decoder:
        config.is_decoder = True
    return config


def build(architecture: Architecture, draw: int = 0) -> PreTrainedModel:
    """The model with eager attention, in eval mode, with random parameters that depend on its name and the draw alone.

    Raises:
        ValueError: if the configuration is not tiny.
    """
    config = build_config(architecture)
    _check_size(architecture, config)
    torch.manual_seed(zlib.crc32(architecture.name.encode()) + draw)
    model = construct(architecture, config, "eager")
    _randomize(model, GAINS.get(architecture.model_type, GAIN))
    return model


def twin(architecture: Architecture, model: PreTrainedModel, implementation: str | None) -> PreTrainedModel:
    """The same model, constructed with this attention implementation; parameters and buffers are copied."""
    config = build_config(architecture)
    other = construct(architecture, config, implementation)
    other.load_state_dict(model.state_dict())
    copy_hidden_buffers(model, other)
    return other


def _check_size(architecture: Architecture, config: PreTrainedConfig) -> None:
    try:
        with torch.device("meta"):
            model = architecture.model_class(copy.deepcopy(config))
    except Exception:  # some constructors read values, which tensors without storage do not have
        return
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"the smallest configuration known has {size / 1e6:.0f} million parameters")


def with_config(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """A configuration and those inside it, by the names of their fields."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from with_config(value, f"{path}.{name}".lstrip("."))


def construct(architecture: Architecture, config: PreTrainedConfig, implementation: str | None) -> PreTrainedModel:
    """A model in eval mode with parameters that its own code draws."""
    model = architecture.model_class._from_config(copy.deepcopy(config), attn_implementation=implementation)
    return model.float().eval()


@torch.no_grad()
def _randomize(model: nn.Module, gain: float) -> None:
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.dim() > 1:
            fan_in = parameter.numel() // parameter.shape[0]
            parameter.normal_(std=gain / math.sqrt(max(fan_in, 1)))
        elif _is_constant(parameter):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _is_constant(parameter: Tensor) -> bool:
    return parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())


@torch.no_grad()
def copy_hidden_buffers(model: nn.Module, other: nn.Module) -> None:
    """Buffers outside the state dict, some of which are drawn at random."""
    buffers: dict[str, Any] = dict(model.named_buffers())
    for name, buffer in other.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape and buffer.numel() > 1:  # one number is a setting
            buffer.copy_(buffers[name])
