"""Sequences split over processes: calls, stacks, weights, dropout, caches, what is refused, and the collectives.

Outputs and gradients of every mask, method and layout are in test_every_case.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import clearhead
from clearhead import masks
from clearhead.distributed import context_parallel, gather_sequence, shard_sequence, tensor_parallel
from clearhead.distributed._layout import LAYOUTS, Layout
from clearhead.errors import ClearheadError

from .building import EMBED, HEADS, attention, collectives, decoder, encoder, full, mask
from .comparing import compare_in_parts
from .meshes import line, square
from .processes import Processes

METHODS = ("heads", "gather", "ring")


def _positions(method: str, layout: Layout) -> None:
    """Positions of the whole sequence: a start, of each token, of each item with padding."""
    whole, x = attention(4, position="rotary"), torch.randn(2, 13, EMBED, dtype=torch.float64)
    places = torch.arange(13).expand(2, 13).clone() * 2
    places[1, 9:] = -1
    documents = masks.documents(torch.arange(40) // 7)
    for positions in (11, places[0], places):
        options: Any = {"method": method, "layout": layout, "positions": positions, "what": str(positions)}
        compare_in_parts(whole, line(), x, mask=masks.causal() & masks.sliding_window(9, 0), **options)
        if positions is not places:
            compare_in_parts(whole, line(), x, mask=documents, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_positions(two: Processes, method: str, layout: Layout) -> None:
    two.run(_positions, method, layout)


def _cross(method: str, layout: Layout) -> None:
    whole = attention(4, sinks=True)
    query, key = torch.randn(2, 11, EMBED, dtype=torch.float64), torch.randn(2, 7, EMBED, dtype=torch.float64)
    options: Any = {"method": method, "layout": layout}
    for name in ("none", "bottom right", "lengths", "heads", "bias", "window"):
        compare_in_parts(whole, line(), query, key, mask=mask(name, 2, 11, 7), what=name, **options)
    compare_in_parts(whole, line(), query, key, key.flip(0), **options)
    compare_in_parts(whole, line(), query[0], key[0], mask=masks.causal(), **options)
    compare_in_parts(whole, line(), query[:, :1], key, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_cross_attention_and_no_batch(two: Processes, method: str, layout: Layout) -> None:
    two.run(_cross, method, layout)


def _stacks(layout: Layout) -> None:
    x, memory = torch.randn(2, 9, EMBED, dtype=torch.float64), torch.randn(2, 5, EMBED, dtype=torch.float64)
    options: Any = {"layout": layout}
    for name in ("lengths", "documents", "heads"):
        compare_in_parts(encoder(), line(), x, mask=mask(name, 2, 9), what=name, **options)
    compare_in_parts(encoder().layers[0], line(), x, mask=masks.causal(), **options)
    both = {"mask": masks.causal(), "memory_mask": mask("lengths", 2, 9, 5)}
    compare_in_parts(decoder(), line(), x, memory, **both, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_and_stacks(two: Processes, layout: Layout) -> None:
    two.run(_stacks, layout)


def _weights(layout: Layout) -> None:
    whole, x = attention(2, sinks=True), torch.randn(2, 13, EMBED, dtype=torch.float64)
    split = context_parallel(attention(2, sinks=True), line(), layout=layout)
    part = shard_sequence(x, line(), layout=layout)
    for average in (True, False):
        options: Any = {"mask": masks.causal(), "need_weights": True, "average_attn_weights": average}
        expected, (output, weights) = whole(x, **options), split(part, **options)
        torch.testing.assert_close(gather_sequence(output, line(), layout=layout), expected[0])
        torch.testing.assert_close(gather_sequence(weights, line(), dim=-2, layout=layout), expected[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_this_process_s_queries(two: Processes, layout: Layout) -> None:
    two.run(_weights, layout)


def _same_bits(dtype: torch.dtype) -> None:
    """The method `heads` computes what one process computes of the same queries, keys and values."""
    for kv_heads in (8, 2, 1):
        whole = attention(kv_heads, dtype=dtype, position="rotary")
        x = torch.randn(2, 37, EMBED, dtype=dtype)
        seen: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        rows = shard_sequence(torch.arange(37)[None], line())[0]
        for module, found, given in (
            (whole, seen, x),
            (attention(kv_heads, dtype=dtype, position="rotary"), own, None),
        ):
            module.out_proj.register_forward_pre_hook(lambda _, inputs, found=found: found.append(inputs[0]))
            if given is None:
                # The rows of products with the whole, whose last bits depend on how many rows there are.
                for name in ("q_proj", "k_proj", "v_proj"):
                    projected = getattr(whole, name)(x)[:, rows]
                    getattr(module, name).register_forward_hook(lambda *_, projected=projected: projected)
                context_parallel(module, line(), method="heads")
                given = x[:, rows]
            module(given, mask=masks.causal())
        assert torch.equal(own[0], seen[0][:, rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_heads_give_the_same_bits(two: Processes, dtype: torch.dtype) -> None:
    two.run(_same_bits, dtype)


def _shared_head(way: str) -> torch.Tensor:
    """The gradient of the bias of values, of one key/value head whose four query heads each have a process."""
    module: Any = clearhead.MultiHeadAttention(16, 4, num_kv_heads=1, dtype=torch.bfloat16)
    with torch.no_grad():
        module.q_proj.weight.zero_()  # all weights are a quarter
        module.out_proj.weight.copy_(torch.eye(16))
    factors = torch.tensor([256.0, 1.0, 1.0, 1.0]).to(torch.bfloat16).repeat_interleave(4)
    x = torch.ones(1, 4, 16, dtype=torch.bfloat16)
    if way == "tensor":
        split = tensor_parallel(module, line())
    else:
        split, x = context_parallel(module, line(), method="heads"), shard_sequence(x, line())
    (split(x) * factors).sum().backward()
    return full(split.v_proj.bias.grad)


@pytest.mark.parametrize(("way", "count"), [("heads", 1), ("tensor", 4)])
def test_gradients_of_a_shared_head_are_rounded_after_they_are_added(four: Processes, way: str, count: int) -> None:
    for found in four.run(_shared_head, way):  # 256 + 1 is 256 in bfloat16
        assert torch.equal(found, torch.full((4,), 259.0 * count).to(torch.bfloat16))


def _collectives(method: str) -> list[dict[str, int]]:
    module = context_parallel(attention(4, position="rotary", sinks=True), line(), method=method)  # type: ignore[arg-type]
    x = torch.randn(2, 9, EMBED, dtype=torch.float64, requires_grad=True)
    outputs: list[torch.Tensor] = []
    forward = collectives(lambda: outputs.append(module(x, mask=masks.causal())))
    return [forward, collectives(lambda: outputs[0].sum().backward())]


def test_collectives(two: Processes) -> None:
    for method, forward, backward in (
        ("gather", {"allgather_base": 2}, {"reduce_scatter_base": 1}),  # one is the record that processes agree by
        ("heads", {"allgather_base": 1, "alltoall_base": 2}, {"alltoall_base": 2}),
    ):
        for counts in two.run(_collectives, method):
            assert counts == [forward, backward]


def _no_overhead() -> None:
    module = context_parallel(attention(4), line())
    assert module.sequence_shard is None
    assert tensor_parallel(module, line()).head_shard is None


def test_one_process_keeps_the_module_s_own_path() -> None:
    from .processes import processes

    with processes(1) as one:
        one.run(_no_overhead)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "features": ({"query": torch.zeros(2, 5, EMBED + 1, dtype=torch.float64)}, "query: expected (B, length, 32)"),
    "dtype": ({"query": torch.zeros(2, 5, EMBED)}, "query: expected the module's dtype torch.float64"),
    "kind": ({"query": [1.0]}, "query: expected"),
    "value alone": ({"value": torch.zeros(2, 5, EMBED, dtype=torch.float64)}, "key: expected a tensor, because value"),
    "mask": ({"mask": torch.zeros(9, 9)}, "mask: expected a mask or a bool tensor"),
    "flag": ({"need_weights": "yes"}, "need_weights: expected"),
    "positions": ({"positions": torch.zeros(9)}, "positions: expected"),
    "cache": ({"cache": 3}, "cache: expected a cache of the split module"),
    "batch": (
        {"query": torch.zeros(3, 5, EMBED, dtype=torch.float64)},
        "batch size: expected the same in every process, got [2, 3]",
    ),
    "length": ({"query": torch.zeros(2, 3, EMBED, dtype=torch.float64)}, "as shard_sequence cuts them"),
    "weights": ({"need_weights": True}, "need_weights: expected the same in every process"),
    "other mask": ({"mask": masks.causal()}, "mask: expected the same in every process"),
    "mask of a part": ({"mask": torch.ones(5, 9, dtype=torch.bool)}, "mask: expected the same in every process"),
    "other positions": ({"positions": 3}, "positions: expected the same in every process"),
}


def _refused(name: str, wrong_rank: int) -> str:
    mesh = line()
    module = context_parallel(attention(4), mesh)
    x = shard_sequence(torch.zeros(2, 9, EMBED, dtype=torch.float64), mesh)
    given: dict[str, Any] = {"query": x}
    if dist.get_rank() == wrong_rank:
        given |= CALLS[name][0]
    with pytest.raises(ClearheadError) as caught:
        module(**given)
    assert module(x).shape == x.shape  # and goes on
    return str(caught.value)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_what_is_wrong_on_one_process_is_refused_on_all(two: Processes, name: str, wrong_rank: int) -> None:
    if name == "length" and wrong_rank == 1:
        wrong_rank = 0
    said = CALLS[name][1].replace("[2, 3]", "[2, 3]" if wrong_rank else "[3, 2]")
    for message in two.run(_refused, name, wrong_rank):
        assert said in message


def _refused_everywhere() -> None:
    mesh, x = line(), torch.zeros(2, 4, EMBED, dtype=torch.float64)
    module = context_parallel(attention(4), mesh)
    with pytest.raises(
        ClearheadError, match=r"mask lengths\(...\): expected lengths of at most S = 8 keys, got a length of 9"
    ):
        module(x, mask=masks.lengths(torch.tensor([9, 1])))
    with pytest.raises(
        ClearheadError, match=r"mask keep\(...\): expected a shape that broadcasts to .* = \(2, 8, 8, 8\)"
    ):
        module(x, mask=masks.keep(torch.ones(4, 8)))
    with pytest.raises(ClearheadError, match=r"positions: expected positions of the whole sequence, \(8,\)"):
        module(x, positions=torch.arange(4))
    with (
        pytest.raises(ClearheadError, match="interventions: expected attention that one process computes"),
        clearhead.intervene(module, {("", 0): 0.0}),
    ):
        module(x)
    dropping = context_parallel(attention(4, dropout=0.1), mesh)
    with (
        pytest.raises(ClearheadError, match=r"use_kernel\('sdpa'\) would drop other weights"),
        clearhead.use_kernel("sdpa"),
    ):
        dropping(x)
    with pytest.raises(ClearheadError, match="got one after context_parallel"):
        context_parallel(module, mesh)
    with pytest.raises(ClearheadError, match="got one after context_parallel"):
        tensor_parallel(module, mesh)
    with pytest.raises(ClearheadError, match=r"method: expected 'auto', 'heads', 'gather' or 'ring', got 'ulysses'"):
        context_parallel(attention(4), mesh, method="ulysses")  # type: ignore[arg-type]
    with pytest.raises(ClearheadError, match="expected a MultiHeadAttention, or a layer"):
        context_parallel(torch.nn.Linear(2, 2), mesh)  # type: ignore[type-var]
    stack = context_parallel(encoder(), mesh)
    with pytest.raises(ClearheadError):  # on one process alone, before the first attention
        stack(x if dist.get_rank() else x[..., :3])
    assert stack(x).shape == x.shape


def test_what_every_process_refuses(two: Processes) -> None:
    two.run(_refused_everywhere)


def _heads_that_do_not_divide() -> None:
    with pytest.raises(ClearheadError, match=r'expected "heads" where the mesh\'s W = 3 divides H'):
        context_parallel(attention(HEADS), line(), method="heads")
    compare_in_parts(attention(HEADS), line(), torch.randn(2, 7, EMBED, dtype=torch.float64), mask=masks.causal())


def test_heads_that_do_not_divide_are_gathered(three: Processes) -> None:
    three.run(_heads_that_do_not_divide)


def _dropped(method: str, layout: Layout, dtype: torch.dtype, sharded: bool) -> None:
    """One seed, given to every process: what one process drops is what parts of it drop."""
    whole, x = attention(2, dtype=dtype, dropout=0.3, sinks=True), torch.randn(2, 21, EMBED, dtype=dtype)
    mesh = square()["cp"] if sharded else line()
    options: Any = {"method": method, "layout": layout, "mask": masks.causal()}
    if sharded:
        options["prepare"] = lambda module: tensor_parallel(module, square()["tp"])
    with clearhead.use_kernel("chunked"):
        compare_in_parts(whole, mesh, x, seed=dist.get_rank() if not sharded else 4, **options)
    compare_in_parts(whole, mesh, x, seed=4, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_the_weights_that_one_process_drops_are_dropped(two: Processes, method: str, layout: Layout) -> None:
    two.run(_dropped, method, layout, torch.float64, False)
    two.run(_dropped, method, layout, torch.float32, False)


def test_dropped_weights_with_heads_split_too(four: Processes) -> None:
    for method in METHODS:
        four.run(_dropped, method, "zigzag", torch.float64, True)


def _decoded(dtype: torch.dtype, steps: tuple[int, ...]) -> None:
    """A prompt and tokens one by one, with keys that are split; every process is given all of them."""
    length = sum(steps)
    for name in ("causal", "window", "alibi", "function of heads", "prefix", "none"):
        whole = attention(2, dtype=dtype, position="rotary", sinks=True).eval()
        split = context_parallel(attention(2, dtype=dtype, position="rotary", sinks=True).eval(), line())
        x = torch.randn(2, length, EMBED, dtype=dtype)
        caches = [module.make_cache(2, length) for module in (whole, split)]
        with torch.no_grad():
            for tokens in x.split(steps, 1):
                one, other = (
                    module(tokens, mask=mask(name, 2, length), cache=cache)
                    for module, cache in zip((whole, split), caches, strict=True)
                )
                tolerance = 1e-12 if dtype == torch.float64 else 1e-5
                torch.testing.assert_close(other, one, atol=tolerance, rtol=tolerance)
        assert caches[1].length == length
        assert caches[1].own.length in (length // dist.get_world_size(), length // dist.get_world_size() + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_decoding_with_keys_that_are_split(two: Processes, dtype: torch.dtype) -> None:
    two.run(_decoded, dtype, (5, 1, 1, 3, 1))


def test_decoding_with_more_processes_than_tokens(four: Processes) -> None:
    four.run(_decoded, torch.float64, (1, 1, 3))


def _decoded_otherwise() -> None:
    """Columns of masks made of tensors, rows that are cropped and reordered, a stack, and what is refused."""
    whole, split = attention(2).eval(), context_parallel(attention(2).eval(), line())
    x, kept = torch.randn(2, 7, EMBED, dtype=torch.float64), torch.rand(2, 7) < 0.6
    caches = [module.make_cache(2, 9) for module in (whole, split)]

    def both(tokens: torch.Tensor, **options: Any) -> None:
        one, other = (
            module(tokens, cache=cache, **options) for module, cache in zip((whole, split), caches, strict=True)
        )
        torch.testing.assert_close(other, one, atol=1e-12, rtol=1e-12)

    with torch.no_grad():
        both(x[:, :4], mask=masks.causal() & masks.keep(keys=kept[:, :4]))
        both(x[:, 4:7], mask=masks.causal() & masks.keep(torch.rand(3, 7) < 0.5))
        for cache in caches:
            cache.crop(5)
            cache.reorder(torch.tensor([1, 1]))
        both(x[:, 5:6], mask=masks.causal())
        both(x[0, 6:7][None].expand(2, -1, -1))
        with pytest.raises(ClearheadError, match="at most max_length = 9 tokens"):
            split(x, cache=caches[1])
        with pytest.raises(ClearheadError, match="query: expected the same in every process"):
            split(x[:, : 1 + dist.get_rank()], cache=caches[1])
        with pytest.raises(ClearheadError, match="mask keep"):
            split(x[:, :1], mask=masks.keep(keys=kept), cache=caches[1])
        assert caches[1].length == 7
        both(x[:, :1], mask=masks.causal())
        with pytest.raises(ClearheadError, match="positions: expected nothing beside keys that are split"):
            split(x[:, :1], positions=3, cache=caches[1])
        stack = encoder().eval()
        parts = context_parallel(encoder().eval(), line())
        several = parts.make_cache(2, 7)
        steps = [parts(token, mask=masks.causal(), cache=several) for token in x.split((3, 1, 3), 1)]
        torch.testing.assert_close(torch.cat(steps, 1), stack(x, mask=masks.causal()), atol=1e-12, rtol=1e-12)


def test_decoding_in_other_ways(two: Processes) -> None:
    two.run(_decoded_otherwise)
