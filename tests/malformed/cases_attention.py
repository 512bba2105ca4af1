"""Attention and its surroundings: functions, choices of kernels, positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import clearhead
import clearhead.integrations.transformers as integration
from clearhead import masks, positions
from clearhead.nn import functional
from tests.malformed.calls import Call, case

B, H, KV, L, S, D = 2, 6, 3, 5, 7, 4


def qkv() -> dict[str, Tensor]:
    return {"query": torch.randn(B, H, L, D), "key": torch.randn(B, KV, S, D), "value": torch.randn(B, KV, S, D)}


def extras() -> dict[str, Any]:
    given = {"query_positions": torch.arange(L), "key_positions": 0}
    return {"mask": masks.causal(), "scale": 0.5, "softcap": 3.0, "sinks": torch.zeros(H), **given}


case("attention", weight=16)(lambda: Call(clearhead.attention, **qkv(), mask=masks.causal()))
case("attention, a tensor as mask", weight=8)(lambda: Call(clearhead.attention, **qkv(), mask=torch.rand(L, S) < 0.5))
case("attention, everything given", weight=8)(
    lambda: Call(clearhead.attention, **qkv(), **extras(), return_lse=True, dropout_p=0.1)
)
case("attention without a mask", weight=8)(lambda: Call(clearhead.attention, **qkv()))
case("explain")(lambda: Call(clearhead.explain, **qkv(), **extras()))


@case("attention_weights", weight=8)
def _() -> Call:
    given = {**qkv(), **extras(), "queries": [0, 3], "average_attn_weights": True}
    del given["value"]
    return Call(clearhead.attention_weights, **given)


@case("attention_statistics", weight=8)
def _() -> Call:
    options = {
        "statistics": ("entropy", "rows", "top_k", "offset", "map", "extremes"),
        "query_mask": torch.ones(B, L).bool(),
    }
    more = {"queries": [0], "top_k": 2, "map_size": 3, "map_pooling": "max", "sink_keys": 1, "offsets": (-1, 0)}
    return Call(clearhead.attention_statistics, **qkv(), **extras(), **options, **more, per="query_head")


@case("attention_varlen", weight=8)
def _() -> Call:
    ends = {"cu_seqlens_q": torch.tensor([0, 3, 5]), "cu_seqlens_k": torch.tensor([0, 3, 7])}
    tensors = {"query": torch.randn(5, H, D), "key": torch.randn(7, KV, D), "value": torch.randn(7, KV, D)}
    return Call(clearhead.attention_varlen, **tensors, **ends, mask=masks.causal())


case("split_heads")(lambda: Call(clearhead.split_heads, x=torch.randn(B, L, 12), num_heads=3))
case("merge_heads")(lambda: Call(clearhead.merge_heads, x=torch.randn(B, H, L, D)))


def _entered(context: Any) -> None:
    with context:
        pass


case("use_kernel")(lambda: Call(lambda name: _entered(clearhead.use_kernel(name)), name="reference"))
case("use_linear")(lambda: Call(lambda name: _entered(clearhead.use_linear(name)), name="pytorch"))


@case("nn.functional.scaled_dot_product_attention", weight=10)
def _() -> Call:
    given = {"attn_mask": torch.rand(L, S) < 0.5, "dropout_p": 0.0, "is_causal": True, "enable_gqa": True}
    return Call(functional.scaled_dot_product_attention, **qkv(), **given)


@case("integrations.transformers.attention_forward", weight=8, attention_mask="mask")
def _() -> Call:
    given = {"attention_mask": torch.rand(B, 1, L, S) < 0.5, "scaling": 0.5, "dropout": 0.0, "output_attentions": True}
    return Call(integration.attention_forward, module=nn.Linear(2, 2), **qkv(), **given)


@case("integrations.transformers.attention_forward without a mask", weight=4)
def _() -> Call:
    given = {"attention_mask": None, "sliding_window": 3, "is_causal": True, "s_aux": torch.zeros(H)}
    return Call(integration.attention_forward, module=nn.Linear(2, 2), **qkv(), **given)


@case("integrations.transformers.attention_forward, packed", weight=4)
def _() -> Call:
    ends = torch.tensor([0, 2, 5])
    given = {name: torch.randn(1, 3, 5, D) for name in ("query", "key", "value")}
    packed = {"attention_mask": None, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    bias = torch.randn(1, 3, 5, 5)
    return Call(integration.attention_forward, module=nn.Linear(2, 2), **given, **packed, position_bias=bias)


@case("integrations.transformers.make_mask")
def _() -> Call:
    given = {"batch_size": B, "q_length": L, "kv_length": S, "q_offset": 2, "kv_offset": 0, "device": "cpu"}
    return Call(integration.make_mask, **given, allow_is_causal_skip=True)


case("positions.ALiBi")(lambda: Call(lambda num_heads: positions.ALiBi(num_heads).dense(2, 3), num_heads=3))
case("positions.RelativeBias")(
    lambda: Call(positions.RelativeBias, num_heads=3, num_buckets=8, max_distance=16, bidirectional=True)
)
case("positions.Rotary")(
    lambda: Call(
        positions.Rotary,
        **{"head_dim": 8, "base": 100.0, "fraction": 0.5, "interleaved": True},
        scaling=positions.LinearScaling(2.0),
    )
)
case("positions.Temperature", rotary="rotary")(
    lambda: Call(positions.Temperature, beta=0.1, period=3, first=1, rotary=positions.Rotary(4))
)
case("positions.LogScale")(lambda: Call(positions.LogScale, num_heads=H, start=0.5))
case("positions.LogScale.forward", weight=6)(
    lambda: Call(
        positions.LogScale(H), q=torch.randn(B, H, L, D), k=torch.randn(B, KV, L, D), positions=torch.arange(L)
    )
)
case("attention, sinks of queries")(lambda: Call(clearhead.attention, **qkv(), sinks=torch.zeros(B, H, L)))
case("positions.Rotary.forward", weight=6)(
    lambda: Call(positions.Rotary(D), q=torch.randn(B, H, L, D), k=torch.randn(B, KV, L, D), positions=torch.arange(L))
)
case("positions.LinearScaling")(lambda: Call(positions.LinearScaling, factor=2.0))
case("positions.DynamicNTKScaling")(lambda: Call(positions.DynamicNTKScaling, factor=2.0, original_length=16))

LENGTHS = {"factor": 2.0, "original_length": 16}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def _scaled(scaling: Any) -> Any:
    return lambda **given: positions.Rotary(8, scaling=scaling(**given))


case("positions.Llama3Scaling")(
    lambda: Call(_scaled(positions.Llama3Scaling), **LENGTHS, low_freq_factor=1.0, high_freq_factor=4.0)
)
case("positions.YarnScaling")(
    lambda: Call(positions.YarnScaling, **LENGTHS, **BETAS, attention_factor=1.0, truncate=True)
)
case("positions.YarnScaling in Rotary", arguments=(*LENGTHS, *BETAS))(
    lambda: Call(_scaled(positions.YarnScaling), **LENGTHS, **BETAS)
)


@case("positions.rotary_from_config", rope_parameters=("rope_type", "rope_theta", "factor"))
def _() -> Call:
    settings = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    given = {"head_dim": 8, "max_position_embeddings": 32, "interleaved": False}
    return Call(positions.rotary_from_config, rope_parameters=settings, **given)


SETTINGS = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 100.0, "beta_fast": 32.0, "mscale": 1.0}
case("positions.rotary_from_config, its settings", arguments=tuple(SETTINGS))(
    lambda: Call(lambda **given: positions.rotary_from_config(given, 8, max_position_embeddings=32), **SETTINGS)
)


def _encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(12, 3, 8, **options)


case("upgrade")(lambda: Call(clearhead.upgrade, model=_encoder_layer(), attention=True, linears=True, unpad=False))
case("downgrade")(lambda: Call(clearhead.downgrade, model=_encoder_layer()))
case("load_transformer")(lambda: Call(clearhead.transformer.load_transformer, module=_encoder_layer(batch_first=True)))
