"""`load` on transformers' models, small and random: their numbers from our module with their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import masks
from clearhead.checkpoints import from_transformers, identify, load
from clearhead.errors import CheckpointError
from tests.support.models import VIT
from tests.support.randomised import randomised

from .architectures import CASES, B, L, assert_close, build, marks, token_ids, watching


@pytest.mark.parametrize("source", ["model", "state dict", "attention"])
@torch.no_grad()
def test_bert(source: str) -> None:
    case, name, kept = CASES["bert"], "encoder.layer.1.attention", marks("right")
    bert = case.model()
    seen = case.run(bert, input_ids=token_ids(), attention_mask=kept)
    given: Any = {"model": bert, "state dict": bert.state_dict(), "attention": bert.get_submodule(name)}[source]
    prefix = "" if source == "attention" else name
    finding = identify(given, prefix=prefix)
    assert (finding.naming.name, finding.ignored) == ("bert", ("output.LayerNorm.weight", "output.LayerNorm.bias"))
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
    old_buffers = {"h.1.attn.bias": torch.ones(1, 1, L, L).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    state = gpt2.state_dict() | old_buffers
    for ours in (from_module, load(state, 5, prefix="h.1", scale=from_module.scale).eval()):
        assert_close(ours(seen.x[1][0], mask=masks.causal()), seen.output[1][0])


@pytest.mark.parametrize("qkv_bias", [False, True])
@torch.no_grad()
def test_vit(tmp_path: Path, qkv_bias: bool) -> None:
    vit, name = randomised(build("ViT", VIT | {"qkv_bias": qkv_bias})), "layers.{layer}.attention"
    with watching(vit, name, name, (1,)) as seen:
        vit(pixel_values=torch.randn(B, 3, 12, 12))
    vit.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"  # has other names than the modules
    from_file = load(file, 5, prefix="encoder.layer.1")
    assert str(from_file.loaded_from).startswith("vit: ")
    loaded = (from_file, load(vit, prefix="layers.1.attention"))
    for ours in (*loaded, from_transformers(file, 1, config=vit.config), from_transformers(vit, 1)):
        assert (ours.q_proj.bias is not None, ours.out_proj.bias is not None) == (qkv_bias, True)
        assert_close(ours.eval()(seen.x[1][0]), seen.output[1][0])


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
