"""Attention of transformers' models from their weights and configurations: theirs and ours on the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from clearhead import MultiHeadAttention, MultiHeadLatentAttention, masks
from clearhead.checkpoints import from_transformers
from tests.support.models import VIT

from .architectures import CASES, TYPICAL, Case, assert_close, marks, positions_of, randomised, token_ids, watching


@torch.no_grad()
def compare(case: Case, model: nn.Module) -> None:
    """Every layer on a whole batch."""
    seen = case.run(model, input_ids=token_ids())
    for layer in case.layers:
        ours = case.load(model, layer)
        assert isinstance(ours, MultiHeadLatentAttention if "Deepseek" in case.stem else MultiHeadAttention)
        assert_close(ours(seen.x[layer][0], mask=case.mask), seen.output[layer][0])


@pytest.mark.parametrize("name", CASES)
def test_a_whole_batch(name: str) -> None:
    compare(CASES[name], CASES[name].model())


@pytest.mark.parametrize(("side", "told_by"), [("left", "positions"), ("right", "mask")])
@pytest.mark.parametrize("name", TYPICAL)
@torch.no_grad()
def test_a_padded_batch(name: str, side: str, told_by: str) -> None:
    case, kept = CASES[name], marks(side)
    model, real = case.model(), kept.bool()
    told = {"position_ids": positions_of(kept).clamp(min=0)} if case.takes_positions else {}
    seen = case.run(model, input_ids=token_ids(), attention_mask=kept, **told)
    for layer in case.layers:
        ours, x = case.load(model, layer), seen.x[layer][0]
        if told_by == "positions":
            x = x.masked_fill(~real[..., None], torch.nan)  # whatever stands in padding
            output = ours(x, mask=case.mask, positions=positions_of(kept))
        else:
            keys = masks.keep(keys=kept)
            output = ours(x, mask=keys if case.mask is None else keys & case.mask)
        assert_close(output[real], seen.output[layer][0][real])


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss"])
def test_alternating_layers_differ_in_their_window_alone(name: str) -> None:
    model = CASES[name].model()
    own = [from_transformers(model, layer).mask for layer in range(3)]
    assert [mask and mask.describe() for mask in own] == ["sliding_window(3, 0)", None, "sliding_window(3, 0)"]


@pytest.mark.parametrize("qkv_bias", [False, True])
@torch.no_grad()
def test_vit(qkv_bias: bool) -> None:
    config = transformers.ViTConfig(**VIT, qkv_bias=qkv_bias, attn_implementation="eager")
    model, name = randomised(transformers.ViTModel(config, add_pooling_layer=False)), "layers.{layer}.attention"
    with watching(model, name, name, (0, 1)) as seen:
        model(pixel_values=torch.randn(3, 3, 12, 12))
    for layer in (0, 1):
        ours = from_transformers(model, layer)
        assert (ours.q_proj.bias is not None, ours.out_proj.bias is not None) == (qkv_bias, True)
        assert_close(ours(seen.x[layer][0]), seen.output[layer][0])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        # Dynamic scaling is measured against the longest context of the configuration, here less than the batch's.
        (
            "llama",
            {
                "max_position_embeddings": 7,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
            },
        ),
        *(("gpt2", {"scale_attn_weights": on, "scale_attn_by_inverse_layer_idx": on}) for on in (False, True)),
        ("gpt2", {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}),
        *(("bloom", {"hidden_size": 56, "n_head": heads}) for heads in (1, 2, 7, 8)),
    ],
    ids=str,
)
def test_other_settings(name: str, settings: dict[str, Any]) -> None:
    case = CASES[name]
    compare(case, Case(case.stem, case.options | settings, case.x, case.output).model())
