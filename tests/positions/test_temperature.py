"""Temperatures and positions of several axes, against their formulas and against transformers' own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3 import modeling_ministral3
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from clearhead import MultiHeadAttention, masks
from clearhead.errors import ArgumentError, DTypeError, ShapeError
from clearhead.positions import LogScale, Rotary, Temperature, rotary_from_config
from tests.support.closeness import require_near
from tests.support.randomised import randomised
from tests.support.refusals import Refusal, require_words

B, H, HKV, L, D, E = 2, 6, 3, 7, 16, 42
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
PARTS: dict[str, Callable[[], Any]] = {
    "temperature": lambda: Temperature(0.3, 2, first=1),
    "rotated temperature": lambda: Temperature(0.3, 3, rotary=Rotary(D)),
    "log scale": lambda: LogScale(H, start=0.7, rotary=Rotary(D)),
    "axes": lambda: Rotary(D, axes=[0, 0, 1, 1, 1, 2, 2, 2]),
}


def module_of(part: Any) -> MultiHeadAttention:
    return randomised(MultiHeadAttention(E, H, num_kv_heads=HKV, head_dim=D, position=part))


def states(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(B, H, L, D, dtype=dtype), torch.randn(B, HKV, L, D, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_queries_grow_by_the_formulas(dtype: torch.dtype) -> None:
    q, k = states(dtype)
    at = torch.tensor([[0, 1, 5, 6, 11, 12, 40], [3, 3, 3, 8, 9, 10, 11]])
    steps = torch.tensor([[(p + 2) // 5 for p in row] for row in at.tolist()])
    by_step = 1 + 0.3 * (1 + steps.double()).log()
    weight = torch.randn(H, dtype=torch.float64)
    learnt = LogScale(H)
    learnt.weight.data = weight.float()
    by_log = weight.float().double()[:, None] * (at + 1).double().log()[:, None]
    for part, factors in ((Temperature(0.3, 5, first=2), by_step[:, None]), (learnt, by_log)):
        scaled, same = part(q, k, at)
        assert same is k
        assert scaled.dtype == dtype
        tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(scaled.double(), q.double() * factors[..., None], rtol=tolerance, atol=tolerance)


def test_llama_4_without_rotary_positions() -> None:
    config = transformers.Llama4TextConfig(
        hidden_size=E,
        num_attention_heads=H,
        num_key_value_heads=HKV,
        head_dim=D,
        no_rope_layers=[0, 0],
        num_hidden_layers=2,
        attn_temperature_tuning=True,
        floor_scale=2,
        attn_scale=0.3,
        attn_implementation="eager",
    )
    theirs = randomised(Llama4TextAttention(config, 0))
    ours = MultiHeadAttention(
        E, H, num_kv_heads=HKV, head_dim=D, bias=False, position=Temperature(0.3, 2, first=1), mask=masks.causal()
    )
    names = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
    state = theirs.state_dict()
    ours.load_state_dict({f"{name}.weight": state[f"{other}.weight"] for name, other in names.items()})
    x = torch.randn(B, L, E, requires_grad=True)
    hidden = torch.full((L, L), -torch.inf).triu(1)[None, None]
    expected, _ = theirs(x, None, hidden)
    output = ours(x)
    require_near(output, expected)
    upstream = torch.randn(B, L, E)
    gradients = (torch.autograd.grad((y * upstream).sum(), (x, w)) for y, w in (
        (output, ours.q_proj.weight), (expected, theirs.q_proj.weight)))  # fmt: skip
    for gradient, other in zip(*gradients, strict=True):
        require_near(gradient, other)


def test_ministral_3() -> None:
    q, k = states()
    at = torch.arange(L).expand(B, L)
    scaled, _ = Temperature(0.3, 2)(q, k, 0)
    torch.testing.assert_close(scaled, q * modeling_ministral3.get_llama_4_attn_scale(at, 0.3, 2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_axes_of_vision_models(interleaved: bool) -> None:
    section = [3, 2, 3] if not interleaved else [4, 2, 2]
    stem, module = ("Qwen3VL", modeling_qwen3_vl) if interleaved else ("Qwen2VL", modeling_qwen2_vl)
    rope = ROPE | {"mrope_section": section} | ({"mrope_interleaved": True} if interleaved else {})
    sizes: Any = {"hidden_size": H * D, "num_attention_heads": H, "head_dim": D, "rope_parameters": rope}
    config = getattr(transformers, f"{stem}TextConfig")(**sizes)
    rotary = getattr(module, f"{stem}{'Text' if interleaved else ''}RotaryEmbedding")(config)
    q, k = states()
    positions = torch.randint(0, 50, (3, B, L))
    expected = module.apply_rotary_pos_emb(q, k, *rotary(q, positions))
    ours = rotary_from_config(rope, D)(q, k, positions)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_equal_axes_are_one() -> None:
    q, k = states()
    rotary, at = PARTS["axes"](), torch.randint(0, 50, (B, L))
    torch.testing.assert_close(rotary(q, k, at.expand(3, B, L)), rotary(q, k, at), rtol=0, atol=0)
    torch.testing.assert_close(rotary(q, k, at), Rotary(D)(q, k, at), rtol=0, atol=0)


@pytest.mark.parametrize("name", PARTS)
@torch.no_grad()
def test_a_cache_goes_on_where_it_stopped(name: str) -> None:
    module, x = module_of(PARTS[name]()), torch.randn(B, L, E)
    positions = torch.randint(0, 50, (3, B, L)) if name == "axes" else torch.arange(L)
    cache, outputs = module.make_cache(B, L), []
    for part in (slice(0, 4), slice(4, 5), slice(5, L)):
        outputs.append(module(x[:, part], mask=masks.causal(), cache=cache, positions=positions[..., part]))
    require_near(torch.cat(outputs, 1), module(x, mask=masks.causal(), positions=positions))


@pytest.mark.parametrize("name", ["temperature", "rotated temperature", "log scale"])
@torch.no_grad()
def test_sequences_without_padding(name: str) -> None:
    module = module_of(PARTS[name]())
    items = [torch.randn(length, E) for length in (3, 7, 5)]
    jagged = module(torch.nested.nested_tensor(items, layout=torch.jagged), mask=masks.causal())
    expected = [module(item, mask=masks.causal()) for item in items]
    require_near(jagged.values(), torch.cat(expected))
    lengths = torch.tensor([3, 190, 50])  # long enough that padding is removed
    x = torch.randn(3, 190, E)
    padded = module(x, mask=masks.causal() & masks.lengths(lengths, lengths))
    for row, length, output in zip(x, lengths.tolist(), padded, strict=True):
        require_near(output[:length], module(row[:length], mask=masks.causal()))


def test_a_learnt_scale_learns() -> None:
    module, x = module_of(LogScale(H)), torch.randn(B, L, E)
    module(x, mask=masks.causal()).square().sum().backward()
    assert module.position.weight.grad.abs().min() > 0


Q, K = torch.zeros(2, 6, 5, 8), torch.zeros(2, 3, 5, 8)
THREE = torch.zeros(3, 2, 5, dtype=torch.int64)
AXES = Rotary(8, axes=(0, 0, 1, 2))
REFUSED = [
    ("no growth", lambda: Temperature(0, 2), ArgumentError, "beta", "a finite number > 0", "0."),
    ("no step", lambda: Temperature(0.1, 0), ArgumentError, "period", "an int ≥ 1", "0."),
    ("before", lambda: Temperature(0.1, 2, -1), ArgumentError, "first", "an int ≥ 0", "-1."),
    ("no rotary", lambda: Temperature(0.1, 2, rotary=3), DTypeError, "rotary", "a positions.Rotary, or None", "int."),
    ("no scale", lambda: LogScale(3, 0.0), ArgumentError, "start", "a finite number ≠ 0", "0.0."),
    ("heads", lambda: LogScale(3)(Q, K, 0), ShapeError, "q", "num_heads = 3 heads", "6."),
    (
        "few axes",
        lambda: Rotary(8, axes=(0, 1)),
        ArgumentError,
        "axes",
        "each of the 4 pairs",
        "2 with the axes [0, 1]",
    ),
    ("a gap", lambda: Rotary(8, axes=(0, 0, 2, 2)), ArgumentError, "axes", "every axis", "4 with the axes [0, 2]"),
    ("a word", lambda: Rotary(8, axes="0011"), DTypeError, "axes", "the axis of each", "'0011'."),
    ("two of three", lambda: AXES(Q, K, THREE[:2]), ShapeError, "positions", "or (3, 2, 5), one for e", "(2, 2, 5)."),
    ("one axis", lambda: Rotary(8)(Q, K, THREE), ShapeError, "positions", "one position per token", "(3, 2, 5)."),
    (
        "no part",
        lambda: MultiHeadAttention(12, 3)(torch.zeros(2, 5, 12), positions=THREE),
        ShapeError,
        "positions",
        "(n,) or (B, n)",
        "(3, 2, 5).",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_it_is_refused_in_words(case: Refusal) -> None:
    require_words(case)
