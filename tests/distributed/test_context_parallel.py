"""Sequences split over processes: calls, stacks, weights, dropout, caches, what is refused, and the collectives.

Outputs and gradients of every mask, method and layout are in test_every_case.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

import clearhead
from clearhead import masks
from clearhead.caches import CrossKVCache
from clearhead.distributed import context_parallel, gather_sequence, shard_sequence, tensor_parallel
from clearhead.distributed._layout import LAYOUTS, Layout
from clearhead.errors import ClearheadError
from clearhead.transformer import EncoderLayer, FeedForward
from tests.support.native import needs_native

from .building import (
    DIM,
    EMBED,
    HEADS,
    MASKS,
    attention,
    collectives,
    decoder,
    encoder,
    full,
    gradients,
    mask,
    require_close,
)
from .comparing import compare_in_parts
from .meshes import line, square
from .processes import Processes

METHODS = ("heads", "gather", "ring")


def _positions(method: str, layout: Layout) -> None:
    """Positions of the whole sequence: a start, of each token, of each item with padding; frequencies of its length."""
    whole, x = attention(4, position="rotary"), torch.randn(2, 13, EMBED, dtype=torch.float64)
    places = torch.arange(13).expand(2, 13).clone() * 2
    places[1, 9:] = -1
    documents = masks.documents(torch.arange(40) // 7)
    for positions in (11, places[0], places):
        options: Any = {"method": method, "layout": layout, "positions": positions, "what": str(positions)}
        compare_in_parts(whole, line(), x, mask=masks.causal() & masks.sliding_window(9, 0), **options)
        if positions is not places:
            compare_in_parts(whole, line(), x, mask=documents, **options)
    scaled = attention(4, position="rotary of the length")
    for positions in (None, 3, places):
        options = {"method": method, "layout": layout, "positions": positions, "what": f"scaled {positions}"}
        compare_in_parts(scaled, line(), x, **options)


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


def _adapted(method: str, layout: Layout) -> None:
    """peft's LoRA layers, whose matrices alone learn; put on before the sequence is split, and after it."""
    from peft import LoraConfig, get_peft_model

    def adapted(module: Any) -> Any:
        targets = ["q_proj", "v_proj", "out_proj", "linear1"]
        torch.manual_seed(8)
        module = get_peft_model(module, LoraConfig(r=3, target_modules=targets, init_lora_weights=False))
        return module.base_model.model.double()  # type: ignore[operator, union-attr]

    def split(module: Any) -> Any:
        return context_parallel(module, line(), method=method, layout=layout)  # type: ignore[arg-type]

    x, factors = torch.randn(2, 2, 9, EMBED, dtype=torch.float64)
    found = []
    for module, given in (
        (adapted(encoder()), (x, factors)),
        (split(adapted(encoder())), [shard_sequence(each, line(), layout=layout) for each in (x, factors)]),
        (adapted(split(encoder())), [shard_sequence(each, line(), layout=layout) for each in (x, factors)]),
    ):
        output = module(given[0], mask=masks.causal())
        (output * given[1]).sum().backward()
        learnt = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        assert len(learnt) == 2 * 2 * 4
        assert all("lora" in name for name in learnt)
        found.append({"output": output.detach()} | learnt)
    whole = found[0] | {"output": shard_sequence(found[0]["output"], line(), layout=layout)}
    for own in found[1:]:
        assert own.keys() == whole.keys()
        for name, number in whole.items():
            if name != "output":
                dist.all_reduce(own[name])
            require_close(own[name], number, 1e-12, name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_lora_layers(two: Processes, method: str, layout: Layout) -> None:
    two.run(_adapted, method, layout)


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


def _same_bits_backward(dtype: torch.dtype, layout: Layout) -> None:
    """Gradients too are computed as one process does, of the projected queries, keys and values."""
    for kv_heads in (8, 4, 2):
        torch.manual_seed(3)
        whole = [torch.randn(2, 37, heads * DIM, dtype=dtype).requires_grad_() for heads in (HEADS, kv_heads, kv_heads)]
        parts = [shard_sequence(x.detach(), line(), layout=layout).clone().requires_grad_() for x in whole]
        x, factors = torch.zeros(2, 37, EMBED, dtype=dtype), torch.randn(2, 37, EMBED, dtype=dtype)
        outputs = []
        for projected in (whole, parts):
            module = attention(kv_heads, dtype=dtype, position="rotary")
            given: tuple[torch.Tensor, torch.Tensor] = x, factors
            for name, own in zip(("q_proj", "k_proj", "v_proj"), projected, strict=True):
                getattr(module, name).register_forward_hook(lambda *_, own=own: own)
            module.out_proj.register_forward_hook(lambda _, inputs, output: inputs[0])
            if projected is parts:
                context_parallel(module, line(), method="heads", layout=layout)
                given = tuple(shard_sequence(each, line(), layout=layout) for each in given)  # type: ignore[assignment]
            output = module(given[0], mask=masks.causal())
            (output * given[1]).sum().backward()
            outputs.append(output.detach())
        assert torch.equal(outputs[1], shard_sequence(outputs[0], line(), layout=layout))
        for name, own, one in zip("qkv", parts, whole, strict=True):
            assert own.grad is not None
            assert one.grad is not None
            assert torch.equal(own.grad, shard_sequence(one.grad, line(), layout=layout)), (name, kv_heads)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_heads_give_the_same_bits_of_gradients(two: Processes, dtype: torch.dtype, layout: Layout) -> None:
    two.run(_same_bits_backward, dtype, layout)


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


def _sends() -> tuple[int, ...]:
    """Blocks that a ring sends forward and backward."""
    module = context_parallel(attention(4), line(), method="ring")
    x = shard_sequence(torch.randn(1, 2048, EMBED, dtype=torch.float64), line())
    outputs: list[torch.Tensor] = []
    calls = (lambda: outputs.append(module(x)), lambda: outputs[0].sum().backward())
    return tuple(collectives(call)["send"] for call in calls)


def test_a_ring_sends_four_blocks_of_a_part_three_times_and_their_gradients_too(four: Processes) -> None:
    assert four.run(_sends) == [(12, 24)] * 4


def test_collectives(two: Processes) -> None:
    for method, forward, backward in (
        # The record that processes agree by, and on gloo an all-to-all for the all-gather of keys and values.
        ("gather", {"allgather_base": 1, "alltoall_base": 1}, {"reduce_scatter": 1}),
        ("heads", {"allgather_base": 1, "alltoall_base": 2}, {"alltoall_base": 2}),
    ):
        for counts in two.run(_collectives, method):
            assert counts == [forward, backward]


def _no_overhead() -> None:
    for made in (attention(4), encoder(), decoder()):
        module = context_parallel(tensor_parallel(made, line()), line())
        for part in module.modules():
            assert not part._forward_pre_hooks
            assert not part._forward_hooks
            if isinstance(part, clearhead.MultiHeadAttention):
                assert part.sequence_shard is None
                assert part.head_shard is None
        for parameter in module.parameters():
            assert type(parameter) is torch.nn.Parameter
            assert not parameter._post_accumulate_grad_hooks


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


def _rotated_memory() -> None:
    """Lengths of parts say nothing about those of the whole: 3 and 2 of queries, 2 and 2 of keys."""
    module = context_parallel(attention(4, position="rotary"), line())
    query, key = (shard_sequence(torch.zeros(2, n, EMBED, dtype=torch.float64), line()) for n in (5, 4))
    with pytest.raises(ClearheadError, match="key: expected the query's length 5: a position part"):
        module(query, key)
    assert module(query).shape == query.shape


def test_keys_that_no_position_part_can_rotate_are_refused_by_all(two: Processes) -> None:
    two.run(_rotated_memory)


def _forced(method: str) -> None:
    """With a part that is empty: it alone would refuse nothing, or refuse what the others compute."""
    whole, x = attention(4, dtype=torch.float32), torch.randn(2, 1, EMBED)
    for name in ("native",) if method == "ring" else ("sdpa", "native"):
        with clearhead.use_kernel(name):
            compare_in_parts(whole, line(), x, method=method, what=name)
    split = context_parallel(attention(4), line(), method=method)  # type: ignore[arg-type]
    part = shard_sequence(x.double(), line()).requires_grad_()
    name, why = ("sdpa", "PyTorch does not give out the log-sum-exp") if method == "ring" else ("native", "it computes")
    with (
        pytest.raises(ClearheadError, match=rf"use_kernel\('{name}'\): this kernel cannot run the call: {why}"),
        clearhead.use_kernel(name),
    ):
        split(part)
    split(part).sum().backward()


@pytest.mark.parametrize("method", METHODS)
def test_a_forced_kernel_computes_or_refuses_all_parts(two: Processes, method: str) -> None:
    two.run(_forced, method)


def _one_wants_a_gradient() -> None:
    module = attention(4)
    for projection in (module.k_proj, module.v_proj):
        projection.requires_grad_(False)
    split, x = context_parallel(module, line(), method="gather"), torch.zeros(2, 4, EMBED, dtype=torch.float64)
    with pytest.raises(ClearheadError, match="gradients: expected the same in every process"):
        split(x.requires_grad_(dist.get_rank() == 0))
    split(x.requires_grad_()).sum().backward()


def test_a_gradient_that_one_process_wants_alone_is_refused(two: Processes) -> None:
    two.run(_one_wants_a_gradient)


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
    for kernel in ("sdpa", "flex"):
        said = rf"context_parallel: use_kernel\('{kernel}'\) cannot drop the weights that one process drops"
        with pytest.raises(ClearheadError, match=said), clearhead.use_kernel(kernel):
            dropping(x)
    with pytest.raises(ClearheadError, match="got one after context_parallel"):
        context_parallel(module, mesh)
    with pytest.raises(ClearheadError, match="got one after context_parallel"):
        tensor_parallel(module, mesh)
    with pytest.raises(ClearheadError, match=r"method: expected 'auto', 'heads', 'gather' or 'ring', got 'ulysses'"):
        context_parallel(attention(4), mesh, method="ulysses")  # type: ignore[arg-type]
    with pytest.raises(ClearheadError, match="expected a MultiHeadAttention, or a layer"):
        context_parallel(torch.nn.Linear(2, 2), mesh)  # type: ignore[type-var]
    latent = clearhead.MultiHeadLatentAttention(
        EMBED, 4, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4
    )
    with pytest.raises(ClearheadError, match=r"got MultiHeadLatentAttention\. Its latents belong to no head"):
        context_parallel(latent, mesh)  # type: ignore[type-var]
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


def _dropped(method: str, layout: Layout, dtype: torch.dtype, kernel: str | None, sharded: bool = False) -> None:
    """The first process's seed is that of all: what one process drops is what parts of it drop."""
    whole, x = attention(2, dtype=dtype, dropout=0.3, sinks=True), torch.randn(2, 21, EMBED, dtype=dtype)
    mesh = square()["cp"] if sharded else line()
    options: Any = {"method": method, "layout": layout, "mask": masks.causal()}
    if sharded:
        options["prepare"] = lambda module: tensor_parallel(module, square()["tp"])
    with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
        compare_in_parts(whole, mesh, x, seed=dist.get_rank() if not sharded else 4, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_the_weights_that_one_process_drops_are_dropped(two: Processes, method: str, layout: Layout) -> None:
    for dtype in (torch.float64, torch.float32):
        two.run(_dropped, method, layout, dtype, "chunked")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        two.run(_dropped, method, layout, dtype, None)


@needs_native
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_native_drops_what_it_drops_on_one_process(two: Processes, method: str, layout: Layout) -> None:
    two.run(_dropped, method, layout, torch.float32, "native")


def test_dropped_weights_with_heads_split_too(four: Processes) -> None:
    for method in METHODS:
        for dtype in (torch.float64, torch.float32):
            four.run(_dropped, method, "zigzag", dtype, None, True)


def _chosen(method: str) -> None:
    """Kernels round differently: that the results are the same to the bit tells which one computed them."""
    module = context_parallel(attention(2, dtype=torch.float32, dropout=0.3), line(), method=method)  # type: ignore[arg-type]
    part = shard_sequence(torch.randn(2, 37, EMBED), line())
    found = []
    for kernel in (None, "native"):
        torch.manual_seed(4)
        with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
            output = module(part, mask=masks.causal())
        output.square().sum().backward()
        found.append([output, *gradients(module).values()])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


@needs_native
@pytest.mark.parametrize("method", METHODS)
def test_parts_that_drop_weights_run_on_native(two: Processes, method: str) -> None:
    two.run(_chosen, method)


def _dropped_elsewhere() -> tuple[torch.Tensor, torch.Tensor]:
    """What is dropped on the residual, and the output; with the seed of this part of the sequence."""
    mesh = square()
    layer = EncoderLayer(EMBED, attention(4, dropout=0.2), FeedForward(EMBED, 24), dropout=0.3).double()
    split = context_parallel(tensor_parallel(layer, mesh["tp"]), mesh["cp"])
    dropped: list[torch.Tensor] = []
    split.dropout.register_forward_hook(lambda _, inputs, output: dropped.append(output == 0))
    x = shard_sequence(torch.randn(2, 8, EMBED, dtype=torch.float64), mesh["cp"])
    torch.manual_seed(mesh["cp"].get_local_rank())
    output = split(x).detach()
    assert [len(each) for each in dropped] == [2, 2]  # of both parts of the layer
    return torch.stack(dropped), output


def test_what_is_dropped_on_the_residual_differs_between_parts_alone(four: Processes) -> None:
    found = four.run(_dropped_elsewhere)
    for one, other in (found[:2], found[2:]):  # processes that share the heads
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert 0.2 < found[0][0].double().mean() < 0.4
    assert not torch.equal(found[0][0], found[2][0])


def _few_positions(method: str) -> None:
    """Two processes without a position, whose parameters are split and get the gradients of the others."""
    mesh = square()
    for module in (
        encoder(),
        encoder(gated=True),
        attention(1, position="rotary"),
        attention(4, q_norm="per head", sinks=True),
    ):
        for length in (1, 3):
            x = torch.randn(2, length, EMBED, dtype=torch.float64)
            split = lambda split: tensor_parallel(split, mesh["tp"])  # noqa: E731
            compare_in_parts(module, mesh["cp"], x, method=method, prepare=split, mask=masks.causal())


@pytest.mark.parametrize("method", METHODS)
def test_heads_are_split_too_and_a_part_has_no_position(four: Processes, method: str) -> None:
    four.run(_few_positions, method)


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
        assert caches[1].local.length in (length // dist.get_world_size(), length // dist.get_world_size() + 1)


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


@torch.no_grad()
def _decoded_with_memory(layout: Layout, lengths: tuple[int, ...], heads_split: bool = False) -> None:
    """Greedy decoding: every process is given all new tokens, and its part of the memory in the first call."""
    mesh, prepared = (
        (square()["cp"], tensor_parallel(decoder(), square()["tp"])) if heads_split else (line(), decoder())
    )
    whole, split = decoder().eval(), context_parallel(prepared.eval(), mesh, layout=layout)
    table = torch.randn(11, EMBED, dtype=torch.float64)
    caches = [module.make_cache(2, 8) for module in (whole, split)]
    for keys, name in zip(lengths, ("lengths", "keys", "bias", "function of heads"), strict=False):
        memories: list[Any] = [torch.randn(2, keys, EMBED, dtype=torch.float64)]
        memories.append(shard_sequence(memories[0], mesh, layout=layout))
        found: list[Any] = [table[torch.tensor([[3, 4, 5], [6, 7, 8]])]] * 2
        for number in range(4):
            options = {"mask": masks.causal(), "memory_mask": mask(name, 2, found[0].shape[1], keys)}
            found = [
                module(tokens, None if number else memory, cache=cache, **options)
                for module, tokens, memory, cache in zip((whole, split), found, memories, caches, strict=True)
            ]
            torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=1e-12)
            found = [table[(output[:, -1:] @ table.T).argmax(-1)] for output in found]
            for own in (layer for cache in caches for layer in cache):
                if number == 1:
                    own.reorder(torch.tensor([1, 0]))
                if number == 2:
                    own.crop(own.length - 1)
        assert {own.cross_attention.length for own in caches[1]} == {memories[1].shape[1]}
        for own in (layer for cache in caches for layer in cache):
            own.reset()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decoding_with_a_memory(two: Processes, layout: Layout) -> None:
    two.run(_decoded_with_memory, layout, (7, 1, 5, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decoding_with_a_memory_and_more_processes(four: Processes, layout: Layout) -> None:
    four.run(_decoded_with_memory, layout, (3, 9, 14, 2))
    four.run(_decoded_with_memory, layout, (3, 9), True)


@torch.no_grad()
def _memory_of_an_attention(layout: Layout) -> None:
    """Every kind of mask of queries and of the whole memory, in the first call and with the memory held."""
    mesh = line()
    whole = attention(2, sinks=True, softcap=5.0).eval()
    split = context_parallel(attention(2, sinks=True, softcap=5.0).eval(), mesh, layout=layout)
    query, memory = torch.randn(2, 3, EMBED, dtype=torch.float64), torch.randn(2, 7, EMBED, dtype=torch.float64)
    part = shard_sequence(memory, mesh, layout=layout)
    for name in MASKS:
        own = mask(name, 2, 3, 7)
        cache, expected = CrossKVCache(), whole(query, memory, mask=own, cache=CrossKVCache())
        for given in (part, None, part[:, :0]):  # what later calls bring is not looked at
            found = split(query, given, mask=own, cache=cache)
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12, msg=name)
    one, cache = whole(query[0], memory[0]), CrossKVCache()
    for given in (part[0], None):
        torch.testing.assert_close(split(query[0], given, cache=cache), one, atol=1e-12, rtol=1e-12)
    counts = collectives(lambda: split(query[:1], cache=cache))
    assert counts == {"allgather_base": 2}  # one is the record that processes agree by


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cross_attention_with_a_cache(two: Processes, layout: Layout) -> None:
    two.run(_memory_of_an_attention, layout)


@torch.no_grad()
def _memory_refused(wrong_rank: int) -> None:
    """What is wrong with a call on one process, or on all of them, writes into no cache."""
    mesh, wrong = line(), dist.get_rank() == wrong_rank
    split = context_parallel(attention(2).eval(), mesh)
    query, memory = torch.randn(2, 3, EMBED, dtype=torch.float64), torch.randn(2, 7, EMBED, dtype=torch.float64)
    part, cache = shard_sequence(memory, mesh), CrossKVCache()

    def refused(said: str, query: torch.Tensor = query, key: torch.Tensor | None = None, **options: Any) -> None:
        held = cache.length
        with pytest.raises(ClearheadError, match=said):
            split(query, key, **{"cache": cache} | options)
        assert cache.length == held

    refused("key: expected this process's part of the memory, got None", key=None if wrong else part)
    refused("key: expected the module's dtype", key=part.float() if wrong else part)
    refused("query: expected the same in every process", query[:, : 2 if wrong else 3], part)
    refused("as shard_sequence cuts them", key=memory[:, :2] if wrong else part)
    refused("cache: expected the same in every process", key=part, cache=None if wrong else cache)
    refused(r"mask keep\(keys=...\): expected \(B, S\) = \(2, 7\)", key=part, mask=masks.keep(keys=torch.ones(2, 4)))
    expected = split(query, part, cache=cache)
    for change in (lambda: cache.reorder(torch.tensor([0])), cache.reset):
        undo = cache.saved(0)
        if wrong:
            change()
        refused("cache: expected the same in every process", key=part)
        undo()
    refused("equal batch sizes", query[:1])
    with torch.enable_grad():
        refused("query: expected no gradients beside keys that are split")
    assert torch.equal(split(query, cache=cache), expected)
    rotary = context_parallel(attention(2, position="rotary").eval(), mesh)
    with pytest.raises(ClearheadError, match="expected one of self-attention"):
        rotary(query, part, cache=CrossKVCache())
    stack = context_parallel(decoder().eval(), mesh)
    caches = stack.make_cache(2, 5)
    with pytest.raises(ClearheadError, match="key: expected"):  # after the self-attention
        stack(query, part[..., : EMBED - wrong], cache=caches)
    assert [own.length for own in caches] == [0, 0]
    stack(query, part, cache=caches)
    assert [own.length for own in caches] == [3, 3]


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_what_is_wrong_with_a_memory_is_refused(two: Processes, wrong_rank: int) -> None:
    two.run(_memory_refused, wrong_rank)


@torch.no_grad()
def _forced_kernel_refused() -> None:
    """A process without keys refuses what those with keys refuse, and no cache is written."""
    split, query = context_parallel(attention(2, dtype=torch.float32).eval(), line()), torch.randn(2, 1, EMBED)
    text, memory = split.make_cache(2, 5), CrossKVCache()
    for cache, key in ((text, None), (memory, shard_sequence(query, line()))):
        with pytest.raises(ClearheadError, match="differs between heads"), clearhead.use_kernel("native"):
            split(query, key, mask=mask("function of heads", 2, 1), cache=cache)
        assert cache.length == 0
        assert split(query, key, cache=cache).shape == query.shape


def test_a_forced_kernel_is_refused_beside_processes_without_keys(two: Processes) -> None:
    two.run(_forced_kernel_refused)
