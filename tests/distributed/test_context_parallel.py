"""Sequences split over processes: calls, stacks, weights, dropout, what is refused, and the collectives.

Outputs and gradients of every mask, method and layout are in test_every_case.py, caches in test_decoding.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import clearhead
from clearhead import masks
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel
from clearhead.transformer import EncoderLayer, FeedForward
from tests.support.native import needs_native

from .building import (
    DIM,
    EMBED,
    HEADS,
    attention,
    decoder,
    encoder,
    full,
    gradients,
    layouts,
    mask,
    methods,
    passes,
    refuses,
    sequences,
)
from .comparing import compare_in_parts, halve_heads, sequence_mesh
from .processes import in_processes, line, processes, square


@in_processes(2)
@layouts
@methods
def test_positions(method: str, layout: Any) -> None:
    """Positions of the whole sequence: a start, of each token, of each item with padding; frequencies of its length."""
    whole, (x,) = attention(4, position="rotary"), sequences(13)
    places = torch.arange(13).expand(2, 13).clone() * 2
    places[1, 9:] = -1
    documents = masks.documents(torch.arange(40) // 7)
    for positions in (11, places[0], places):
        options: Any = {"method": method, "layout": layout, "positions": positions, "what": str(positions)}
        compare_in_parts(whole, line(), x, mask=masks.causal() & masks.sliding_window(9, 0), **options)
        if positions is not places:
            compare_in_parts(whole, line(), x, mask=documents, **options)
    of_axes = torch.arange(2 * 2 * 13).view(2, 2, 13) % 17
    options = {"method": method, "layout": layout, "mask": masks.causal()}
    for positions in (None, of_axes):
        compare_in_parts(attention(4, position="axes"), line(), x, positions=positions, what="axes", **options)
    compare_in_parts(attention(4, position="log scale"), line(), x, what="log scale", **options)
    scaled = attention(4, position="rotary of the length")
    for positions in (None, 3, places):
        compare_in_parts(scaled, line(), x, positions=positions, method=method, layout=layout, what=f"{positions}")


@in_processes(2)
@layouts
@methods
def test_cross_attention_and_no_batch(method: str, layout: Any) -> None:
    whole, (query, key) = attention(4, sinks=True), sequences(11, 7)
    options: Any = {"method": method, "layout": layout}
    for name in ("none", "bottom right", "lengths", "heads", "bias", "window"):
        compare_in_parts(whole, line(), query, key, mask=mask(name, 2, 11, 7), what=name, **options)
    compare_in_parts(whole, line(), query, key, key.flip(0), **options)
    compare_in_parts(whole, line(), query[0], key[0], mask=masks.causal(), **options)
    compare_in_parts(whole, line(), query[:, :1], key, **options)


@in_processes(2)
@layouts
def test_layers_and_stacks(layout: Any) -> None:
    x, memory = sequences(9, 5)
    compare_in_parts(encoder().layers[0], line(), x, mask=mask("documents", 2, 9), layout=layout)
    both: Any = {"mask": mask("heads", 2, 9), "memory_mask": mask("lengths", 2, 9, 5)}
    compare_in_parts(decoder(), line(), x, memory, layout=layout, **both)


@in_processes(2)
@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_heads_give_the_same_bits(dtype: torch.dtype, layout: Any) -> None:
    """Outputs and gradients are those of one process, of the same projected queries, keys and values."""
    cut = partial(shard_sequence, mesh=line(), layout=layout)
    for kv_heads in (8, 4, 2, 1):
        torch.manual_seed(3)
        *projected, factors = (torch.randn(2, 37, n * DIM, dtype=dtype) for n in (HEADS, kv_heads, kv_heads, HEADS))
        found: list[list[Any]] = []
        for part in (torch.clone, cut):
            module, inputs = (
                attention(kv_heads, dtype=dtype, position="rotary"),
                [part(x).requires_grad_() for x in projected],
            )
            for name, x in zip(("q_proj", "k_proj", "v_proj"), inputs, strict=True):
                getattr(module, name).register_forward_hook(lambda *_, x=x: x)
            module.out_proj.register_forward_hook(lambda _, inputs, output: inputs[0])
            if part is cut:
                context_parallel(module, line(), method="heads", layout=layout)
            output = module(part(torch.zeros_like(factors)), mask=masks.causal())
            (output * part(factors)).sum().backward()
            found.append([output, *(x.grad for x in inputs)])
        same = 1 if kv_heads == 1 else 4  # gradients of a shared head are added up
        for one, other in [*zip(*found, strict=True)][:same]:
            assert torch.equal(other, cut(one))


@in_processes(4)
@pytest.mark.parametrize("way", ["heads", "tensor"])
def test_gradients_of_a_shared_head_are_rounded_after_they_are_added(way: str) -> None:
    """The gradient of the bias of values, of one key/value head whose four query heads each have a process."""
    module: Any = clearhead.MultiHeadAttention(16, 4, num_kv_heads=1, dtype=torch.bfloat16)
    with torch.no_grad():
        module.q_proj.weight.zero_()  # all weights are a quarter
        module.out_proj.weight.copy_(torch.eye(16))
    factors = torch.tensor([256.0, 1.0, 1.0, 1.0]).to(torch.bfloat16).repeat_interleave(4)
    x, expected = torch.ones(1, 4, 16, dtype=torch.bfloat16), 259.0  # 256 + 1 is 256 in bfloat16
    if way == "tensor":
        split, expected = tensor_parallel(module, line()), 4 * expected
    else:
        split, x = context_parallel(module, line(), method="heads"), shard_sequence(x, line())
    (split(x) * factors).sum().backward()
    assert torch.equal(full(split.v_proj.bias.grad), torch.full((4,), expected).to(torch.bfloat16))


@in_processes(2)
def test_collectives() -> None:
    for method, expected in (
        # The record that processes agree by, and on gloo an all-to-all for the all-gather of keys and values.
        ("gather", [{"allgather_base": 1, "alltoall_base": 1}, {"reduce_scatter": 1}]),
        ("heads", [{"allgather_base": 1, "alltoall_base": 2}, {"alltoall_base": 2}]),
    ):
        module = context_parallel(attention(4, position="rotary", sinks=True), line(), method=method)  # type: ignore[arg-type]
        assert passes(module, *sequences(9), mask=masks.causal()) == expected


@in_processes(4)
def test_a_ring_sends_four_blocks_of_a_part_three_times_and_their_gradients_too() -> None:
    module = context_parallel(attention(4), line(), method="ring")
    x = shard_sequence(torch.randn(1, 2048, EMBED, dtype=torch.float64), line())
    assert [counts["send"] for counts in passes(module, x)] == [12, 24]


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
    with processes(1) as one:
        one.run(_no_overhead)


@in_processes(2)
@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_what_one_process_cannot_split_is_refused_on_all(wrong_rank: int) -> None:
    module, method = context_parallel(attention(4), line()), "method: expected 'auto', 'heads', 'gather' or 'ring', got"
    calls: list[tuple[Any, dict[str, Any], str]] = [
        (context_parallel, {"mesh": None}, "mesh: expected a DeviceMesh, got NoneType"),
        (context_parallel, {"method": "ulysses"}, f"{method} 'ulysses'"),
        (context_parallel, {"layout": 3}, "layout: expected"),
        (context_parallel, {"module": None}, "module: expected a MultiHeadAttention, or a layer"),
        (context_parallel, {"module": module}, "got one after context_parallel"),
        (tensor_parallel, {"module": module}, "got one after context_parallel"),
    ]
    for split, wrong, said in calls:
        good = {"mesh": line(), "module": attention(4)}
        with refuses(said):
            split(**(good | (wrong if dist.get_rank() == wrong_rank else {})))


@in_processes(2)
def test_keys_that_no_position_part_can_rotate_are_refused_by_all() -> None:
    """Lengths of parts say nothing about those of the whole: 3 and 2 of queries, 2 and 2 of keys."""
    module = context_parallel(attention(4, position="rotary"), line())
    query, key = (shard_sequence(x, line()) for x in sequences(5, 4))
    with refuses("key: expected the query's length 5: a position part"):
        module(query, key)
    assert module(query).shape == query.shape


@in_processes(2)
@methods
def test_a_forced_kernel_computes_or_refuses_all_parts(method: Any) -> None:
    """With a part that is empty: it alone would refuse nothing, or refuse what the others compute."""
    whole, x = attention(4, dtype=torch.float32), torch.randn(2, 1, EMBED)
    for name in ("native",) if method == "ring" else ("sdpa", "native"):
        with clearhead.use_kernel(name):
            compare_in_parts(whole, line(), x, method=method, what=name)
    split = context_parallel(attention(4), line(), method=method)
    part = shard_sequence(x.double(), line()).requires_grad_()
    name, why = ("sdpa", "PyTorch does not give out the log-sum-exp") if method == "ring" else ("native", "it computes")
    with refuses(f"use_kernel({name!r}): this kernel cannot run the call: {why}"), clearhead.use_kernel(name):
        split(part)
    split(part).sum().backward()


@in_processes(2)
def test_what_every_process_refuses() -> None:
    mesh, x = line(), torch.zeros(2, 4, EMBED, dtype=torch.float64)
    module: Any = context_parallel(attention(4), mesh)
    with refuses("mask lengths(...): expected lengths of at most S = 8 keys, got a length of 9"):
        module(x, mask=masks.lengths(torch.tensor([9, 1])))
    with refuses("mask keep(...): expected a shape that broadcasts to"):
        module(x, mask=masks.keep(torch.ones(4, 8)))
    with refuses("positions: expected positions of the whole sequence, (8,)"):
        module(x, positions=torch.arange(4))
    dropping: Any = context_parallel(attention(4, dropout=0.1), mesh)
    for kernel in ("sdpa", "flex"):
        said = f"context_parallel: use_kernel({kernel!r}) cannot drop the weights that one process drops"
        with refuses(said), clearhead.use_kernel(kernel):
            dropping(x)


@in_processes(3)
def test_heads_that_do_not_divide_are_gathered() -> None:
    with refuses('expected "heads" where the mesh\'s W = 3 divides H'):
        context_parallel(attention(HEADS), line(), method="heads")
    compare_in_parts(attention(HEADS), line(), *sequences(7), mask=masks.causal())


@in_processes(2, 4)
@layouts
@methods
def test_the_weights_that_one_process_drops_are_dropped(method: str, layout: Any) -> None:
    """The first process's seed is that of all: what one process drops is what parts of it drop."""
    kernels = (("chunked", torch.float32), *((None, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)))
    for kernel, dtype in kernels:
        whole, (x,) = attention(2, dtype=dtype, dropout=0.3, sinks=True), sequences(21, dtype=dtype)
        options: Any = {"method": method, "layout": layout, "prepare": halve_heads, "mask": masks.causal()}
        with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
            compare_in_parts(whole, sequence_mesh(), x, **options)


@needs_native
@in_processes(2)
@methods
def test_parts_that_drop_weights_run_on_native(method: Any) -> None:
    """Kernels round differently: that the results are the same to the bit tells which one computed them."""
    module = context_parallel(attention(2, dtype=torch.float32, dropout=0.3), line(), method=method)
    part = shard_sequence(torch.randn(2, 37, EMBED), line())
    found = []
    for kernel in (None, "native"):
        torch.manual_seed(4)
        with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
            output = module(part, mask=masks.causal())
        output.square().sum().backward()
        found.append([output, *gradients(module).values()])
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def _dropped_elsewhere() -> tuple[torch.Tensor, torch.Tensor]:
    """What is dropped on the residual, and the output; with the seed of this part of the sequence."""
    mesh = square()
    layer = EncoderLayer(EMBED, attention(4, dropout=0.2), FeedForward(EMBED, 24), dropout=0.3).double()
    split = context_parallel(tensor_parallel(layer, mesh["tp"]), mesh["cp"])
    dropped: list[torch.Tensor] = []
    split.dropout.register_forward_hook(lambda _, inputs, output: dropped.append(output == 0))
    x = shard_sequence(*sequences(8), mesh["cp"])
    torch.manual_seed(mesh["cp"].get_local_rank())
    output = split(x).detach()
    assert [len(each) for each in dropped] == [2, 2]  # of both parts of the layer
    return torch.stack(dropped), output


def test_what_is_dropped_on_the_residual_differs_between_parts_alone(groups: Any) -> None:
    found = groups(4).run(_dropped_elsewhere)
    for one, other in (found[:2], found[2:]):  # processes that share the heads
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert 0.2 < found[0][0].double().mean() < 0.4
    assert not torch.equal(found[0][0], found[2][0])


@in_processes(4)
@methods
def test_heads_are_split_too_and_a_part_has_no_position(method: str) -> None:
    """Two processes without a position, whose parameters are split and get the gradients of the others."""
    options: Any = {"method": method, "prepare": halve_heads, "mask": masks.causal()}
    shared_head, own_norms = attention(1, position="rotary"), attention(4, q_norm="per head", sinks=True)
    for module in (encoder(), encoder(gated=True), shared_head, own_norms):
        compare_in_parts(module, sequence_mesh(), *sequences(1), **options)
