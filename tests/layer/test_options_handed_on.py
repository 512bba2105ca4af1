"""Every option of a module reaches whatever computes its call, or looks at it, as it reaches the plain call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import MultiHeadAttention, caches, masks
from clearhead.positions import Rotary
from clearhead.transformer import Encoder, EncoderLayer, FeedForward
from tests.support.closeness import require_near
from tests.support.exact import Exact, exact_attention
from tests.support.randomised import randomised

B, L, E, H, KV, D = 2, 7, 24, 6, 3, 4


@dataclass(frozen=True)
class Option:
    """An option of a module or of its call.

    Args:
        parts: of the module.
        given: with the call.
        visible, bias: what the mask shows and adds, (1 or B, 1 or H, L, S).
        by_position: whether it means the same where tokens come one after another, or as documents.
    """

    parts: dict[str, Any]
    given: dict[str, Any]
    visible: Tensor | None = None
    bias: Tensor | None = None
    by_position: bool = True


def operands(module: MultiHeadAttention, x: Tensor, item: Option) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of self-attention, (B, H, L, D) and (B, Hkv, L, D)."""
    q = clearhead.split_heads(module.q_proj(x), H)
    k, v = (clearhead.split_heads(projection(x), KV) for projection in (module.k_proj, module.v_proj))
    q, k = (x if norm is None else norm(x) for x, norm in ((q, module.q_norm), (k, module.k_norm)))
    if module.position is not None:
        q, k = module.position(q, k, item.given.get("positions", 0))
    return q, k, v


def solved(module: MultiHeadAttention, x: Tensor, item: Option) -> tuple[Tensor, Exact]:
    """The output (B, L, E) of self-attention in float64, and the results of attention inside."""
    options: dict[str, Any] = {"scale": module.scale, "softcap": module.softcap, "sinks": module.sinks}
    inside = exact_attention(*operands(module, x, item), item.visible, bias=item.bias, **options)
    return module.out_proj(clearhead.merge_heads(inside.output)), inside


def counted(item: Option) -> Tensor:
    """bool (B, L): all tokens but padding, which are keys that are hidden from every query of their item."""
    return torch.ones(B, L, dtype=torch.bool) if item.visible is None else item.visible.any(-2).any(1).expand(B, L)


_AT = torch.arange(L)
_GAP = _AT[:, None] - _AT
_CAUSAL = (_GAP >= 0)[None, None]
_MARKS = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
_BIAS = torch.linspace(-2, 2, H * L * L, dtype=torch.float64).sin().reshape(1, H, L, L) * 2
_IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1])

OPTIONS: dict[str, Option] = {
    "none": Option({}, {}),
    "softcap": Option({"softcap": 0.8}, {"mask": masks.causal()}, _CAUSAL),
    "sinks": Option({"sinks": True}, {"mask": masks.causal()}, _CAUSAL),
    "softcap and sinks": Option({"softcap": 1.5, "sinks": True}, {}),
    "scale": Option({"scale": 1.3}, {"mask": masks.causal()}, _CAUSAL),
    "rotary": Option({"position": Rotary(D)}, {"mask": masks.causal()}, _CAUSAL),
    "norms": Option({"q_norm": nn.RMSNorm(D).double(), "k_norm": nn.LayerNorm(D).double()}, {}),
    "positions": Option({"position": Rotary(D)}, {"mask": masks.causal(), "positions": 5}, _CAUSAL),
    "dropout, switched off": Option({"dropout": 0.9}, {}),
    "own window": Option({"mask": masks.sliding_window(2, 0)}, {}, ((_GAP >= 0) & (_GAP <= 2))[None, None]),
    "causal": Option({}, {"mask": masks.causal()}, _CAUSAL),
    "window": Option({}, {"mask": masks.sliding_window(1, 0)}, ((_GAP >= 0) & (_GAP <= 1))[None, None]),
    "documents": Option(
        {}, {"mask": masks.documents(_IDS) & masks.causal()}, (_IDS[:, None] == _IDS)[None, None] & _CAUSAL
    ),
    "padding": Option({"sinks": True}, {"mask": masks.keep(keys=_MARKS)}, _MARKS[:, None, None], by_position=False),
    "bias": Option({"softcap": 2.0}, {"mask": masks.bias(_BIAS)}, None, _BIAS, by_position=False),
    "bool tensor": Option({}, {"mask": _GAP % 3 != 1}, (_GAP % 3 != 1)[None, None], by_position=False),
    "both masks": Option(
        {"mask": masks.sliding_window(3, 0)}, {"mask": masks.keep(keys=_MARKS)},
        ((_GAP >= 0) & (_GAP <= 3))[None, None] & _MARKS[:, None, None], by_position=False,
    ),
}  # fmt: skip
#: Options that mean the same for tokens that come one by one, or as documents of their own.
IN_STEPS = [
    name
    for name, each in OPTIONS.items()
    if each.by_position and name not in ("none", "softcap and sinks", "norms", "dropout, switched off", "positions")
]


def made(name: str) -> tuple[MultiHeadAttention, Tensor, Option, Tensor, Exact]:
    """A module with an option, input, and the output and attention of its call."""
    item, x = OPTIONS[name], torch.randn(B, L, E, dtype=torch.float64)
    module = MultiHeadAttention(E, H, num_kv_heads=KV, head_dim=D, dtype=torch.float64, **item.parts)
    module = randomised(module, 0.4).requires_grad_(False)
    return module, x, item, *solved(module, x, item)


every_option = pytest.mark.parametrize("name", OPTIONS)
_KERNELS = (None, "reference", "chunked")


@every_option
def test_the_module_and_its_weights(name: str) -> None:
    module, x, item, expected, inside = made(name)
    require_near(module(x, **item.given), expected)
    for average in (False, True):
        output, weights = module(x, **item.given, need_weights=True, average_attn_weights=average)
        require_near(output, expected)
        require_near(weights, inside.weights.mean(1) if average else inside.weights)


@every_option
def test_training_and_checkpointing(name: str) -> None:
    module, x, item, expected, _ = made(name)
    module.dropout = 0.0
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(solved(module, leaf, item)[0].square().sum(), leaf)
    for run in (module.train(), lambda *args, **inputs: checkpoint(module, *args, **inputs, use_reentrant=False)):
        output = run(leaf, **item.given)
        require_near(output, expected)
        require_near(torch.autograd.grad(output.square().sum(), leaf)[0], gradient)


@every_option
def test_a_record(name: str) -> None:
    module, x, item, expected, inside = made(name)
    names = ("rows", "received", "max_logit", "entropy", "head_average", "output", "confidence")
    with clearhead.record(module, names, keep="queries_keys") as rec:
        require_near(module(x, **item.given), expected)
    result = rec[""][0]
    logs = torch.where(inside.weights > 0, inside.weights, 1.0).log()
    require_near(result.rows, inside.weights)
    require_near(result.entropy, -(inside.weights * logs).sum(-1))
    require_near(result.received, (inside.weights * counted(item)[:, None, :, None]).sum(-2))
    require_near(result.head_average, inside.weights.mean(1))
    require_near(result.output, inside.output)
    require_near(result.confidence, inside.weights.amax(-1))
    require_near(
        result.max_logit, inside.scores.masked_fill(~counted(item)[:, None, :, None], -torch.inf).amax((-1, -2))
    )
    require_near(rec.weights(0), inside.weights)


@every_option
def test_an_observer_that_may_change_outputs(name: str) -> None:
    module, x, item, expected, inside = made(name)
    seen: dict[int, Tensor] = {}

    def noted(head: int) -> Callable[[Tensor], Tensor]:
        return lambda output: seen.setdefault(head, output)

    with clearhead.intervene(module, {("", head): noted(head) for head in range(H)}):
        require_near(module(x, **item.given), expected)
    require_near(torch.stack([seen[head] for head in range(H)], 1), inside.output)


@every_option
def test_a_monitor(name: str) -> None:
    module, x, item, expected, inside = made(name)
    module.dropout = 0.0
    told: dict[str, float] = {}
    with clearhead.monitor(module.train(), 1, ("entropy", "max_logit"), to=lambda step, values: told.update(values)):
        require_near(module(x, **item.given), expected)
    logs = torch.where(inside.weights > 0, inside.weights, 1.0).log()
    real = counted(item)[:, None]
    entropy, sees = -(inside.weights * logs).sum(-1) * real, (inside.weights.sum(-1) > 0) & real
    # Per head over the counted queries that see a key, then over the heads.
    expected = (entropy.sum((0, 2)) / sees.sum((0, 2))).mean()
    assert told["attention/entropy"] == pytest.approx(float(expected), abs=1e-9)
    highest = inside.scores.masked_fill(~real[..., None], -torch.inf).amax((0, 2, 3))
    assert told["attention/max_logit"] == pytest.approx(float(highest.mean()), abs=1e-9)


@every_option
def test_the_functions(name: str) -> None:
    module, x, item, _, inside = made(name)
    q, k, v = operands(module, x, item)
    module_mask, call_mask = module.mask, item.given.get("mask")
    mask: Any = module_mask if call_mask is None else call_mask if module_mask is None else module_mask & call_mask
    options: dict[str, Any] = {"scale": module.scale, "softcap": module.softcap, "sinks": module.sinks}
    options |= {"query_positions": item.given.get("positions"), "key_positions": item.given.get("positions")}
    for kernel in _KERNELS:
        forced = torch.no_grad() if kernel is None else clearhead.use_kernel(kernel)
        with forced:
            output, lse = clearhead.attention(q, k, v, mask, return_lse=True, **options)
        require_near(output, inside.output)
        require_near(lse, inside.lse)
    require_near(clearhead.attention_weights(q, k, mask, **options), inside.weights)
    require_near(clearhead.attention_statistics(q, k, mask, statistics=("rows",), **options).rows, inside.weights)


@every_option
def test_the_layers_of_an_encoder(name: str) -> None:
    module, x, item, expected, inside = made(name)
    layer = EncoderLayer(E, module, FeedForward(E, 5, dtype=torch.float64), norm=nn.Identity).double().eval()
    for parameter in layer.feed_forward.parameters():
        nn.init.zeros_(parameter)
    stack = Encoder([layer])
    for part in (layer, stack):
        require_near(part(x, **item.given), x + expected)
        weights = part(x, **item.given, need_weights=True, average_attn_weights=False)[1]
        require_near(weights[0] if isinstance(weights, list) else weights, inside.weights)


CACHES: dict[str, Callable[[], caches.Cache]] = {
    "all": lambda: caches.KVCache(B, KV, 19, D, dtype=torch.float64),
    "sliding": lambda: caches.SlidingKVCache(B, KV, 13, D, dtype=torch.float64),
    "heavy hitters": lambda: caches.EvictingKVCache(B, KV, 13, D, dtype=torch.float64),
}


@pytest.mark.parametrize("name", IN_STEPS)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("step", [1, 3])
def test_a_cache(name: str, kind: str, step: int) -> None:
    module, x, item, expected, _ = made(name)
    cache = CACHES[kind]()
    outputs = [module(part, **item.given, cache=cache) for part in x.split(step, 1)]
    require_near(torch.cat(outputs, 1), expected)


@pytest.mark.parametrize(("recent", "latest"), [(0.0, 1), (0.7, 2)])
@pytest.mark.parametrize("name", ["softcap", "sinks", "scale", "rotary", "causal", "window", "documents"])
def test_an_evicting_cache_keeps_by_the_weights_of_the_call(name: str, recent: float, latest: int) -> None:
    """The latest tokens of a prompt stay, and those that received most, by the weights that the module returns."""
    module, x, item, _, inside = made(name)
    budget = 3
    cache = caches.EvictingKVCache(B, KV, budget, D, policy=caches.HeavyHitters(recent), dtype=torch.float64)
    module(x, **item.given, cache=cache)
    received = inside.weights.unflatten(1, (KV, H // KV)).sum((2, 3))  # (B, Hkv, S)
    received[..., -latest:] = torch.inf
    expected = received.topk(budget, -1).indices.sort(-1).values
    result = cache.update(*(torch.zeros(B, KV, 1, D, dtype=torch.float64),) * 2).positions
    assert result is not None
    assert torch.equal(result[..., :budget].sort(-1).values, expected)


@pytest.mark.parametrize(
    "name", [name for name in OPTIONS if OPTIONS[name].by_position and name not in ("documents", "positions")]
)
def test_jagged_rows(name: str) -> None:
    module, x, item, *_ = made(name)
    lengths = (L, 4)
    rows = [x[n, :length] for n, length in enumerate(lengths)]
    result = module(torch.nested.nested_tensor(rows, layout=torch.jagged), **item.given).unbind()
    for row, output in zip(rows, result, strict=True):
        n = len(row)
        alone = Option(item.parts, item.given, None if item.visible is None else item.visible[..., :n, :n])
        require_near(output, solved(module, row[None], alone)[0][0])
