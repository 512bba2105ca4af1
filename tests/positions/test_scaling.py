"""Every scaling against its formula in plain numbers, and the whole embedding against transformers' models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, GPTNeoXConfig, GptOssConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

from clearhead.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Scaling,
    YarnScaling,
    rotary_from_config,
)
from tests.support.positions_oracle import frequency, turn

BATCH, HEADS, KV_HEADS, HEAD_DIM = 3, 10, 5, 22
MAXIMUM = 61  # max_position_embeddings

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "large base": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 601},
    "yarn as in gpt-oss": {
        **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "yarn as in DeepSeek": {
        **{"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "yarn, attention factor": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 211, "attention_factor": 0.77},
    },
    "yarn, short original": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 5},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 211, "rope_theta": 500000.0},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
}


def llama_config(name: str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAXIMUM,
        rope_parameters={"rope_theta": 10000.0, **SETTINGS[name]},
    )


def from_config(config: Any, head_dim: int = HEAD_DIM, **options: Any) -> Rotary:
    return rotary_from_config(
        config.rope_parameters, head_dim, max_position_embeddings=config.max_position_embeddings, **options
    )


def states(length: int, head_dim: int = HEAD_DIM, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    q = torch.randn(BATCH, HEADS, length, head_dim, dtype=dtype)
    return q, torch.randn(BATCH, KV_HEADS, length, head_dim, dtype=dtype)


def require_close(turned: tuple[Tensor, ...], expected: tuple[Tensor, ...], atol: float = 1e-6) -> None:
    torch.testing.assert_close(turned, expected, rtol=0, atol=atol)


#: At 30,011 an error in the last bit of a frequency is an angle of 1e-3.
STARTS = [(name, start) for name in SETTINGS for start in (0, 37)]
STARTS += [(name, 30_011) for name in ("default", "large base", "linear", "dynamic")]


@pytest.mark.parametrize(("name", "start"), STARTS)
def test_queries_and_keys_are_rotated_as_in_llama(name: str, start: int) -> None:
    config = llama_config(name)
    q, k = states(13)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, torch.arange(start, start + 13).expand(BATCH, -1))
    require_close(from_config(config)(q, k, start), llama.apply_rotary_pos_emb(q, k, cos, sin))


@pytest.fixture(name="in_float64")
def _in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers computes in float32, in float64."""
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)


@pytest.mark.parametrize("name", [name for name, settings in SETTINGS.items() if settings["rope_type"] != "default"])
@pytest.mark.usefixtures("in_float64")
def test_frequencies_agree_with_transformers_in_float64(name: str) -> None:
    config = llama_config(name)
    reached = 7 * MAXIMUM
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[SETTINGS[name]["rope_type"]](config, seq_len=reached)
    assert frequencies.dtype == torch.float64
    q, k = states(1, dtype=torch.float64)
    positions = torch.full((BATCH, 1), reached - 1)
    expected = magnitude * turn(q, positions, frequencies.tolist())
    turned, _ = from_config(config)(q, k, positions)
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-12)


def test_partial_rotary_as_in_gpt_neox() -> None:
    config = GPTNeoXConfig(hidden_size=HEADS * 40, num_attention_heads=HEADS, rope_parameters={"rope_type": "default"})
    config.rope_parameters |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    q, k = states(13, 40)
    positions = torch.arange(29, 42).expand(BATCH, -1)
    rotary = from_config(config, 40)
    assert rotary.size == 10
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(q, positions)
    require_close(rotary(q, k, positions), neox.apply_rotary_pos_emb(q, k, cos, sin))


def test_interleaved_pairs_as_in_gpt_j() -> None:
    q, k = states(13)
    sin, cos = gptj.create_sinusoidal_positions(13, HEAD_DIM).expand(BATCH, -1, -1).chunk(2, -1)
    expected = tuple(gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2) for x in (q, k))
    require_close(Rotary(HEAD_DIM, interleaved=True)(q, k, 0), expected)


def test_gpt_oss() -> None:
    config = GptOssConfig(head_dim=HEAD_DIM)
    q, k = states(13)
    positions = torch.arange(29, 42).expand(BATCH, -1)
    rotary = from_config(config)
    assert rotary.scaling == YarnScaling(32.0, 4096, truncate=False)
    cos, sin = gpt_oss.GptOssRotaryEmbedding(config)(q, positions)
    require_close(rotary(q, k, positions), gpt_oss.apply_rotary_pos_emb(q, k, cos, sin))


def test_interleaved_scores_as_in_deepseek() -> None:
    # DeepSeek also reorders features, the same way in q and k, so scores are compared.
    config = DeepseekV3Config(rope_parameters={"rope_theta": 10000.0, **SETTINGS["yarn as in DeepSeek"]})
    q, k = states(13, config.qk_rope_head_dim)
    positions = torch.arange(29, 42).expand(BATCH, -1)
    cos, sin = deepseek.DeepseekV3RotaryEmbedding(config)(q, positions)
    theirs_q, theirs_k = deepseek.apply_rotary_pos_emb_interleave(q, k, cos, sin)
    ours_q, ours_k = from_config(config, config.qk_rope_head_dim, interleaved=True)(q, k, positions)
    expected = theirs_q[:, :KV_HEADS] @ theirs_k.transpose(-2, -1)
    torch.testing.assert_close(ours_q[:, :KV_HEADS] @ ours_k.transpose(-2, -1), expected, rtol=0, atol=1e-5)


def plain(i: int, size: int = HEAD_DIM, base: float = 10000.0) -> float:
    return frequency(base, size, i)


def yarn(i: int) -> float:
    """Factor 4 and 601 positions: pairs that turn more than 32 times stay, fewer than once are squeezed."""

    def pair(turns: float) -> float:
        return HEAD_DIM * math.log(601 / (2 * math.pi * turns)) / (2 * math.log(10000.0))

    first, last = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), HEAD_DIM - 1)
    share = min(max((i - first) / (last - first), 0), 1)
    return plain(i) * (1 - share) + plain(i) / 4 * share


def llama3(i: int) -> float:
    turns = 211 * plain(i) / (2 * math.pi)
    if turns > 4:
        return plain(i)
    if turns < 1:
        return plain(i) / 8
    smooth = (turns - 1) / 3
    return (1 - smooth) * plain(i) / 8 + smooth * plain(i)


FORMULAS = {
    "linear": (LinearScaling(3.0), lambda i: plain(i) / 3, 1.0),
    "yarn": (YarnScaling(4.0, 601), yarn, 0.1 * math.log(4) + 1),
    "llama3": (Llama3Scaling(8.0, 211), llama3, 1.0),
    "dynamic, within the original length": (DynamicNTKScaling(2.0, 90), plain, 1.0),
    "dynamic, beyond it": (
        DynamicNTKScaling(2.0, 25),
        lambda i: frequency(10000.0 * (2 * 75 / 25 - 1) ** (HEAD_DIM / (HEAD_DIM - 2)), HEAD_DIM, i),
        1.0,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formulas(name: str) -> None:
    scaling, formula, magnitude = FORMULAS[name]
    positions = torch.arange(75).expand(BATCH, -1)  # the longest makes a length of 75
    q, k = states(75, dtype=torch.float64)
    frequencies = [formula(i) for i in range(HEAD_DIM // 2)]
    expected = tuple(magnitude * turn(x, positions, frequencies) for x in (q, k))
    require_close(Rotary(HEAD_DIM, scaling=scaling)(q, k, positions), expected, atol=1e-12)


def test_a_factor_of_one_changes_nothing() -> None:
    q, k = states(13)
    expected = Rotary(HEAD_DIM)(q, k, 5)
    for scaling in (LinearScaling(1), DynamicNTKScaling(1, 18), YarnScaling(1, 5), Llama3Scaling(1, 5)):
        torch.testing.assert_close(Rotary(HEAD_DIM, scaling=scaling)(q, k, 5), expected, rtol=0, atol=1e-6)


def test_dynamic_scaling_follows_the_longest_position_of_the_call() -> None:
    rotary = Rotary(HEAD_DIM, scaling=DynamicNTKScaling(2.0, 11))
    q, k = states(7)
    positions = torch.tensor([[-1, -1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6], [14, 15, 16, 17, 18, 19, 20]])
    together, _ = rotary(q, k, positions)
    alone, _ = rotary(q[1:2], k[1:2], positions[1:2])
    assert not torch.allclose(together[1:2], alone)  # item 1 is turned as item 2's length says
    longest, _ = rotary(q[2:], k[2:], positions[2:])
    torch.testing.assert_close(together[2:], longest)
    within, _ = rotary(q[:2], k[:2], positions[:2])
    torch.testing.assert_close(within, Rotary(HEAD_DIM)(q[:2], k[:2], positions[:2])[0])


def test_a_scaling_of_ones_own() -> None:
    class Frozen(Scaling):
        def frequencies(self, base, size, length, dtype, device):
            return torch.zeros(size // 2, dtype=dtype, device=device)

    q, k = states(7)
    turned, _ = Rotary(HEAD_DIM, scaling=Frozen())(q, k, 100)
    assert torch.equal(turned, q)
