"""Padding that is left out: the same outputs and gradients as with it, in both modules, and fewer multiplications."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import clearhead._layer.padding
import pytest
import torch
from clearhead._layer.padding import Costs, find_padding
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import clearhead
from clearhead import masks
from clearhead.errors import ArgumentError, DTypeError, ShapeError
from clearhead.masks import Mask

B, L, S, E, H, KV = 5, 13, 11, 24, 6, 3
KEYS, QUERIES = torch.tensor([11, 3, 0, 7, 1]), torch.tensor([13, 5, 2, 0, 1])
LEFT = torch.arange(S) >= (S - KEYS)[:, None]
HOLES = torch.tensor([[(i * j + i + j) % 3 > 0 for j in range(S)] for i in range(B)])

MASKS: dict[str, Callable[[], Mask]] = {
    "lengths": lambda: masks.lengths(KEYS),
    "marks of padding": lambda: masks.drop(keys=~LEFT),
    "marks with holes": lambda: masks.keep(keys=HOLES),
    "numbers": lambda: masks.bias(torch.zeros(B, 1, 1, S).masked_fill(~HOLES[:, None, None], -torch.inf)),
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
def always(monkeypatch: pytest.MonkeyPatch) -> list[clearhead._layer.padding.Padding]:
    """Leave out whatever can be left out; holds what was."""
    left_out: list[clearhead._layer.padding.Padding] = []
    attend = clearhead._layer.padding.Padding.attend

    def noted(self: clearhead._layer.padding.Padding, *args: Any) -> Tensor:
        left_out.append(self)
        return attend(self, *args)

    monkeypatch.setattr(clearhead._layer.padding, "_WORTH_A_CALL", -(1 << 40))
    monkeypatch.setattr(clearhead._layer.padding.Padding, "attend", noted)
    return left_out


def drawn(module: Any) -> Any:
    """With biases too, so that ``out_proj(0)`` is not zero."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def answers(call: Callable[[], Tensor], wanted: list[Tensor]) -> list[Tensor]:
    output = call()
    gradients = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
    return [output, *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, gradients, strict=True))]


def with_and_without(call: Callable[[], Tensor], wanted: list[Tensor]) -> None:
    """Compare with what comes out under a forced observer, who is shown whole batches."""
    from clearhead._call.observers import observing

    class Watching:
        recomputing = False

        def attended(self, call: object, output: Tensor) -> Tensor:
            return output

    got = answers(call, wanted)
    with observing(Watching()):
        expected = answers(call, wanted)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MASKS)
def test_our_module(name: str, inputs: tuple[Tensor, Tensor], always: list[Any]) -> None:
    module = drawn(clearhead.MultiHeadAttention(E, H, num_kv_heads=KV, dtype=torch.float64))
    mask = MASKS[name]()
    if "quer" in name and inputs[0].shape[1] < int(QUERIES.max()):
        mask = masks.lengths(KEYS, QUERIES.clamp(max=S))
    with_and_without(lambda: module(*inputs, mask=mask), [*set(inputs), *module.parameters()])
    assert len(always) == 1


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kdim", [None, E])
def test_the_drop_in(
    floats: bool, is_causal: bool, batch_first: bool, kdim: int | None, inputs: tuple[Tensor, Tensor], always: list[Any]
) -> None:
    module = clearhead.nn.MultiheadAttention(E, H, batch_first=batch_first, kdim=kdim, dtype=torch.float64)
    hidden = ~(LEFT if is_causal else HOLES)
    padding = torch.zeros(B, S, dtype=torch.float64).masked_fill(hidden, -torch.inf) if floats else hidden
    query, key = inputs if batch_first else (x.transpose(0, 1) for x in inputs)

    def call() -> Tensor:
        shared = query if inputs[0] is inputs[1] else key
        return drawn_once(query, shared, shared, padding, False, None, True, is_causal)[0]

    drawn_once = drawn(module)
    with_and_without(call, [*set(inputs), *module.parameters()])
    assert len(always) == 1


def test_queries_that_are_left_out_give_the_output_bias(always: list[Any]) -> None:
    module, x = drawn(clearhead.MultiHeadAttention(E, H)), torch.randn(B, S, E)
    lengths = QUERIES.clamp(max=S)
    output = module(x, mask=masks.lengths(KEYS, lengths))
    assert len(always) == 1
    padded = torch.arange(S) >= lengths[:, None]
    assert torch.equal(output[padded], module.out_proj.bias.expand(int(padded.sum()), E))
    output = module(x, mask=masks.lengths(KEYS, lengths) & masks.mask_mod(lambda b, h, q, k: q >= 0))
    assert len(always) == 1
    torch.testing.assert_close(output[padded], module.out_proj.bias.expand(int(padded.sum()), E))


def test_attention_gives_zero_for_queries_beyond_their_length() -> None:
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    mask = masks.lengths(torch.tensor([5, 2]), torch.tensor([2, 4]))
    output = clearhead.attention(q, k, v, mask)
    assert bool((output[0, :, 2:] == 0).all())
    assert bool((output[1, :, 4:] == 0).all())
    torch.testing.assert_close(
        output[1, :, :4], clearhead.attention(q, k, v, masks.lengths(torch.tensor([5, 2])))[1, :, :4]
    )
    assert mask.dense(5, 5)[0, 0].int().tolist() == [[1] * 5] * 2 + [[0] * 5] * 3
    offset = masks.lengths(torch.tensor([5]), torch.tensor([4])).dense(2, 5, query_positions=3)[0, 0]
    assert offset.int().tolist() == [[1] * 5, [0] * 5]


def test_a_hook_on_the_output_projection_sees_whole_batches(always: list[Any]) -> None:
    module, seen = drawn(clearhead.MultiHeadAttention(E, H)), []
    module.out_proj.register_forward_hook(lambda _module, args, _output: seen.append(args[0].shape))
    x, mask = torch.randn(B, S, E), masks.lengths(KEYS, QUERIES.clamp(max=S))
    hooked = module(x, mask=mask)
    module.out_proj._forward_hooks.clear()
    torch.testing.assert_close(hooked, module(x, mask=mask))
    assert len(always) == 2
    assert seen == [(B, S, E)]


def _hook(module: clearhead.MultiHeadAttention) -> None:
    module.k_proj.register_forward_hook(lambda _module, _args, _output: None)


ORDINARY: dict[str, tuple[Callable[[clearhead.MultiHeadAttention], object], Callable[[], Mask]]] = {
    "a hook on a projection": (_hook, MASKS["lengths"]),
    "holes under a rule about positions": (lambda _module: None, lambda: masks.keep(keys=HOLES) & masks.causal()),
    "a rule of one's own": (
        lambda _module: None,
        lambda: masks.lengths(KEYS) & masks.mask_mod(lambda b, h, q, k: q != k),
    ),
    "an aligned rule": (lambda _module: None, lambda: masks.lengths(KEYS) & masks.causal("bottom_right")),
    "numbers that are no padding": (lambda _module: None, lambda: masks.bias(torch.rand(B, 1, 1, S))),
    "lengths per query": (lambda _module: None, lambda: masks.lengths(KEYS[:, None].expand(B, S))),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_everything_else_goes_the_ordinary_way(name: str, always: list[Any]) -> None:
    prepare, mask = ORDINARY[name]
    module, x = clearhead.MultiHeadAttention(E, H), torch.randn(B, S, E)
    prepare(module)
    module(x, mask=mask())
    assert always == []


def test_weights_positions_and_a_cache_go_the_ordinary_way(always: list[Any]) -> None:
    module, x, mask = clearhead.MultiHeadAttention(E, H), torch.randn(B, S, E), masks.lengths(KEYS)
    module(x, mask=mask, need_weights=True)
    module(x, mask=mask, positions=0)
    with torch.no_grad():
        module(x, mask=mask, cache=module.make_cache(B, S))
    turned = clearhead.MultiHeadAttention(E, H, position=clearhead.positions.Rotary(E // H))
    turned(x, mask=mask)
    assert always == []


def test_it_is_recorded_as_one_call(always: list[Any]) -> None:
    module, x = clearhead.MultiHeadAttention(E, H), torch.randn(B, S, E)
    with clearhead.record(module) as seen:
        module(x, mask=masks.lengths(KEYS))
    assert always == []
    assert [len(seen[name]) for name in seen] == [1]


def test_poison_in_padding_stays_there(always: list[Any]) -> None:
    module, x = clearhead.MultiHeadAttention(E, H), torch.randn(B, S, E)
    memory = torch.randn(B, S, E).masked_fill((torch.arange(S) >= KEYS[:, None])[..., None], torch.nan)
    assert bool(module(x, memory, mask=masks.lengths(KEYS)).isfinite().all())
    assert len(always) == 1


def test_wrong_inputs_are_still_explained() -> None:
    module, x = clearhead.MultiHeadAttention(E, H), torch.randn(64, 512, E)
    with pytest.raises(ShapeError, match=rf"query: expected \(B, length, {E}\)"):
        module(torch.randn(64, 512, E + 1), mask=masks.lengths(torch.full((64,), 3)))
    with pytest.raises(ShapeError, match=r"mask lengths\(...\): expected shape \(64,\)"):
        module(x, mask=masks.lengths(torch.full((3,), 3)))
    with pytest.raises(ShapeError, match="query, key, value: expected equal batch sizes B"):
        module(x, x[:3], mask=masks.lengths(torch.full((64,), 3)))


def test_errors_about_query_lengths() -> None:
    keys = torch.tensor([3, 3])
    with pytest.raises(ArgumentError, match="query_lengths: expected numbers ≥ 0, got a smallest one of -1"):
        masks.lengths(keys, torch.tensor([3, -1]))
    with pytest.raises(ShapeError, match=r"query_lengths: expected shape \(B,\), got \(1, 2\)"):
        masks.lengths(keys, torch.tensor([[3, 3]]))
    with pytest.raises(DTypeError, match=r"query_lengths: expected an integer tensor, got torch\.float32"):
        masks.lengths(keys, torch.tensor([3.0, 3.0]))
    with pytest.raises(ArgumentError, match="query_lengths of at most L = 2 queries, got a length of 3"):
        masks.lengths(keys, torch.tensor([3, 1])).dense(2, 3)
    with pytest.raises(ShapeError, match=r"query_lengths of shape \(2,\), got \(3,\)"):
        masks.lengths(keys, torch.tensor([1, 1, 1])).dense(4, 3, batch_size=2)


def multiplications(module: nn.Module, x: Tensor, mask: Mask | None) -> int:
    class Counting(TorchDispatchMode):  # `FlopCounterMode` hangs hooks on every module, and those are called whole
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func._overloadpacket in flop_registry:
                self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result) // 2
            return result

    with Counting() as counting, torch.no_grad(), clearhead.use_kernel("reference"):
        module(x, mask=mask)
    return counting.total


def test_a_large_padded_batch_costs_what_is_in_it() -> None:
    module, x = clearhead.MultiHeadAttention(256, 4), torch.randn(2, 512, 256)
    half = torch.tensor([256, 256])
    token, pair = 256 * 256, 2 * 256
    assert multiplications(module, x, None) == 2 * (4 * token * 512 + pair * 512 * 512)
    assert multiplications(module, x, masks.lengths(half)) == 2 * (3 * token * 512 + pair * 512 * 256)
    assert multiplications(module, x, masks.lengths(half, half)) == 2 * (2 * token * 512 + pair * 256 * 256)


def test_small_batches_are_not_worth_it() -> None:
    x, costs = torch.randn(2, 16, 64), Costs(2 * 64 * 64, 2 * 64 * 64, 128)
    assert find_padding(masks.lengths(torch.tensor([16, 4])), x, x, 4, costs) is None


def test_traced_graphs_never_look_at_lengths(always: list[Any]) -> None:
    module, x = clearhead.MultiHeadAttention(E, H), torch.randn(B, S, E)
    compiled = torch.compile(lambda x, keys: module(x, mask=masks.keep(keys=keys)), backend="eager", fullgraph=True)
    got = compiled(x, LEFT)
    assert always == []
    torch.testing.assert_close(got, module(x, mask=masks.keep(keys=LEFT)))
    assert len(always) == 1
