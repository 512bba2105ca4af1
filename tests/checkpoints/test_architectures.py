"""Attention of transformers' models from their weights and configurations: theirs and ours on the same inputs."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from clearhead import MultiHeadAttention, masks
from clearhead._latent import MultiHeadLatentAttention
from clearhead.checkpoints import from_transformers
from tests.support.models import VIT

from .architectures import CASES, Case, Seen, assert_close, marks, positions_of, randomised, token_ids, watching


def run(case: Case, model: nn.Module, **inputs: Tensor) -> Seen:
    with watching(model, case.x, case.output, case.layers) as seen:
        model(**inputs)
    return seen


def compare(case: Case, model: nn.Module) -> None:
    """Every layer on a whole batch."""
    seen = run(case, model, input_ids=token_ids())
    for layer in case.layers:
        ours = from_transformers(model, layer)
        assert isinstance(ours, MultiHeadLatentAttention if "Deepseek" in type(model).__name__ else MultiHeadAttention)
        with torch.no_grad():
            assert_close(ours(seen.x[layer][0], mask=case.mask), seen.output[layer][0])


@pytest.mark.parametrize("name", CASES)
def test_a_whole_batch(name: str) -> None:
    compare(CASES[name], CASES[name].model())


@pytest.mark.parametrize("told_by", ["positions", "mask"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CASES)
def test_a_padded_batch(name: str, side: str, told_by: str) -> None:
    case, kept = CASES[name], marks(side)
    model = case.model()
    told = {"position_ids": positions_of(kept).clamp(min=0)} if case.takes_positions else {}
    seen = run(case, model, input_ids=token_ids(), attention_mask=kept, **told)
    real = kept.bool()
    for layer in case.layers:
        ours, x = from_transformers(model, layer), seen.x[layer][0]
        with torch.no_grad():
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
    described = [
        None if (mask := from_transformers(model, layer).mask) is None else mask.describe() for layer in range(3)
    ]
    assert described == ["sliding_window(3, 0)", None, "sliding_window(3, 0)"]


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_vit(qkv_bias: bool) -> None:
    config = transformers.ViTConfig(**VIT, qkv_bias=qkv_bias, attn_implementation="eager")
    model, name = randomised(transformers.ViTModel(config, add_pooling_layer=False)), "layers.{layer}.attention"
    with watching(model, name, name, (0, 1)) as seen:
        model(pixel_values=torch.randn(3, 3, 12, 12))
    for layer in (0, 1):
        ours = from_transformers(model, layer)
        assert (ours.q_proj.bias is not None, ours.out_proj.bias is not None) == (qkv_bias, True)
        with torch.no_grad():
            assert_close(ours(seen.x[layer][0]), seen.output[layer][0])


def test_scaling_that_follows_the_length() -> None:
    """Dynamic scaling is measured against the longest context of the configuration, here less than the batch's."""
    config = CASES["llama"].build().config
    config.max_position_embeddings = 7
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    compare(CASES["llama"], randomised(transformers.LlamaModel(config)))


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("by_layer", [True, False])
def test_every_scale_of_gpt2(scaled: bool, by_layer: bool) -> None:
    config = CASES["gpt2"].build().config
    config.update({"scale_attn_weights": scaled, "scale_attn_by_inverse_layer_idx": by_layer})
    compare(CASES["gpt2"], randomised(transformers.GPT2Model(config)))


@pytest.mark.parametrize("num_heads", [1, 2, 4, 7, 8])
def test_bloom_with_any_number_of_heads(num_heads: int) -> None:
    config = transformers.BloomConfig(
        vocab_size=31, hidden_size=56, n_head=num_heads, n_layer=2, attn_implementation="eager"
    )
    compare(CASES["bloom"], randomised(transformers.BloomModel(config)))
