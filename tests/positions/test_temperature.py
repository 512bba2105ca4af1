"""Temperatures and positions of several axes, against their formulas and against transformers' own code."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention
from transformers.models.ministral3 import modeling_ministral3
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

import clearhead
from clearhead import MultiHeadAttention, masks
from clearhead.errors import ArgumentError, DTypeError, ShapeError
from clearhead.positions import LogScale, Rotary, Temperature, rotary_from_config
from tests.support.closeness import require_near
from tests.support.randomised import randomised
from tests.support.refusals import Refusal, require_words

B, H, HKV, L, D, E = 2, 6, 3, 7, 16, 42
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
#: A module, its arguments for an input, E, the parts of ours, and the positions of ours.
Pair = tuple[nn.Module, Callable[[Tensor], tuple[Any, ...]], int, dict[str, Any], Tensor | None]
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


HIDDEN = torch.full((L, L), -torch.inf).triu(1)[None, None]
AT = torch.arange(L).expand(B, L)
OF_AXES = torch.randint(0, 50, (3, B, L), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {"num_attention_heads": H, "num_key_value_heads": HKV, "attn_implementation": "eager"}


def _llama_4() -> Pair:
    """A layer without rotary positions."""
    tuned: dict[str, Any] = {"attn_temperature_tuning": True, "floor_scale": 2, "attn_scale": 0.3}
    layers: dict[str, Any] = {"no_rope_layers": [0, 0], "num_hidden_layers": 2}
    config = transformers.Llama4TextConfig(hidden_size=E, head_dim=D, **SIZES, **layers, **tuned)
    ours = {"position": Temperature(0.3, 2, first=1)}
    return Llama4TextAttention(config, 0), lambda x: (x, None, HIDDEN), E, ours, None


def _ministral_3() -> Pair:
    scaled = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 3}
    rope: Any = scaled | {"llama_4_scaling_beta": 0.3}
    config = transformers.Ministral3Config(
        hidden_size=E, head_dim=D, max_position_embeddings=12, rope_parameters=rope, **SIZES
    )
    rotary = modeling_ministral3.Ministral3RotaryEmbedding(config)
    ours = {"position": Temperature(0.3, 3, rotary=rotary_from_config(scaled, D, max_position_embeddings=12))}
    theirs = modeling_ministral3.Ministral3Attention(config, 0)
    return theirs, lambda x: (x, rotary(x, AT), HIDDEN, AT), E, ours, None


def _qwen_2_vl() -> Pair:
    rope: Any = ROPE | {"mrope_section": [3, 2, 3]}
    config = transformers.Qwen2VLTextConfig(hidden_size=H * D, rope_parameters=rope, **SIZES)
    rotary = modeling_qwen2_vl.Qwen2VLRotaryEmbedding(config)
    theirs = modeling_qwen2_vl.Qwen2VLAttention(config, 0)
    ours = {"position": rotary_from_config(rope, D)}
    return theirs, lambda x: (x, HIDDEN, None, None, rotary(x, OF_AXES)), H * D, ours, OF_AXES


def _qwen_3_vl() -> Pair:
    rope: Any = ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config = transformers.Qwen3VLTextConfig(hidden_size=E, head_dim=D, rope_parameters=rope, **SIZES)
    rotary = modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding(config)
    norms = {name: nn.RMSNorm(D, eps=config.rms_norm_eps) for name in ("q_norm", "k_norm")}
    ours = norms | {"position": rotary_from_config(rope, D)}
    return (
        modeling_qwen3_vl.Qwen3VLTextAttention(config, 0),
        lambda x: (x, rotary(x, OF_AXES), HIDDEN),
        E,
        ours,
        OF_AXES,
    )


@pytest.mark.parametrize("make", [_llama_4, _ministral_3, _qwen_2_vl, _qwen_3_vl])
def test_outputs_and_gradients_of_transformers_own_modules(make: Callable[[], Pair]) -> None:
    theirs, arguments, size, parts, positions = make()
    randomised(theirs)
    ours = MultiHeadAttention(size, H, num_kv_heads=HKV, head_dim=D, mask=masks.causal(), **parts)
    named = {name.replace("o_proj", "out_proj"): x for name, x in theirs.named_parameters()}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():  # a bias that they do not have is 0
            parameter.copy_(named[name].detach() if name in named else torch.zeros(parameter.shape))
    x = torch.randn(B, L, size, requires_grad=True)
    upstream, results = torch.randn(B, L, size), list[dict[str, Tensor]]()
    for output, parameters in (
        (ours(x, positions=positions), {name: ours.get_parameter(name) for name in named}),
        (theirs(*arguments(x))[0], named),
    ):
        gradients = torch.autograd.grad((output * upstream).sum(), [x, *parameters.values()])
        results.append({"output": output} | dict(zip(["input", *parameters], gradients, strict=True)))
    require_near(*results)


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


@pytest.mark.parametrize("name", PARTS)
@torch.no_grad()
def test_sequences_without_padding(name: str) -> None:
    module = module_of(PARTS[name]())
    items = [torch.randn(length, E) for length in (3, 7, 5)]
    jagged = module(torch.nested.nested_tensor(items, layout=torch.jagged), mask=masks.causal())
    expected = [module(item, mask=masks.causal()) for item in items]
    require_near(jagged.values(), torch.cat(expected))
    lengths = torch.tensor([3, 190, 50])  # long enough that padding is removed
    x = torch.randn(3, 190, E)
    at = torch.randint(0, 50, (3, 3, 190)) if name == "axes" else torch.arange(190).expand(1, 3, 190)
    given = at if name == "axes" else at[0]
    padded = module(x, mask=masks.causal() & masks.lengths(lengths, lengths), positions=given)
    for item, length in enumerate(lengths.tolist()):
        own = given[..., item : item + 1, :length]
        require_near(padded[item, :length], module(x[item : item + 1, :length], mask=masks.causal(), positions=own)[0])


@pytest.mark.parametrize("name", PARTS)
@torch.no_grad()
def test_records_and_copies_see_the_scaled_queries(name: str) -> None:
    module = module_of(PARTS[name]()).double()
    x = torch.randn(B, L, E, dtype=torch.float64)
    positions = OF_AXES if name == "axes" else torch.arange(3, 3 + L)
    how: dict[str, Any] = {"mask": masks.causal(), "positions": positions}
    with clearhead.record(module, statistics=("entropy",), keep="queries_keys") as rec:
        output = module(x, **how)
    _, weights = module(x, **how, need_weights=True, average_attn_weights=False)
    require_near(rec.weights(""), weights, 1e-6)
    require_near(rec[""].entropy, -(weights * weights.clamp(min=1e-300).log()).sum(-1))
    copied = module_of(PARTS[name]()).double()
    copied.load_state_dict(module.state_dict())
    for other in (copied, pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        torch.testing.assert_close(other(x, **how), output, rtol=0, atol=0)


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
