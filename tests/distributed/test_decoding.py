"""Caches after `context_parallel`: keys that are split over processes, and a memory of which each holds a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.caches import CrossKVCache
from clearhead.distributed import context_parallel, shard_sequence

from .building import EMBED, MASKS, attention, collectives, decoder, encoder, layouts, mask, refuses, sequences
from .comparing import halve_heads, sequence_mesh
from .processes import in_processes, line


def _close(found: Tensor, expected: Tensor, tolerance: float = 1e-12, what: str = "") -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance, msg=what or None)


@in_processes(2, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@torch.no_grad()
def test_decoding_with_keys_that_are_split(dtype: torch.dtype) -> None:
    """A prompt and tokens one by one; every process is given all of them. Of four some have none at first."""
    steps = (5, 1, 1, 3, 1) if dist.get_world_size() == 2 else (1, 1, 3)
    length = sum(steps)
    for name in ("causal", "window", "alibi", "function of heads", "prefix", "none"):
        whole = attention(2, dtype=dtype, position="rotary", sinks=True).eval()
        split = context_parallel(attention(2, dtype=dtype, position="rotary", sinks=True).eval(), line())
        cache, own_cache = (module.make_cache(2, length) for module in (whole, split))
        for tokens in sequences(length, dtype=dtype)[0].split(steps, 1):
            given = mask(name, 2, length)
            expected = whole(tokens, mask=given, cache=cache)
            found = split(tokens, mask=given, cache=own_cache)
            _close(found, expected, 1e-12 if dtype == torch.float64 else 1e-5)
        assert own_cache.length == length
        assert own_cache.local.length in (length // dist.get_world_size(), length // dist.get_world_size() + 1)


@in_processes(2)
@torch.no_grad()
def test_decoding_in_other_ways() -> None:
    """Columns of masks made of tensors, rows that are cropped and reordered, a stack, and what is refused."""
    whole, split = attention(2).eval(), context_parallel(attention(2).eval(), line())
    (x,), kept = sequences(7), torch.rand(2, 7) < 0.6
    caches = [module.make_cache(2, 9) for module in (whole, split)]

    def both(tokens: Tensor, **options: Any) -> None:
        _close(split(tokens, cache=caches[1], **options), whole(tokens, cache=caches[0], **options))

    both(x[:, :4], mask=masks.causal() & masks.keep(keys=kept[:, :4]))
    both(x[:, 4:7], mask=masks.causal() & masks.keep(torch.rand(3, 7) < 0.5))
    for cache in caches:
        cache.crop(5)
        cache.reorder(torch.tensor([1, 1]))
    both(x[:, 5:6], mask=masks.causal())
    both(x[0, 6:7][None].expand(2, -1, -1))
    with refuses("at most max_length = 9 tokens"):
        split(x, cache=caches[1])
    with refuses("query: expected the same in every process"):
        split(x[:, : 1 + dist.get_rank()], cache=caches[1])
    with refuses("mask keep"):
        split(x[:, :1], mask=masks.keep(keys=kept), cache=caches[1])
    assert caches[1].length == 7
    both(x[:, :1], mask=masks.causal())
    with refuses("positions: expected nothing beside keys that are split"):
        split(x[:, :1], positions=3, cache=caches[1])
    stack, parts = encoder().eval(), context_parallel(encoder().eval(), line())
    several = parts.make_cache(2, 7)
    steps = [parts(token, mask=masks.causal(), cache=several) for token in x.split((3, 1, 3), 1)]
    _close(torch.cat(steps, 1), stack(x, mask=masks.causal()))


@in_processes(2, 4)
@layouts
@torch.no_grad()
def test_decoding_with_a_memory(layout: Any) -> None:
    """Greedy decoding: every process is given all new tokens, and its part of the memory in the first call."""
    mesh = sequence_mesh()
    whole, split = decoder().eval(), context_parallel(halve_heads(decoder()).eval(), mesh, layout=layout)
    table = torch.randn(11, EMBED, dtype=torch.float64)
    caches = [module.make_cache(2, 8) for module in (whole, split)]
    for keys, name in ((7, "lengths"), (1, "keys"), (5, "bias"), (8, "function of heads")):
        memories: list[Any] = sequences(keys)
        memories.append(shard_sequence(memories[0], mesh, layout=layout))
        tokens: list[Any] = [table[torch.tensor([[3, 4, 5], [6, 7, 8]])]] * 2
        for number in range(4):
            options = {"mask": masks.causal(), "memory_mask": mask(name, 2, tokens[0].shape[1], keys)}
            outputs = [
                module(new, None if number else memory, cache=cache, **options)
                for module, new, memory, cache in zip((whole, split), tokens, memories, caches, strict=True)
            ]
            _close(outputs[1], outputs[0])
            tokens = [table[(output[:, -1:] @ table.T).argmax(-1)] for output in outputs]
            for layer_cache in (layer for cache in caches for layer in cache):
                if number == 1:
                    layer_cache.reorder(torch.tensor([1, 0]))
                if number == 2:
                    layer_cache.crop(layer_cache.length - 1)
        assert {layer_cache.cross_attention.length for layer_cache in caches[1]} == {memories[1].shape[1]}
        for layer_cache in (layer for cache in caches for layer in cache):
            layer_cache.reset()


@in_processes(2)
@layouts
@torch.no_grad()
def test_cross_attention_with_a_cache(layout: Any) -> None:
    """Every kind of mask of queries and of the whole memory, in the first call and with the memory held."""
    whole = attention(2, sinks=True, softcap=5.0).eval()
    split = context_parallel(attention(2, sinks=True, softcap=5.0).eval(), line(), layout=layout)
    query, memory = sequences(3, 7)
    part = shard_sequence(memory, line(), layout=layout)
    for name in MASKS:
        own = mask(name, 2, 3, 7)
        cache, expected = CrossKVCache(), whole(query, memory, mask=own, cache=CrossKVCache())
        for given in (part, None, part[:, :0]):  # what later calls bring is not looked at
            _close(split(query, given, mask=own, cache=cache), expected, what=name)
    one, cache = whole(query[0], memory[0]), CrossKVCache()
    for given in (part[0], None):
        _close(split(query[0], given, cache=cache), one)
    counts = collectives(lambda: split(query[:1], cache=cache))
    assert counts == {"allgather_base": 2}  # one is the record that processes agree by


@in_processes(2)
@pytest.mark.parametrize("wrong_rank", [0, 1])
@torch.no_grad()
def test_what_is_wrong_with_a_memory_is_refused(wrong_rank: int) -> None:
    """What is wrong with a call on one process, or on all of them, writes into no cache."""
    wrong, split = dist.get_rank() == wrong_rank, context_parallel(attention(2).eval(), line())
    query, memory = sequences(3, 7)
    part, cache = shard_sequence(memory, line()), CrossKVCache()

    def refused(said: str, query: Tensor = query, key: Tensor | None = None, **options: Any) -> None:
        held = cache.length
        with refuses(said):
            split(query, key, **{"cache": cache} | options)
        assert cache.length == held

    refused("key: expected this process's part of the memory, got None", key=None if wrong else part)
    refused("key: expected the module's dtype", key=part.float() if wrong else part)
    refused("query: expected the same in every process", query[:, : 2 if wrong else 3], part)
    refused("as shard_sequence cuts them", key=memory[:, :2] if wrong else part)
    refused("cache: expected the same in every process", key=part, cache=None if wrong else cache)
    refused("mask keep(keys=...): expected (B, S) = (2, 7)", key=part, mask=masks.keep(keys=torch.ones(2, 4)))
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
    rotary = context_parallel(attention(2, position="rotary").eval(), line())
    with refuses("expected one of self-attention"):
        rotary(query, part, cache=CrossKVCache())
    stack = context_parallel(decoder().eval(), line())
    caches = stack.make_cache(2, 5)
    with refuses("key: expected"):  # after the self-attention
        stack(query, part[..., : EMBED - wrong], cache=caches)
    assert [own.length for own in caches] == [0, 0]
    stack(query, part, cache=caches)
    assert [own.length for own in caches] == [3, 3]


@in_processes(2)
@torch.no_grad()
def test_a_forced_kernel_is_refused_beside_processes_without_keys() -> None:
    """A process without keys refuses what those with keys refuse, and no cache is written."""
    split, query = context_parallel(attention(2, dtype=torch.float32).eval(), line()), torch.randn(2, 1, EMBED)
    text, memory = split.make_cache(2, 5), CrossKVCache()
    for cache, key in ((text, None), (memory, shard_sequence(query, line()))):
        with refuses("differs between heads"), clearhead.use_kernel("native"):
            split(query, key, mask=mask("function of heads", 2, 1), cache=cache)
        assert cache.length == 0
        assert split(query, key, cache=cache).shape == query.shape
