"""Models with one setting away from its default: the loaded layer, its record and its steps are the model's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import clearhead
from clearhead import masks
from clearhead.checkpoints import from_transformers, load
from clearhead.errors import ArgumentError
from clearhead.integrations.transformers import register
from clearhead.positions import rotary_from_config
from tests.inspection.small_models import small
from tests.support.closeness import require_near

from .architectures import CASES, Case, L, assert_close, token_ids

_ROPE: dict[str, dict[str, Any]] = {
    "base": {"rope_type": "default", "rope_theta": 50.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 100.0, "original_max_position_embeddings": 8},
    "yarn, lengths alone": {
        **{"rope_type": "yarn", "factor": 8.0, "rope_theta": 100.0, "original_max_position_embeddings": 8},
        **{"beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.3},
    },
    "llama3": {
        **{"rope_type": "llama3", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 8},
        **{"low_freq_factor": 1.5, "high_freq_factor": 3.0},
    },
}
_LLAMA: dict[str, dict[str, Any]] = {
    "wide heads": {"head_dim": 14},
    "narrow heads": {"head_dim": 4},
    "heads from E": {"head_dim": None, "hidden_size": 36},
    "one key/value head": {"num_key_value_heads": 1},
    "as many key/value heads": {"num_key_value_heads": 6},
    "no biases": {"attention_bias": False},
    **{f"rotary, {name}": {"rope_parameters": rope, "max_position_embeddings": 64} for name, rope in _ROPE.items()},
    # The text is longer than the positions in training.
    "rotary, dynamic, two lengths": {
        "rope_parameters": _ROPE["dynamic"] | {"original_max_position_embeddings": 4},
        "max_position_embeddings": 8,
    },
    "rotary, dynamic, long": {"rope_parameters": _ROPE["dynamic"], "max_position_embeddings": 8},
}
_GEMMA2: dict[str, dict[str, Any]] = {
    "scale": {"query_pre_attn_scalar": 3},
    "no softcap": {"attn_logit_softcapping": None},
    "softcap": {"attn_logit_softcapping": 0.4},
    "full, then windows": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "windows first": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "window of one": {"sliding_window": 1},
    "wide heads": {"head_dim": 16},
    "biases": {"attention_bias": True},
}
_QWEN3: dict[str, dict[str, Any]] = {
    "eps": {"rms_norm_eps": 0.3},
    "biases": {"attention_bias": True},
    "full": {"layer_types": ["full_attention"] * 3, "use_sliding_window": False},
    "window": {"sliding_window": 2},
    "wide heads": {"head_dim": 16},
}
_NEOX: dict[str, dict[str, Any]] = {
    "no biases": {"attention_bias": False},
    **{
        f"part {part}": {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": part}}
        for part in (0.5, 1.0)
    },
}
_GPT2: dict[str, dict[str, Any]] = {
    "unscaled": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": False},
    "unscaled, by layer": {"scale_attn_weights": False},
    "scaled": {"scale_attn_by_inverse_layer_idx": False},
    "heads": {"n_head": 7},
}
_BLOOM: dict[str, dict[str, Any]] = {
    f"{heads} heads": {"n_head": heads, "hidden_size": 5 * heads} for heads in (3, 6, 8, 12)
}
_T5: dict[str, dict[str, Any]] = {
    "buckets": {"relative_attention_num_buckets": 12},
    "distance": {"relative_attention_max_distance": 6},
    "wide heads": {"d_kv": 11},
    "heads": {"num_heads": 3},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{name}: {change}": (name, options)
    for name, changes in {
        "llama": _LLAMA, "gemma2": _GEMMA2, "qwen3": _QWEN3, "gpt_neox": _NEOX, "gpt2": _GPT2, "bloom": _BLOOM,
        "t5 encoder": _T5, "t5 decoder": _T5, "mistral": {"no window": {"sliding_window": None}},
        "bert": {"heads": {"num_attention_heads": 7}},
    }.items()
    for change, options in changes.items()
}  # fmt: skip


def case_of(name: str) -> Case:
    case, options = CASES[VARIANTS[name][0]], VARIANTS[name][1]
    return replace(case, options=case.options | options)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_every_layer_and_steps_of_it(name: str) -> None:
    """A whole batch, a second one of another length, and the tokens one after the other with a cache."""
    case = case_of(name)
    model, ids = case.model(), token_ids()
    dynamic = "dynamic" in name
    for length in (L, 5):
        seen = case.run(model, input_ids=ids[:, :length])
        for layer in case.layers:
            ours = case.load(model, layer)
            x, expected = seen.x[layer][0], seen.output[layer][0]
            assert_close(ours(x, mask=case.mask), expected)
            if not case.causal or length == 5 or dynamic:  # whose steps depend on the longest position so far
                continue
            cache = ours.make_cache(len(x), length)
            steps = [ours(part, mask=case.mask, cache=cache) for part in x.split([7, 1, 4, length - 12], 1)]
            assert_close(torch.cat(steps, 1), expected)


@pytest.mark.parametrize(
    "name", ["llama: wide heads", "gemma2: scale", "gemma2: softcap", "gpt2: unscaled", "bloom: 6 heads"]
)
@torch.no_grad()
def test_a_walkthrough_and_a_record_of_a_loaded_layer(name: str) -> None:
    case = case_of(name)
    model = case.model()
    seen = case.run(model, input_ids=token_ids())
    for layer in case.layers:
        ours, x = case.load(model, layer), seen.x[layer][0][:2, :7]
        with clearhead.record(ours, ("rows", "max_logit"), keep="queries_keys") as rec:
            output, weights = ours(x, mask=case.mask, need_weights=True, average_attn_weights=False)
        require_near([rec[""][0].rows, rec.weights(0)], [weights, weights])
        steps = clearhead.walkthrough(ours, x, mask=case.mask)
        require_near(steps["softmax"].tensor, weights)
        require_near(steps.output, output)


# Modules that `load` reads, and whole models after `upgrade`, with a scale of their own.


@pytest.mark.parametrize("scaling", [0.3, 1.0])
@torch.no_grad()
def test_a_scale_of_the_models_own(scaling: float) -> None:
    """In eager attention, PyTorch's and ours, in what is recorded of it, and in a module that is loaded from it."""
    register()
    model, ids = small("llama", head_dim=10), torch.randint(3, 20, (2, 7))
    blocks = [module for module in model.modules() if hasattr(module, "scaling") and hasattr(module, "q_proj")]
    for block in blocks:
        block.scaling = scaling
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True)
    for implementation in ("sdpa", "clearhead"):
        model.set_attn_implementation(implementation)
        with clearhead.record(model, ("rows", "raw_max_logit"), keep="queries_keys") as rec:
            require_near(model(ids).logits, expected.logits)
        for name, weights in zip(rec, expected.attentions, strict=True):
            require_near([rec[name][0].rows, rec.weights(name)], [weights, weights])
    loaded = load(blocks[0], 6)
    assert loaded.scale == pytest.approx(scaling)
    assert (loaded.head_dim, loaded.num_heads, loaded.num_kv_heads) == (10, 6, 2)
    x = torch.randn(2, 5, 24)
    q, k = clearhead.split_heads(blocks[0].q_proj(x), 6), clearhead.split_heads(blocks[0].k_proj(x), 2)
    weights = loaded(x, mask=masks.causal(), need_weights=True, average_attn_weights=False)[1]
    require_near(weights, clearhead.attention_weights(q, k, masks.causal(), scale=scaling))


@pytest.mark.parametrize(
    "settings", [{"scale": 0.4}, {"head_dim": 7}, {"num_kv_heads": 2, "scale": 1.0, "head_dim": 5}]
)
def test_a_module_of_ours_is_loaded_with_its_settings(settings: dict[str, Any]) -> None:
    made = clearhead.MultiHeadAttention(12, 4, **settings).eval()
    loaded, x = load(made), torch.randn(2, 5, 12)
    require_near(loaded(x), made(x))
    assert (loaded.scale, loaded.head_dim, loaded.num_kv_heads) == (made.scale, made.head_dim, made.num_kv_heads)


# Rotary parameters per kind of layer.


def test_rotary_parameters_of_each_kind_of_layer() -> None:
    nested = {"full_attention": _ROPE["yarn"], "sliding_attention": _ROPE["base"]}
    with pytest.raises(ArgumentError, match=r"a dictionary for each of full_attention, sliding_attention"):
        rotary_from_config(nested, 10)
    q, k = torch.randn(1, 2, 9, 10), torch.randn(1, 2, 9, 10)
    for kind, rope in nested.items():
        alone = rotary_from_config(dict(rope), 10, max_position_embeddings=16)
        require_near(rotary_from_config(nested[kind], 10, max_position_embeddings=16)(q, k, 3), alone(q, k, 3))


@pytest.mark.parametrize("name", _ROPE)
@pytest.mark.parametrize("longest", [None, 8, 12])
def test_rotary_embeddings_of_texts_of_other_lengths(name: str, longest: int | None) -> None:
    """What a long text does to the frequencies is over with it."""
    if name == "dynamic" and longest is None:
        longest = 10
    rope = {each: value for each, value in _ROPE[name].items() if each != "factor" or longest is None or name != "yarn"}
    made = rotary_from_config(
        rope | {"factor": 2.0} if "factor" in _ROPE[name] else rope, 6, max_position_embeddings=longest
    )
    for length, start in ((5, 0), (23, 0), (5, 0), (5, 30), (3, 2)):
        q = torch.randn(1, 2, length, 6)
        fresh = rotary_from_config(
            rope | {"factor": 2.0} if "factor" in _ROPE[name] else rope, 6, max_position_embeddings=longest
        )
        require_near(list(made(q, q, start)), list(fresh(q, q, start)))


def test_settings_of_one_layer_are_not_those_of_another() -> None:
    """Two models after one another, whose layers have other settings at equal numbers."""
    cases = [case_of(f"gemma2: {name}") for name in ("full, then windows", "windows first")]
    loaded: list[list[Any]] = []
    for case in (*cases, cases[0]):
        model: nn.Module = case.model()
        loaded.append([from_transformers(model, layer) for layer in range(3)])
    kinds = [[module.mask is None for module in each] for each in loaded]
    assert kinds == [[True, False, False], [False, False, True], [True, False, False]]
