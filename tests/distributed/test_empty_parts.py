"""Parts without a position, whole sequences of none, and batches of every size near those of a module's features."""

from __future__ import annotations

import copy
import time
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import clearhead
from clearhead import masks
from clearhead.distributed import tensor_parallel
from clearhead.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, SwiGLU

from .building import HeadNorm, passes, require_close
from .comparing import EVERY_STATISTIC, compare_heads, compare_in_parts, compare_records
from .processes import in_processes, line, processes, square

#: E of the modules; projections of 16 and 8 features have 8 and 4 of them on a process.
EMBED = 16
BATCHES = (*range(1, 18), 32)


def _attention(batch: int = 1) -> Any:
    torch.manual_seed(5)
    parts: dict[str, Any] = {"num_kv_heads": 2, "sinks": True} if batch % 2 else {}
    if batch % 5 == 3:
        parts |= {"q_norm": nn.RMSNorm(4), "k_norm": HeadNorm(parts.get("num_kv_heads", 4), 4)}
    return clearhead.MultiHeadAttention(EMBED, 4, **parts).double()


def _compare(cases: tuple[tuple[int, int], ...], recorded: tuple[int, ...] = BATCHES) -> None:
    """Outputs and gradients, and statistics of batches of the sizes `recorded`."""
    over_sequence = torch.distributed.get_world_size() == 4
    heads, mesh = (square()["tp"], square()["cp"]) if over_sequence else (line(), None)
    for batch, length in cases:
        whole, x = _attention(batch), torch.randn(batch, length, EMBED, dtype=torch.float64)
        options: Any = {"layout": "zigzag" if batch % 3 else "contiguous", "what": f"{batch, length}"}
        options["mask"] = masks.causal()
        prepare = lambda module: tensor_parallel(module, heads)  # noqa: E731
        split = compare_in_parts(whole, mesh, x, method="gather" if batch % 2 else "ring", prepare=prepare, **options)
        if batch in recorded:
            compare_records(whole, split, x, mesh, EVERY_STATISTIC, **options)


def test_a_batch_of_as_many_items_as_features() -> None:
    """Under a time-out of its own: these calls once never returned, and no time-out of a group ends a loop."""
    with processes(2) as own:
        own.run(_compare, ((16, 0), (8, 0)), (), seconds=30)


@in_processes(2, seconds=90)
def test_heads_of_no_position() -> None:
    """B is a number of features of a projection, or divides none."""
    _compare((*product((1, 4, 5, 17, 32), (0,)), (3, 1), (8, 3), (16, 1)), (3, 16))


@in_processes(4, seconds=90)
def test_heads_of_parts_without_a_position() -> None:
    _compare(((16, 1), (3, 1), (5, 0)))


@pytest.mark.slow
@in_processes(2, 4, seconds=300)
def test_every_size_of_a_batch() -> None:
    _compare(tuple(product(BATCHES, (0, 1, 3))))


@in_processes(2)
def test_stacks_and_other_calls_of_no_position() -> None:
    """Layers and stacks, cross-attention from or to nothing, weights, caches, and inputs without a batch."""
    nothing, memory = torch.zeros(16, 0, EMBED, dtype=torch.float64), torch.randn(16, 5, EMBED, dtype=torch.float64)
    for part in (FeedForward(EMBED, 24), SwiGLU(EMBED, 8)):
        layers = [EncoderLayer(EMBED, _attention(), part, norm_first=first) for first in (True, False)]
        compare_heads(Encoder(layers, norm=nn.RMSNorm(EMBED)).double(), nothing)
    decoder = Decoder([DecoderLayer(EMBED, _attention(), _attention(), SwiGLU(EMBED, 8))]).double()
    for query, key in ((nothing, memory), (memory, nothing), (nothing, nothing)):
        compare_heads(decoder, query, key)
        compare_heads(_attention(), query, key)
    compare_heads(_attention(), nothing[:0])
    whole = _attention()
    split = tensor_parallel(copy.deepcopy(whole), line())
    for average in (True, False):
        options: Any = {"need_weights": True, "average_attn_weights": average}
        for query, key in ((nothing, memory), (memory, nothing), (nothing[0], nothing[0])):
            for found, expected in zip(split(query, key, **options), whole(query, key, **options), strict=True):
                require_close(found, expected, 1e-12)
    assert split(nothing[0]).shape == (0, EMBED)
    cache = split.make_cache(16, 5)
    with torch.no_grad():
        steps = [split(x, cache=cache, mask=masks.causal()) for x in memory.split([2, 0, 3], 1)]
    require_close(torch.cat(steps, 1), whole(memory, mask=masks.causal()), 1e-12)


@in_processes(2)
def test_exchanges_do_not_depend_on_the_length() -> None:
    for length in (0, 3):
        split, x = tensor_parallel(_attention(2), line()), torch.zeros(16, length, EMBED, dtype=torch.float64)
        split(x)  # the first call compares the inputs
        assert passes(split, x) == [{"all_reduce": 1}] * 2


def _loop() -> None:
    while torch.distributed.get_rank() == 1:
        pass


def test_a_process_that_never_answers_is_killed() -> None:
    began = time.monotonic()
    with processes(2) as own, pytest.raises(AssertionError, match="process 1: no answer in time"):
        own.run(_loop, seconds=1)
    assert time.monotonic() - began < 30
    assert not any(process.is_alive() for process in own.started)
