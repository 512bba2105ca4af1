"""Models whose layers select keys with an indexer agree with ``eager`` on both routes, with padding and caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, DynamicCache, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import clearhead
from clearhead.errors import ArgumentError
from clearhead.integrations import transformers as integration

B, T, TOKENS = 2, 13, 31
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MINIMAX = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "num_local_experts": 4,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 16,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
}
#: By type, what the sizes above do not say.
TYPES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "glm_moe_dsa": {},
    "hy_v4": {},
    "axk2": {},
    "dots3_note_text": {},
    "mistral_large4_text": {},
    "minimax_m3_vl_text": MINIMAX,
}


def model_of(name: str) -> Any:
    """A small model of a type, whose indexer leaves out most keys."""
    kind = CONFIG_MAPPING[name]
    fields = kind.__dataclass_fields__
    config: Any = kind(**{key: value for key, value in (SIZES | TYPES[name]).items() if key in fields})
    torch.manual_seed(0)
    model: Any = AutoModel.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def batch(padding: str) -> dict[str, Tensor]:
    tokens = torch.randint(3, TOKENS, (B, T), generator=torch.Generator().manual_seed(1))
    marks = torch.ones(B, T, dtype=torch.long)
    if padding == "left":
        marks[0, :5] = 0
    elif padding == "right":
        marks[0, -5:] = 0
    return {"input_ids": tokens, "attention_mask": marks}


def states_and_gradients(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last hidden states of real tokens, and the gradients of all parameters."""
    model.zero_grad()
    states = model(**inputs).last_hidden_state * inputs["attention_mask"][..., None]
    (states * torch.linspace(-1, 1, states.shape[-1])).square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"states": states.detach(), **gradients}


def require_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(x.abs().max()) for name, x in expected.items() if name != "states")
    for name, x in expected.items():
        scale = float(x.abs().max()) if name == "states" else largest
        assert float((found[name] - x).abs().max()) <= 2e-5 * scale, name


def set_by_name(model: Any) -> None:
    model.set_attn_implementation("clearhead")


def set_by_upgrade(model: Any) -> None:
    assert clearhead.upgrade(model, linears=False).models


@pytest.mark.parametrize("route", [set_by_name, set_by_upgrade])
@pytest.mark.parametrize("name", TYPES)
def test_both_routes_agree_with_eager(name: str, route: Any) -> None:
    model = model_of(name)
    batches = [batch(padding) for padding in ("none", "left", "right")]
    expected = [states_and_gradients(model, each) for each in batches]
    route(model)
    for each, of_eager in zip(batches, expected, strict=True):
        require_close(states_and_gradients(model, each), of_eager)


@torch.no_grad()
@pytest.mark.parametrize("name", TYPES)
def test_the_indexer_matters(name: str) -> None:
    """Otherwise the tests above compare dense attention."""
    model, inputs = model_of(name), batch("none")
    sparse = model(**inputs).last_hidden_state
    for module in model.modules():
        for field in ("index_topk", "topk_blocks"):
            if hasattr(module, field):
                setattr(module, field, 64)
    assert float((model(**inputs).last_hidden_state - sparse).abs().max()) > 1e-2 * float(sparse.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", TYPES)
def test_a_prompt_and_steps_with_a_cache_agree_with_eager(name: str, kind: str, padding: str) -> None:
    model, inputs = model_of(name), batch(padding)

    def steps() -> Tensor:
        cache: Any = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, T + 7)
        tokens, states = inputs["input_ids"], []
        for start, stop in ((0, T - 4), *((n, n + 1) for n in range(T - 4, T))):
            places = torch.arange(start, stop)[None].expand(B, -1)
            marks = inputs["attention_mask"][:, :stop]
            options: dict[str, Any] = {"past_key_values": cache, "position_ids": places, "use_cache": True}
            states.append(model(tokens[:, start:stop], marks, **options).last_hidden_state)
        return torch.cat(states, 1) * inputs["attention_mask"][..., None]

    expected = steps()
    set_by_name(model)
    torch.testing.assert_close(steps(), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl_text"])
def test_bounded_caches_are_refused_with_words(name: str) -> None:
    with pytest.raises(
        ArgumentError, match=r"for kind='full' a decoder of type llama.*whose indexer caches keys of its own"
    ):
        integration.cache_for(model_of(name))


def test_blocks_need_their_size() -> None:
    query = torch.randn(1, 2, 3, 4)
    module, blocks = torch.nn.Module(), torch.zeros(1, 2, 3, 1, dtype=torch.long)
    with pytest.raises(ArgumentError, match=r"block_indices: expected a layer whose config\.index_block_size"):
        integration.attention_forward(module, query, query, query, None, block_indices=blocks)
    indices = torch.full((1, 3, 1), 7)
    with pytest.raises(ArgumentError, match=r"indices or block_indices: .*numbers from 0 to 2 .*got 7"):
        integration.attention_forward(module, query, query, query, None, indices=indices)
