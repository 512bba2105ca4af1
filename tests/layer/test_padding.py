"""Padding that is left out: results of the padded computation in both modules, with fewer multiplications."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import masks
from clearhead._layer import layer, unpadding
from clearhead.masks import Mask
from clearhead.positions import ALiBi, Rotary
from tests.support.derivatives import derivatives
from tests.support.randomised import randomised

B, L, S, E, H, KV = 5, 13, 11, 24, 6, 3
KEYS, QUERIES = torch.tensor([11, 3, 0, 7, 1]), torch.tensor([11, 5, 2, 0, 1])
LEFT = torch.arange(S) >= (S - KEYS)[:, None]
HOLES = torch.tensor([[(i * j + i + j) % 3 > 0 for j in range(S)] for i in range(B)])
PADDED = torch.arange(S) >= KEYS[:, None]

MASKS: dict[str, Callable[[], Mask]] = {
    "lengths": lambda: masks.lengths(KEYS),
    "no padding": lambda: masks.lengths(torch.full((B,), S)),
    "nothing but padding": lambda: masks.lengths(torch.zeros(B, dtype=torch.int64)),
    "left padding": lambda: masks.drop(keys=~LEFT),
    "holes": lambda: masks.keep(keys=HOLES),
    "float padding": lambda: masks.bias(torch.zeros(B, 1, 1, S).masked_fill(~HOLES[:, None, None], -torch.inf)),
    "queries too": lambda: masks.lengths(KEYS, QUERIES),
    "queries alone": lambda: masks.lengths(torch.full((B,), S), query_lengths=QUERIES),
    "causal": lambda: masks.lengths(KEYS) & masks.causal(),
    "causal, left padding": lambda: masks.causal() & masks.keep(keys=LEFT),
    "window, queries too": lambda: masks.lengths(KEYS, QUERIES) & masks.sliding_window(3, 1),
    "two kinds": lambda: masks.lengths(KEYS) & masks.keep(keys=HOLES),
}


@pytest.fixture(params=["self", "cross"])
def inputs(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor]:
    query = torch.randn(B, L if request.param == "cross" else S, E, dtype=torch.float64, requires_grad=True)
    key = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True) if request.param == "cross" else query
    return query, key


@pytest.fixture
def unpadded(monkeypatch: pytest.MonkeyPatch) -> list[unpadding.Unpadded]:
    """Leave out whatever can be left out, however little it saves; holds what was."""
    result: list[unpadding.Unpadded] = []
    unpad = unpadding.unpad

    def noted(*args: Any, **options: Any) -> unpadding.Unpadded | None:
        tokens = unpad(*args, **options)
        result.extend([] if tokens is None else [tokens])
        return tokens

    monkeypatch.setattr(unpadding, "_WORTH_UNPADDING", -(1 << 40))
    monkeypatch.setattr(layer, "unpad", noted)
    return result


def with_and_without(
    call: Callable[[], Tensor], wanted: list[Tensor], unpadded: list[Any], expected_times: int = 1
) -> None:
    """Unpadded, once or not at all, and as a whole batch."""
    result = derivatives(call(), wanted, unused=True)
    assert len(unpadded) == expected_times
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpadding, "_WORTH_UNPADDING", 1 << 40)
        expected = derivatives(call(), wanted, unused=True)
    assert len(unpadded) == expected_times
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MASKS)
def test_our_module(name: str, inputs: tuple[Tensor, Tensor], unpadded: list[Any]) -> None:
    module = randomised(clearhead.MultiHeadAttention(E, H, num_kv_heads=KV, dtype=torch.float64))
    with_and_without(lambda: module(*inputs, mask=MASKS[name]()), [*set(inputs), *module.parameters()], unpadded)


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "norms": lambda: {"q_norm": nn.RMSNorm(E // H).double(), "k_norm": nn.RMSNorm(E // H).double()},
    "rotary": lambda: {"position": Rotary(E // H)},
    "softcap and sinks": lambda: {"softcap": 2.0, "sinks": True},
    "own mask": lambda: {"mask": masks.sliding_window(2, 0)},
    "scale": lambda: {"scale": 0.3},
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("lengths", "same_tokens"),
    [
        (lambda: masks.lengths(KEYS, KEYS), True),
        (lambda: masks.lengths(KEYS, KEYS) & masks.causal(), True),
        (MASKS["causal, left padding"], False),
        (MASKS["lengths"], False),
    ],
    ids=["queries too", "causal", "left padding", "keys"],
)
def test_parts_of_our_module(part: str, lengths: Callable[[], Mask], same_tokens: bool, unpadded: list[Any]) -> None:
    module = randomised(clearhead.MultiHeadAttention(E, H, num_kv_heads=KV, dtype=torch.float64, **PARTS[part]()))
    x = torch.randn(B, S, E, dtype=torch.float64, requires_grad=True)
    # Rotary positions need a key beside each query, or the batch keeps its padding.
    times = int(same_tokens or part != "rotary")
    with_and_without(lambda: module(x, mask=lengths()), [x, *module.parameters()], unpadded, times)


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kdim", [None, E])
def test_the_drop_in(
    floats: bool,
    is_causal: bool,
    batch_first: bool,
    kdim: int | None,
    inputs: tuple[Tensor, Tensor],
    unpadded: list[Any],
) -> None:
    module = randomised(clearhead.nn.MultiheadAttention(E, H, batch_first=batch_first, kdim=kdim, dtype=torch.float64))
    hidden = ~(LEFT if is_causal else HOLES)
    padding = torch.zeros(B, S, dtype=torch.float64).masked_fill(hidden, -torch.inf) if floats else hidden
    query, key = inputs if batch_first else (x.transpose(0, 1) for x in inputs)
    key = query if inputs[0] is inputs[1] else key
    assert module(query, key, key, padding, False)[0].is_contiguous()
    unpadded.clear()
    with_and_without(
        lambda: module(query, key, key, padding, False, None, True, is_causal)[0],
        [*set(inputs), *module.parameters()],
        unpadded,
    )


def test_a_hook_on_the_output_projection_sees_whole_batches(unpadded: list[Any]) -> None:
    module, seen = randomised(clearhead.MultiHeadAttention(E, H)), []
    handle = module.out_proj.register_forward_hook(lambda _module, args, _output: seen.append(args[0].shape))
    x, mask = torch.randn(B, S, E), MASKS["queries too"]()
    hooked = module(x, mask=mask)
    handle.remove()
    torch.testing.assert_close(hooked, module(x, mask=mask))
    assert len(unpadded) == 2
    assert seen == [(B, S, E)]


PADDED_PATH: dict[str, Callable[[], Mask]] = {
    "holes under a rule about positions": lambda: masks.keep(keys=HOLES) & masks.causal(),
    "a predicate": lambda: masks.lengths(KEYS) & masks.mask_mod(lambda b, h, q, k: q != k),
    "an aligned rule": lambda: masks.lengths(KEYS) & masks.causal("bottom_right"),
    "a tensor (L, S)": lambda: masks.lengths(KEYS) & masks.keep(torch.ones(S, S, dtype=torch.bool)),
    "a bias": lambda: masks.lengths(KEYS) & masks.bias(torch.rand(S, S)),
    "a bias per head": lambda: masks.lengths(KEYS) & ALiBi(H),
    "a bias that is no padding": lambda: masks.bias(torch.rand(B, 1, 1, S)),
    "a bias that learns": lambda: masks.bias(torch.zeros(B, 1, 1, S, requires_grad=True)),
    "lengths per query": lambda: masks.lengths(KEYS[:, None].expand(B, S)),
}


@pytest.mark.parametrize("name", PADDED_PATH)
def test_other_masks_keep_the_padded_path(name: str, unpadded: list[Any]) -> None:
    module, x = clearhead.MultiHeadAttention(E, H), torch.randn(B, S, E)
    mask = PADDED_PATH[name]()
    output = module(x, mask=mask)
    assert unpadded == []
    with clearhead.use_kernel("reference"):
        expected = module.double()(x.double(), mask=mask)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_other_calls_keep_the_padded_path(unpadded: list[Any]) -> None:
    module, x, mask = clearhead.MultiHeadAttention(E, H), torch.randn(B, S, E), masks.lengths(KEYS)
    module(x, mask=mask, need_weights=True)
    module(x, mask=mask, positions=0)
    with torch.no_grad():
        module(x, mask=mask, cache=module.make_cache(B, S))
    torch.vmap(lambda one: module(one, mask=mask))(x[None])
    with clearhead.intervene(module, {("", 0): 0.0}):
        module(x, mask=mask)
    assert unpadded == []


@pytest.mark.parametrize("name", MASKS)
def test_recorders_see_the_padded_batch(name: str, inputs: tuple[Tensor, Tensor], unpadded: list[Any]) -> None:
    module = randomised(
        clearhead.MultiHeadAttention(E, H, num_kv_heads=KV, softcap=0.7, scale=0.4, sinks=True).double()
    )
    statistics = ("received", "entropy", "output", "max_logit", "rows")
    with clearhead.record(module, statistics, keep="queries_keys") as seen:
        output = module(*inputs, mask=MASKS[name]())
    assert torch.equal(output, module(*inputs, mask=MASKS[name]()))
    assert len(unpadded) in (0, 2)
    with clearhead.record(module, statistics, keep="queries_keys") as expected:
        module(*inputs, mask=MASKS[name]() & masks.keep(torch.ones(1, 1, dtype=torch.bool)))
    for statistic in statistics:
        result, wanted = (getattr(record[""][0], statistic) for record in (seen, expected))
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(seen.weights(0), seen[""][0].rows, rtol=0, atol=1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["lengths", "causal, left padding"])
def test_checkpointing_computes_again_what_was_recorded(name: str, reentrant: bool, unpadded: list[Any]) -> None:
    module = randomised(clearhead.MultiHeadAttention(E, H, dropout=0.5)).train()
    given = torch.randn(B, S, E)

    def attend(x: Tensor) -> Tensor:
        return module(x, mask=MASKS[name]())

    result: list[list[Tensor]] = []
    for checkpointed, recorded in ((False, False), (True, False), (True, True)):
        torch.manual_seed(3)
        x = given.clone().requires_grad_()
        with clearhead.record(module) if recorded else nullcontext():
            output = checkpoint(attend, x, use_reentrant=reentrant) if checkpointed else attend(x)
        output.square().sum().backward()
        result.append([output.detach(), cast(Tensor, x.grad)])
    for item in result[1:]:
        assert all(torch.equal(*pair) for pair in zip(result[0], item, strict=True))
    assert len(unpadded) == 5


def test_nan_in_padding_stays_there(unpadded: list[Any]) -> None:
    module, x = randomised(clearhead.MultiHeadAttention(E, H)), torch.randn(B, S, E)
    memory = torch.randn(B, S, E)
    expected = module(x, memory, mask=masks.lengths(KEYS))
    poisoned = memory.masked_fill(PADDED[..., None], torch.nan).requires_grad_()
    output = module(x, poisoned, mask=masks.lengths(KEYS))
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad(output.square().sum(), [poisoned, *module.parameters()])
    assert all(bool(item.isfinite().all()) for item in gradients)
    assert not bool(gradients[0][PADDED].any())
    own = x.masked_fill(PADDED[..., None], torch.inf)
    assert bool(module(own, mask=masks.lengths(KEYS, KEYS)).isfinite().all())
    assert len(unpadded) == 3


def test_dropout_drops_weights_and_nothing_else(unpadded: list[Any]) -> None:
    """Values are unit vectors and the projections leave them alone, so that outputs are the dropped weights."""
    module = clearhead.MultiHeadAttention(S, 1, head_dim=S, dropout=0.5, bias=False)
    with torch.no_grad():
        module.v_proj.weight.copy_(torch.eye(S))
        module.out_proj.weight.copy_(torch.eye(S))
    x, values, mask = torch.randn(B, S, S), torch.eye(S).expand(B, S, S), masks.lengths(KEYS)
    dropped = module(x, x, values, mask=mask)
    _, weights = module(x, x, values, mask=mask, need_weights=True)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * weights[kept])
    assert 0.3 < float(kept.sum() / (weights != 0).sum()) < 0.7
    assert not torch.equal(module(x, x, values, mask=mask), dropped)
    torch.testing.assert_close(module.eval()(x, x, values, mask=mask), weights)
    assert len(unpadded) == 3


#: The profiler knows the multiplications of these operators.
PRODUCTS = ("aten::addmm", "aten::mm", "aten::baddbmm", "aten::bmm")


def multiplications(module: nn.Module, x: Tensor, mask: Mask | None) -> int:
    """Of the products of matrices, by the profiler: under a counter that is a dispatch mode padding stays."""
    profiler = torch.autograd.profiler.profile(with_flops=True)
    with torch.no_grad(), clearhead.use_kernel("reference"), clearhead.use_linear("pytorch"), profiler:
        module(x, mask=mask)
    return sum(operator.flops for operator in profiler.key_averages() if operator.key in PRODUCTS) // 2


def test_a_large_padded_batch_costs_what_is_in_it() -> None:
    module, x = clearhead.MultiHeadAttention(256, 4), torch.randn(2, 512, 256)
    half = torch.tensor([256, 256])
    token, pair = 256 * 256, 2 * 256
    assert multiplications(module, x, None) == 2 * (4 * token * 512 + pair * 512 * 512)
    assert multiplications(module, x, masks.lengths(half)) == 2 * (3 * token * 512 + pair * 512 * 256)
    assert multiplications(module, x, masks.lengths(half, half)) == 2 * (2 * token * 512 + pair * 256 * 256)


def test_a_small_batch_keeps_its_padding() -> None:
    """Taking tokens out and putting them back would cost more."""
    module, x = clearhead.MultiHeadAttention(64, 4), torch.randn(2, 16, 64)
    expected = multiplications(module, x, None)
    assert expected == 2 * (4 * 64 * 64 * 16 + 2 * 64 * 16 * 16)
    assert multiplications(module, x, masks.lengths(torch.tensor([16, 4]))) == expected


def test_traced_graphs_never_look_at_lengths(unpadded: list[Any]) -> None:
    module, x = clearhead.MultiHeadAttention(E, H), torch.randn(B, S, E)
    compiled = torch.compile(lambda x, keys: module(x, mask=masks.keep(keys=keys)), backend="eager", fullgraph=True)
    result = compiled(x, LEFT)
    assert unpadded == []
    torch.testing.assert_close(result, module(x, mask=masks.keep(keys=LEFT)))
    assert len(unpadded) == 1


def test_the_tokens_of_a_stack_end_with_its_forward(
    monkeypatch: pytest.MonkeyPatch, unpadded: list[unpadding.Unpadded]
) -> None:
    found: list[weakref.ref[Any]] = []
    find_tokens = unpadding.find_tokens

    def noted(*args: Any) -> Any:
        tokens = find_tokens(*args)
        found.append(weakref.ref(tokens))
        return tokens

    monkeypatch.setattr(unpadding, "find_tokens", noted)
    layers = [
        clearhead.transformer.EncoderLayer(
            E, clearhead.MultiHeadAttention(E, H), clearhead.transformer.FeedForward(E, E)
        )
        for _ in range(3)
    ]
    gc.disable()  # a mask on a GPU must not wait for the garbage collector
    try:
        with torch.no_grad():
            clearhead.transformer.Encoder(layers).eval()(torch.randn(B, S, E), mask=masks.lengths(KEYS, KEYS))
        assert len(unpadded) == 3
        unpadded.clear()
        assert found
        assert not any(each() for each in found)
    finally:
        gc.enable()
