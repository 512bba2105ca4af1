"""Inputs of models of sounds, series and codes whose forward takes what no other does, by model type."""

from __future__ import annotations

from typing import Any

import torch

from .common_inputs import Make, ones, text
from .modalities import noise
from .sizes import BATCH, LENGTH

__all__ = ["SOUNDS"]


def _sequence(width: str = "hidden_size", name: str = "hidden_states") -> Make:
    return lambda config: {name: noise(BATCH, LENGTH, getattr(config, width))}


def _codes(config: Any) -> dict[str, Any]:
    """A decoder of several codebooks: each row of the ids is one codebook of one item."""
    return {"input_ids": torch.randint(0, 90, (BATCH * config.num_codebooks, LENGTH), generator=_generator())}


def _channels(count: str) -> Make:
    """(B, L, C) ids, one for each codebook of a token."""
    return lambda config: {
        "input_ids": torch.randint(0, 90, (BATCH, LENGTH, getattr(config, count)), generator=_generator())
    }


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _trajectory(config: Any) -> dict[str, Any]:
    return {
        "states": noise(BATCH, 5, config.state_dim),
        "actions": noise(BATCH, 5, config.act_dim),
        "rewards": noise(BATCH, 5, 1),
        "returns_to_go": noise(BATCH, 5, 1),
        "timesteps": torch.arange(5).expand(BATCH, -1),
        "attention_mask": ones(BATCH, 5),
    }


def _dit(config: Any) -> dict[str, Any]:
    return {
        "hidden_states": noise(BATCH, 8, config.mel_dim),
        "condition_vector": noise(BATCH, 12, config.mel_dim),
        "speaker_embedding": noise(BATCH, 8, config.enc_emb_dim),
        "quantized_code": torch.arange(4).expand(BATCH, -1),
        "time_step": torch.tensor(0.3),
        "apply_cfg": False,
    }


def _series(config: Any) -> dict[str, Any]:
    return {
        "past_values": noise(BATCH, config.context_length),
        "past_values_padding": torch.zeros(BATCH, config.context_length, dtype=torch.long),
        "freq": torch.zeros(BATCH, 1, dtype=torch.long),
    }


def _omni_audio(config: Any) -> dict[str, Any]:
    lengths = torch.tensor([32, 20, 26])
    return {"input_features": noise(config.num_mel_bins, int(lengths.sum())), "feature_lens": lengths}


SOUNDS: dict[str, Make] = {
    "audioflamingo3_encoder": lambda c: {
        "input_features": noise(BATCH, c.num_mel_bins, 2 * c.max_source_positions),
        "input_features_mask": torch.tensor([[1] * 64, [1] * 40 + [0] * 24, [1] * 50 + [0] * 14]),
    },
    "clap": lambda c: {"input_ids": text(c), "input_features": noise(BATCH, 1, 64, c.audio_config.num_mel_bins)},
    "clap_audio_model": lambda c: {"input_features": noise(BATCH, 1, 64, c.num_mel_bins)},
    "decision_transformer": _trajectory,
    "dia_decoder": lambda c: {
        **_channels("num_channels")(c),
        "encoder_hidden_states": noise(BATCH, 9, c.cross_hidden_size),
    },
    "dots3_note_audio_encoder": lambda c: {
        "input_features": noise(BATCH, c.feature_size, 64),
        "chunk_sample_lengths": torch.tensor([64, 40, 50]) * c.hop_length,
    },
    "fun_asr_nano_encoder": lambda c: {
        "input_features": noise(BATCH, 20, c.input_size),
        "input_features_mask": torch.tensor([[1] * 20, [1] * 12 + [0] * 8, [1] * 15 + [0] * 5]),
    },
    "gemma3n_audio": lambda c: {
        "audio_mel": noise(BATCH, 64, c.input_feat_size),
        "audio_mel_mask": torch.arange(64) >= torch.tensor([[64], [40], [50]]),
    },
    "granite_speech_encoder": _sequence("input_dim"),
    "granite_speech_plus_encoder": _sequence("input_dim"),
    "inkling_audio": lambda c: {"audio_input_ids": torch.randint(0, c.mel_vocab_size, (BATCH, 5, c.n_mel_bins))},
    "kyutai_speech_to_text": lambda c: {
        "input_ids": torch.randint(0, 90, (BATCH, LENGTH, c.num_codebooks + 1), generator=_generator())
    },
    "mimi_decoder": lambda c: {"latents": noise(BATCH, c.hidden_size, 9)},
    "moshi_depth": lambda c: {
        "input_ids": torch.randint(0, 90, (BATCH, c.num_codebooks), generator=_generator()),
        "last_hidden_state": noise(BATCH, 1, c.input_size),
    },
    "muse_spark_audio": lambda c: {"input_values": noise(BATCH, 3840)},
    "musicgen_decoder": _codes,
    "musicgen_melody_decoder": _codes,
    "neucodec": lambda c: {"input_values": noise(BATCH, 1, 3200), "input_features": noise(BATCH, 10, 160)},
    "patchtsmixer": lambda c: {"past_values": noise(BATCH, c.context_length, c.num_input_channels)},
    "patchtst": lambda c: {"past_values": noise(BATCH, c.context_length, c.num_input_channels)},
    "phi4_multimodal_audio": lambda c: {"hidden_states": noise(BATCH, 64, c.input_size), "mask": None},
    "pocket_tts_audio_tokenizer_decoder": lambda c: {"latents": noise(BATCH, c.latent_dim, 9)},
    "qwen2_5_omni_audio_encoder": _omni_audio,
    "qwen2_5_omni_dit": _dit,
    "qwen3_omni_moe_audio_encoder": _omni_audio,
    "speech-encoder-decoder": lambda c: {"input_values": noise(BATCH, 4000), "decoder_input_ids": text(c.decoder, 7)},
    "timesfm": _series,
    "voxtral_realtime": lambda c: {"input_ids": text(c), "input_features": noise(BATCH, 16, 8 * LENGTH)},
    "xcodec2": lambda c: {"input_values": noise(BATCH, 1, 3200), "input_features": noise(BATCH, 10, 160)},
    "xcodec": lambda c: {"input_values": noise(BATCH, 1, 4000)},
}
