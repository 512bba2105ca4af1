"""Attention blocks of transformers' models, small and random: their numbers from our module with their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from clearhead import masks
from clearhead.checkpoints import identify, load
from clearhead.errors import CheckpointError
from tests.support.models import encoder_decoder

B, L, H, E = 3, 7, 4, 24
SIZES: dict[str, Any] = {"hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 2, "intermediate_size": 29}
TEXT: dict[str, Any] = SIZES | {"vocab_size": 31, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def built(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower():
                parameter.normal_(std=0.3)
    return model.double().eval()


def run_and_watch(model: nn.Module, *watched: str, **inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Run the model; the first input and output of each of the modules named."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        seen.append((x, output[0] if isinstance(output, tuple) else output))

    hooks = [model.get_submodule(name).register_forward_hook(note, with_kwargs=True) for name in watched]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(watched)
    return seen


def marks() -> Tensor:
    """A tokenizer's attention_mask with right padding."""
    return (torch.arange(L) < torch.tensor([L, 4, 1])[:, None]).long()


@pytest.mark.parametrize("source", ["model", "state dict", "attention"])
def test_bert(source: str) -> None:
    bert = built(transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False))
    name = "encoder.layer.1.attention"
    # BERT adds the input and normalises inside the block; `output.dense` is where attention ends.
    seen = run_and_watch(
        bert, f"{name}.self", f"{name}.output.dense", input_ids=torch.randint(31, (B, L)), attention_mask=marks()
    )
    x, expected = seen[0][0], seen[1][1]
    given: Any = {"model": bert, "state dict": bert.state_dict(), "attention": bert.get_submodule(name)}[source]
    found = identify(given, prefix="" if source == "attention" else name)
    assert (found.naming.name, found.ignored) == ("bert", ("output.LayerNorm.weight", "output.LayerNorm.bias"))
    heads = H if source == "state dict" else None
    ours = load(given, heads, prefix="" if source == "attention" else name).eval()
    assert (ours.num_heads, ours.dropout) == (H, 0.0 if source == "state dict" else 0.1)
    torch.testing.assert_close(ours(x, mask=masks.keep(keys=marks())), expected, atol=1e-10, rtol=0)


def gpt2_and_its_attention(**settings: Any) -> tuple[Any, Tensor, Tensor]:
    config = transformers.GPT2Config(**TEXT | {"hidden_size": E}, n_positions=L, **settings)
    gpt2 = built(transformers.GPT2Model(config))
    ((x, expected),) = run_and_watch(gpt2, "h.1.attn", input_ids=torch.randint(31, (B, L)))
    return gpt2, x, expected


@pytest.mark.parametrize("as_module", [False, True])
def test_gpt2(as_module: bool) -> None:
    gpt2, x, expected = gpt2_and_its_attention()
    ours = load(gpt2, prefix="h.1.attn") if as_module else load(gpt2.state_dict(), H, prefix="h.1")
    assert str(ours.loaded_from).startswith("gpt2: GPT-2 in transformers")
    torch.testing.assert_close(ours.eval()(x, mask=masks.causal()), expected, atol=1e-10, rtol=0)


def test_gpt2_with_a_scale_of_its_own_keeps_it() -> None:
    gpt2, x, expected = gpt2_and_its_attention(scale_attn_by_inverse_layer_idx=True)
    ours = load(gpt2, prefix="h.1")
    assert ours.scale == (E // H) ** -0.5 / 2
    assert "scale: 0.20" in str(ours.loaded_from)
    torch.testing.assert_close(ours(x, mask=masks.causal()), expected, atol=1e-10, rtol=0)
    from_names = load(gpt2.state_dict(), H, prefix="h.1", scale=ours.scale)
    torch.testing.assert_close(from_names(x, mask=masks.causal()), expected, atol=1e-10, rtol=0)


def test_old_gpt2_files_with_their_mask_buffers() -> None:
    state = {"c_attn.weight": torch.randn(E, 3 * E), "c_attn.bias": torch.randn(3 * E)}
    state |= {"c_proj.weight": torch.randn(E, E), "c_proj.bias": torch.randn(E)}
    state |= {"bias": torch.ones(1, 1, L, L).tril(), "masked_bias": torch.tensor(-1e4)}
    found = identify({f"h.0.attn.{key}": value for key, value in state.items()})
    assert (found.naming.name, found.ignored) == ("gpt2", ("bias", "masked_bias"))


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_vit(tmp_path: Path, qkv_bias: bool) -> None:
    config = transformers.ViTConfig(**SIZES, image_size=12, patch_size=4, qkv_bias=qkv_bias)
    vit = built(transformers.ViTModel(config, add_pooling_layer=False))
    name = next(name for name, module in vit.named_modules() if name.endswith("layers.1.attention"))
    ((x, expected),) = run_and_watch(vit, name, pixel_values=torch.randn(B, 3, 12, 12, dtype=torch.float64))
    vit.save_pretrained(tmp_path)
    from_file = load(tmp_path / "model.safetensors", H, prefix="encoder.layer.1")
    assert str(from_file.loaded_from).startswith("vit: ")
    from_module = load(vit, prefix=name)
    for ours in (from_file, from_module):
        assert (ours.q_proj.bias is not None, ours.out_proj.bias is not None) == (qkv_bias, True)
        torch.testing.assert_close(ours.eval()(x), expected, atol=1e-10, rtol=0)


GROUPED = {
    "llama": (transformers.LlamaModel, transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralModel, transformers.MistralConfig, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Model, transformers.Qwen2Config, {}),
}


@pytest.mark.parametrize("family", GROUPED)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_grouped_heads(family: str, num_kv_heads: int) -> None:
    model_class, config_class, extra = GROUPED[family]
    model = built(model_class(config_class(**TEXT, num_key_value_heads=num_kv_heads, **extra)))
    attention = model.get_submodule("layers.1.self_attn")
    ours = load(model.state_dict(), H, prefix="layers.1")
    assert (ours.num_heads, ours.num_kv_heads) == (H, num_kv_heads)
    for mine, its in (("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"), ("out_proj", "o_proj")):
        found, theirs = ours.get_submodule(mine).state_dict(), attention.get_submodule(its).state_dict()
        assert found.keys() == theirs.keys()
        assert all(torch.equal(found[name], theirs[name]) for name in theirs)
    # At position 0 a rotary embedding turns nothing, so that what is left is exactly these weights.
    positions = torch.zeros(B, L, dtype=torch.long)
    causal = torch.full((L, L), float("-inf"), dtype=torch.float64).triu(1).expand(B, 1, L, L)
    ((x, expected),) = run_and_watch(
        model, "layers.1.self_attn", input_ids=torch.randint(31, (B, L)), position_ids=positions, attention_mask=causal
    )
    torch.testing.assert_close(ours(x, mask=masks.causal()), expected, atol=1e-10, rtol=0)


def test_rotary_positions_are_said_not_to_be_applied() -> None:
    model = transformers.LlamaModel(transformers.LlamaConfig(**TEXT, num_key_value_heads=2))
    assert "rotary position embeddings are not applied" in identify(model, prefix="layers.0").naming.description
    assert "rotary position embeddings are not applied" in str(load(model, H, prefix="layers.0").loaded_from)
    assert "rotary" in str(load.__doc__)


def test_norms_of_queries_and_keys_are_refused_by_name() -> None:
    config = transformers.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=E // H)
    model = transformers.Qwen3Model(config)
    with pytest.raises(CheckpointError) as raised:
        load(model, H, prefix="layers.1.self_attn")
    assert "layers.1.self_attn.q_norm.weight (normalises queries or keys" in str(raised.value)
    assert "layers.1.self_attn.k_norm.weight" in str(raised.value)
    assert "checkpoints.from_transformers reads it with its eps" in str(raised.value)


def test_soft_capping_is_refused_by_name() -> None:
    config = transformers.Gemma2Config(**TEXT, num_key_value_heads=2, head_dim=E // H)
    with pytest.raises(CheckpointError, match="attn_logit_softcapping"):
        load(transformers.Gemma2Model(config), H, prefix="layers.1.self_attn")


def test_t5_is_refused_by_name() -> None:
    config = transformers.T5Config(d_model=E, d_kv=6, num_heads=H, num_layers=2, d_ff=24, vocab_size=31)
    state = transformers.T5EncoderModel(config).state_dict()
    for layer in (0, 1):
        with pytest.raises(CheckpointError, match="T5: its scores are not scaled and have a relative bias"):
            load(state, H, prefix=f"encoder.block.{layer}.layer.0.SelfAttention")


def test_whisper_whose_keys_have_no_bias() -> None:
    sizes = encoder_decoder(E, H, 1, vocab_size=31, num_mel_bins=5, max_source_positions=L)
    whisper = built(transformers.WhisperModel(transformers.WhisperConfig(**sizes)))
    attention = whisper.get_submodule("encoder.layers.0.self_attn")
    x = torch.randn(B, L, E, dtype=torch.float64)
    ours = load(attention)
    assert ours.num_heads == H
    assert "biases of zeros added: key" in str(ours.loaded_from)
    torch.testing.assert_close(ours(x), attention(x)[0], atol=1e-10, rtol=0)
