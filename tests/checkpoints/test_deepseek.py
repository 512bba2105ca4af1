"""What is read of DeepSeek's latent attention, besides what the tests of all architectures compare."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from clearhead import MultiHeadLatentAttention
from clearhead.checkpoints import from_transformers

from .architectures import DEEPSEEK, deepseek


def test_what_was_read_is_told() -> None:
    ours = from_transformers(deepseek("yarn"), 1)
    for part in ("deepseek_v3", "'layers.1.self_attn.'", "kv_b_proj.weight", "YarnScaling"):
        assert part in str(ours.loaded_from)
    assert ours.dropout == 0.0
    assert from_transformers(deepseek("halves, biases"), 0).dropout == 0.1


def test_yarns_factor_may_follow_from_the_lengths() -> None:
    """DeepSeek's own files leave it out now and then; 64 / 16 positions make a factor of 4."""
    model = deepseek("low-rank queries")

    def scale(rope: dict[str, Any]) -> float | None:
        ours = from_transformers(
            model, 0, config=SimpleNamespace(**(model.config.to_dict() | {"rope_parameters": rope}))
        )
        assert isinstance(ours, MultiHeadLatentAttention)
        return ours.scale

    told = DEEPSEEK["yarn"]["rope_parameters"] | {"factor": 4.0}
    left_out = {name: value for name, value in told.items() if name != "factor"}
    assert scale(left_out) == scale(told) > 13**-0.5
