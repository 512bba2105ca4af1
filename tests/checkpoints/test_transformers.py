"""`load` on transformers' models, small and random: their numbers from our module with their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import masks
from clearhead.checkpoints import identify, load
from clearhead.errors import CheckpointError
from tests.support.models import VIT, encoder_decoder

from .architectures import CASES, B, L, assert_close, build, marks, randomised, token_ids, watching


@pytest.mark.parametrize("source", ["model", "state dict", "attention"])
@torch.no_grad()
def test_bert(source: str) -> None:
    case, name, kept = CASES["bert"], "encoder.layer.1.attention", marks("right")
    bert = case.model()
    seen = case.run(bert, input_ids=token_ids(), attention_mask=kept)
    given: Any = {"model": bert, "state dict": bert.state_dict(), "attention": bert.get_submodule(name)}[source]
    prefix = "" if source == "attention" else name
    found = identify(given, prefix=prefix)
    assert (found.naming.name, found.ignored) == ("bert", ("output.LayerNorm.weight", "output.LayerNorm.bias"))
    ours = load(given, 5 if source == "state dict" else None, prefix=prefix).eval()
    assert (ours.num_heads, ours.dropout) == (5, 0.0 if source == "state dict" else 0.1)
    assert_close(ours(seen.x[1][0], mask=masks.keep(keys=kept)), seen.output[1][0])


@pytest.mark.parametrize("by_layer", [False, True])
@torch.no_grad()
def test_gpt2(by_layer: bool) -> None:
    """A scale of its own comes with the module; the names of the weights do not show it."""
    case = CASES["gpt2"]
    gpt2 = randomised(build("GPT2", case.options | {"scale_attn_by_inverse_layer_idx": by_layer}))
    seen = case.run(gpt2, input_ids=token_ids())
    from_module = load(gpt2, prefix="h.1.attn")
    assert from_module.scale == (7**-0.5 / 2 if by_layer else None)
    assert str(from_module.loaded_from).startswith("gpt2: GPT-2 in transformers")
    assert ("scale: 0.18" in str(from_module.loaded_from)) == by_layer
    for ours in (from_module, load(gpt2.state_dict(), 5, prefix="h.1", scale=from_module.scale).eval()):
        assert_close(ours(seen.x[1][0], mask=masks.causal()), seen.output[1][0])


def test_old_gpt2_files_with_their_mask_buffers() -> None:
    state = {"c_attn.weight": torch.randn(24, 72), "c_attn.bias": torch.randn(72)}
    state |= {"c_proj.weight": torch.randn(24, 24), "c_proj.bias": torch.randn(24)}
    state |= {"bias": torch.ones(1, 1, L, L).tril(), "masked_bias": torch.tensor(-1e4)}
    found = identify({f"h.0.attn.{key}": value for key, value in state.items()})
    assert (found.naming.name, found.ignored) == ("gpt2", ("bias", "masked_bias"))


@pytest.mark.parametrize("qkv_bias", [False, True])
@torch.no_grad()
def test_vit(tmp_path: Path, qkv_bias: bool) -> None:
    vit, name = randomised(build("ViT", VIT | {"qkv_bias": qkv_bias})), "layers.{layer}.attention"
    with watching(vit, name, name, (1,)) as seen:
        vit(pixel_values=torch.randn(B, 3, 12, 12))
    vit.save_pretrained(tmp_path)
    from_file = load(tmp_path / "model.safetensors", 5, prefix="encoder.layer.1")
    assert str(from_file.loaded_from).startswith("vit: ")
    for ours in (from_file.eval(), load(vit, prefix="layers.1.attention")):
        assert (ours.q_proj.bias is not None, ours.out_proj.bias is not None) == (qkv_bias, True)
        assert_close(ours(seen.x[1][0]), seen.output[1][0])


@pytest.mark.parametrize(("stem", "num_kv_heads"), [("Llama", 1), ("Mistral", 2), ("Qwen2", 6)])
@torch.no_grad()
def test_grouped_heads_whose_rotary_positions_are_said_not_to_be_applied(stem: str, num_kv_heads: int) -> None:
    case = CASES["mistral"]
    options = case.options | {"num_key_value_heads": num_kv_heads, "hidden_size": 60, "sliding_window": None}
    model = randomised(build(stem, options))
    # At position 0 a rotary embedding turns nothing, so that what is left is exactly these weights.
    causal = torch.full((L, L), float("-inf")).triu(1).expand(B, 1, L, L)
    positions = torch.zeros(B, L, dtype=torch.long)
    seen = case.run(model, input_ids=token_ids(), position_ids=positions, attention_mask=causal)
    ours = load(model.state_dict(), 6, prefix="layers.1")
    assert (ours.num_heads, ours.num_kv_heads) == (6, num_kv_heads)
    assert "rotary position embeddings are not applied" in str(ours.loaded_from)
    assert_close(ours(seen.x[1][0], mask=masks.causal()), seen.output[1][0])


@pytest.mark.parametrize(
    ("name", "prefix", "text"),
    [
        ("qwen3", "layers.1.self_attn", r"layers\.1\.self_attn\.q_norm\.weight \(normalises .*with its eps.*k_norm\.w"),
        ("gemma2", "layers.1.self_attn", "attn_logit_softcapping"),
        *(("t5 encoder", f"block.{n}.layer.0.SelfAttention", "T5: its scores are not scaled and have") for n in (0, 1)),
    ],
)
def test_what_weights_do_not_show_is_refused_by_name(name: str, prefix: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        load(CASES[name].build(), 5, prefix=prefix)


@torch.no_grad()
def test_whisper_whose_keys_have_no_bias() -> None:
    sizes = encoder_decoder(24, 4, 1, vocab_size=31, num_mel_bins=5, max_source_positions=L)
    attention = randomised(build("Whisper", sizes)).get_submodule("encoder.layers.0.self_attn")
    x: Tensor = torch.randn(B, L, 24)
    ours = load(attention)
    assert ours.num_heads == 4
    assert "biases of zeros added: key" in str(ours.loaded_from)
    assert_close(ours(x), attention(x)[0])
