"""Random values for each argument of a model's forward that the loop gives; several candidates where models differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .sizes import BATCH, FIRST_SPECIAL, IMAGE, LENGTH, TARGET

__all__ = ["IMAGE_TOKENS", "MODALITIES", "noise", "token_ids"]

Candidates = Iterator[Any]

#: What the message of a mismatch speaks of, and the fields that name its placeholder token.
IMAGE_TOKENS = {
    "image": ("image_token_id", "image_token_index", "media_placeholder_token_id"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
    "speech": ("audio_token_id", "audio_token_index"),
}


def _parts(config: PreTrainedConfig, *names: str) -> list[Any]:
    found = [getattr(config, name, None) for name in names]
    return [part for part in found if part is not None] + [config]


def _read(configs: list[Any], *names: str, default: Any = None) -> Any:
    for config in configs:
        for name in names:
            value = getattr(config, name, None)
            if value is not None:
                return value
    return default


def _number(value: Any) -> int:
    return int(value[0]) if isinstance(value, (list, tuple)) else int(value)


def token_ids(length: int) -> Callable[[PreTrainedConfig], Candidates]:
    def make(config: PreTrainedConfig) -> Candidates:
        text = config.get_text_config()
        size = _read([text, config], "vocab_size", default=FIRST_SPECIAL)
        size = size if isinstance(size, int) else FIRST_SPECIAL
        generator = torch.Generator().manual_seed(length)
        low = 10 if size > 20 else 0
        yield torch.randint(low, min(size, FIRST_SPECIAL), (BATCH, length), generator=generator)

    return make


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


VISION = ("vision_config", "vision_encoder_config", "vit_config", "image_config", "backbone_config", "vq_config")
AUDIO = ("audio_config", "encoder_config", "audio_encoder_config", "speech_config", "audio_encoder")


def _pixels(config: PreTrainedConfig) -> Candidates:
    configs = _parts(config, *VISION)
    channels = _number(_read(configs, "num_channels", "in_channels", "in_chans", "image_channels", default=3))
    grid = _read(configs, "spatial_merge_size", "merge_size", "spatial_conv_size")
    if grid is not None and _read(configs, "temporal_patch_size") is not None:
        yield _flat_patches(configs, channels)
    size = _read(configs, "image_size", "img_size", "input_size", default=IMAGE)
    height, width = (size[0], size[-1]) if isinstance(size, (list, tuple)) else (_side(size), _side(size))
    yield noise(BATCH, channels, height, width)
    frames = _number(_read(configs, "num_frames", "frames_per_clip", default=1))
    yield noise(BATCH, frames, channels, height, width)
    yield noise(BATCH, channels, 2 * height, 2 * width)
    yield _flat_patches(configs, channels)


def _side(size: Any) -> int:
    if isinstance(size, dict):
        return int(next(iter(size.values())))
    return int(size) if isinstance(size, int) else IMAGE


def _flat_patches(configs: list[Any], channels: int) -> Tensor:
    patch = _number(_read(configs, "patch_size", "spatial_patch_size", default=8))
    frames = _number(_read(configs, "temporal_patch_size", default=1))
    return noise(BATCH * 16, channels * frames * patch * patch)


def _grid(config: PreTrainedConfig) -> Candidates:
    yield torch.tensor([[1, 4, 4]] * BATCH)


def _vision_states(config: PreTrainedConfig) -> Candidates:
    channels = _number(_read([config], "num_channels", "in_channels", "in_chans", default=3))
    yield _flat_patches([config], channels)
    yield noise(BATCH * 16, _number(_read([config], "hidden_size", default=32)))
    yield noise(BATCH, LENGTH, _number(_read([config], "hidden_size", default=32)))


def _features(config: PreTrainedConfig) -> Candidates:
    configs = _parts(config, *AUDIO)
    bins = _number(
        _read(configs, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "n_mels", default=16)
    )
    frames = 2 * _number(_read(configs, "max_source_positions", default=16))
    yield noise(BATCH, bins, frames)
    yield noise(BATCH, frames, bins)
    yield noise(BATCH, 64, bins)
    yield noise(BATCH, bins, 64)
    for width in (80, 128, 160, 64):
        yield noise(BATCH, 64, width)
        yield noise(BATCH, width, frames)


def _samples(config: PreTrainedConfig) -> Candidates:
    yield noise(BATCH, 4000)
    yield noise(BATCH, 1, 4000)
    bins = _number(_read([config], "num_mel_bins", "max_length", default=16))
    yield noise(BATCH, 64, bins)
    yield noise(BATCH, _number(_read([config], "max_length", default=64)), bins)
    yield noise(BATCH, 1, 3840)


def _boxes(config: PreTrainedConfig) -> Candidates:
    corner = torch.randint(0, 30, (BATCH, LENGTH, 2), generator=torch.Generator().manual_seed(1))
    yield torch.cat([corner, corner + 5], dim=-1)


def _videos(config: PreTrainedConfig) -> Candidates:
    configs = _parts(config, *VISION)
    channels = _number(_read(configs, "num_channels", "in_channels", "in_chans", default=3))
    side = _side(_read(configs, "image_size", "img_size", "crop_size", default=IMAGE))
    frames = _number(_read(configs, "num_frames", "frames_per_clip", "tubelet_size", default=2))
    yield noise(BATCH, frames, channels, side, side)


def _states(config: PreTrainedConfig) -> Candidates:
    width = _number(_read([config], "hidden_size", "d_model", default=32))
    yield noise(BATCH, LENGTH, width)


def _queries(config: PreTrainedConfig) -> Candidates:
    width = _number(_read([config], "hidden_size", default=32))
    yield noise(BATCH, 6, width)


def _feature_mask(config: PreTrainedConfig) -> Candidates:
    frames = next(_features(config)).shape[-1]
    yield torch.ones(BATCH, frames, dtype=torch.long)
    yield torch.ones(BATCH, 64, dtype=torch.long)


def _merge_sizes(config: PreTrainedConfig) -> Candidates:
    yield torch.tensor([1] * BATCH)


def _past(config: PreTrainedConfig) -> Candidates:
    length = _number(_read([config], "context_length", default=32))
    lags = max(_read([config], "lags_sequence", default=[0]) or [0])
    channels = _number(_read([config], "num_input_channels", "input_size", default=1))
    yield noise(BATCH, length + lags, channels) if channels > 1 else noise(BATCH, length + lags)


def _past_times(config: PreTrainedConfig) -> Candidates:
    length = _number(_read([config], "context_length", default=32))
    lags = max(_read([config], "lags_sequence", default=[0]) or [0])
    yield noise(BATCH, length + lags, max(1, _number(_read([config], "num_time_features", default=1))))


def _past_mask(config: PreTrainedConfig) -> Candidates:
    yield torch.ones_like(next(_past(config)))


MODALITIES: dict[str, Callable[[PreTrainedConfig], Candidates]] = {
    "input_ids": token_ids(LENGTH),
    "decoder_input_ids": token_ids(TARGET),
    "qformer_input_ids": token_ids(5),
    "pixel_values": _pixels,
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "hidden_states": _vision_states,
    "input_features": _features,
    "input_values": _samples,
    "bbox": _boxes,
    "pixel_values_videos": _videos,
    "inputs_embeds": _states,
    "query_embeds": _queries,
    "input_features_mask": _feature_mask,
    "merge_sizes": _merge_sizes,
    "past_values": _past,
    "past_time_features": _past_times,
    "past_observed_mask": _past_mask,
}
