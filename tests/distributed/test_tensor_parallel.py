"""Heads split over processes: calls, stacks, LoRA, what is refused, and the collectives.

Outputs and gradients of every mask and dtype are in test_every_case.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import clearhead
from clearhead import masks
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel
from clearhead.errors import ShapeError
from clearhead.transformer import EncoderLayer, FeedForward
from tests.support.native import needs_native

from .building import (
    EMBED,
    HEADS,
    LATENT,
    attention,
    collectives,
    decoder,
    encoder,
    full,
    gradients,
    mask,
    passes,
    refuses,
    require_close,
    sequences,
)
from .comparing import compare_heads, compare_in_parts
from .processes import in_processes, line


def _inputs() -> list[tuple[Tensor, Tensor]]:
    """Queries and keys. Those without a position have as many items as a projection has features."""
    some, none = (torch.randn(EMBED, length, EMBED, dtype=torch.float64) for length in (5, 0))
    query, key = sequences(11, 7)
    return [(query, key), (none, some), (some, none), (none, none)]


@in_processes(2)
def test_other_calls() -> None:
    """Other ways to call a module."""
    (x,), causal = sequences(11), masks.causal()
    whole = attention(2, position="rotary", sinks=True)
    compare_heads(attention(4, q_norm="per head", k_norm="per head"), x, mask=causal)
    compare_heads(whole, x[0], mask=causal)
    compare_heads(whole, x, positions=torch.arange(11) * 2, mask=mask("function of heads", 2, 11))
    learnt = torch.randn(1, HEADS, 11, 11, dtype=torch.float64, requires_grad=True)
    compare_heads(whole, x, mask=masks.bias(learnt))
    split = tensor_parallel(copy.deepcopy(whole), line())
    with torch.no_grad():
        cache = split.make_cache(2, 11)
        steps = [split(tokens, mask=causal, cache=cache) for tokens in x.split([1, 1, 7, 0, 2], 1)]
        require_close(torch.cat(steps, 1), whole(x, mask=causal), 1e-12, "cached")
        (long,), lengths = sequences(600), torch.tensor([600, 5])
        padded = [module(long, mask=masks.lengths(lengths, lengths) & causal) for module in (whole, split)]
        require_close(padded[1], padded[0], 1e-12, "padded")
        rows = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
        require_close(split(rows).values(), whole(rows).values(), 1e-12, "jagged")


@in_processes(2)
def test_cross_attention() -> None:
    """Outputs and gradients, weights, and inputs without a batch; from and to nothing too."""
    whole = attention(2)
    split = tensor_parallel(copy.deepcopy(whole), line())
    for query, key in _inputs():
        compare_heads(whole, query, key)
        compare_heads(whole, query, key, key.flip(0))
        for average in (True, False):
            options: Any = {"need_weights": True, "average_attn_weights": average}
            for inputs in ((query, key), (query[0], key[0])):
                for found, expected in zip(split(*inputs, **options), whole(*inputs, **options), strict=True):
                    require_close(found, expected, 1e-12, f"{query.shape} {key.shape} {average}")
    compare_heads(whole, *sequences(11, 7), mask=mask("heads", 2, 11, 7))
    compare_heads(whole, query[:0])


@in_processes(2)
def test_layers_and_stacks() -> None:
    for x, memory in _inputs():
        for gated in (False, True):
            compare_heads(encoder(gated=gated), x, mask=mask("lengths", *x.shape[:2]))
        compare_heads(encoder().layers[1], x, mask=masks.causal())
        compare_heads(decoder(), x, memory, mask=masks.causal())


def _with_peft(module: nn.Module, targets: list[str], **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(8)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, **options)
    return get_peft_model(module, config).base_model.model.double()  # type: ignore[arg-type, operator, union-attr]


@in_processes(2)
def test_lora_layers_are_split_as_what_they_adapt() -> None:
    """peft's LoRA layers around every projection and feed-forward layer; both of their matrices learn."""
    targets, (x,), causal = (
        ["q_proj", "k_proj", "v_proj", "out_proj", "linear1", "linear2"],
        sequences(9),
        masks.causal(),
    )
    for kv_heads in (2, 1):
        whole = _with_peft(encoder(kv_heads=kv_heads), targets)
        assert sum(parameter.requires_grad for parameter in whole.parameters()) == 2 * 2 * len(targets)
        split = compare_heads(whole, x, mask=causal)
        for part in split.modules():
            if hasattr(part, "merge"):
                part.merge()
        require_close(split(x, mask=causal), whole(x, mask=causal), 1e-12, "merged")
        compare_in_parts(whole, line(), x, layout="zigzag", mask=causal)
        # The layers may also be put on after the sequence is split.
        split = _with_peft(context_parallel(encoder(kv_heads=kv_heads), line()), targets)
        part, expected = (shard_sequence(each, line()) for each in (x, whole(x, mask=causal)))
        require_close(split(part, mask=causal), expected, 1e-12, "put on afterwards")


@in_processes(2)
def test_gradients_are_clipped_by_the_norm_of_one_process() -> None:
    """PyTorch's function counts each gradient once, whether it is split or the same in every process."""
    (x,) = sequences(9)
    for kv_heads in (2, 1):
        model = encoder(kv_heads=kv_heads)
        both = model, tensor_parallel(copy.deepcopy(model), line())
        for module in both:
            module(x, mask=masks.causal()).square().sum().backward()
        norms = [full(nn.utils.clip_grad_norm_(module.parameters(), 1.0)) for module in both]
        assert norms[0] > 1
        require_close(norms[1], norms[0], 1e-12, "norm")
        expected, clipped = map(gradients, both)
        for name, gradient in clipped.items():
            require_close(gradient, expected[name], 1e-12, name)


#: A module, the number of its inputs, and its all-reduces forward and backward: one of an attention, two of a layer.
#: Backward each parameter that every process holds has one more, and each memory.
ALL_REDUCES: dict[str, tuple[Callable[[], Any], int, int, int]] = {
    "attention": (partial(attention, 4, position="rotary", sinks=True, mask="relative"), 1, 1, 1),
    "float32": (partial(attention, 4, position="rotary", dtype=torch.float32), 1, 1, 1),
    "layer": (partial(encoder, 1, kv_heads=4), 1, 2, 2),
    "gated layer": (partial(encoder, 1, kv_heads=4, gated=True), 1, 2, 2),
    "a key/value head for two processes": (partial(attention, 1), 1, 1, 1 + 4),  # weights and biases of keys and values
    "shared norms": (partial(attention, 4, q_norm="norm", k_norm="norm"), 1, 1, 1 + 2),
    "norms of each head": (partial(attention, 4, q_norm="per head", k_norm="per head"), 1, 1, 1),
    "all shared": (partial(attention, 1, q_norm="layer norm", k_norm="norm"), 1, 1, 1 + 4 + 3),
    "cross-attention": (partial(attention, 4), 2, 1, 1 + 1),
    "cross-attention with values": (partial(attention, 4), 3, 1, 1 + 2),
    "cross-attention and a shared head": (partial(attention, 1), 2, 1, 1 + 4 + 1),
}


@in_processes(2)
def test_all_reduces() -> None:
    """Their number does not depend on the length, which may be 0."""
    for name, (make, count, forward, backward) in ALL_REDUCES.items():
        module: Any = tensor_parallel(make(), line())
        for length in (9, 0):
            inputs = sequences(*[length] * count, dtype=next(module.parameters()).dtype)
            first = collectives(partial(module, *inputs))
            assert first == {"all_reduce": forward, "allgather_base": 1}, name  # the comparison of the inputs
            counts = passes(module, *inputs, mask=masks.causal())
            assert counts == [{"all_reduce": forward}, {"all_reduce": backward}], name


@in_processes(2)
def test_a_plan_of_pytorch_s_that_splits_the_wrong_heads_is_refused() -> None:
    for names in (("q_proj", "k_proj", "v_proj"), ("q_proj",)):
        plan: dict[str, Any] = {name: ColwiseParallel() for name in names} | {"out_proj": RowwiseParallel()}
        module = parallelize_module(attention(2), line(), plan)
        with refuses("use clearhead.distributed.tensor_parallel", ShapeError):
            module(*sequences(5))


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(EMBED))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _with(name: str, part: nn.Module) -> Any:
    """An attention with another part."""
    module = attention(2)
    setattr(module, name, part)
    return module


#: What cannot be split, and what every process says if one has it.
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "heads": (
        lambda: clearhead.MultiHeadAttention(30, 5),
        "num_heads, num_kv_heads: expected H a multiple of the mesh's W = 2",
    ),
    "kv heads": (lambda: clearhead.MultiHeadAttention(36, 12, num_kv_heads=3), "got H = 12, Hkv = 3"),
    "hidden": (
        lambda: EncoderLayer(EMBED, attention(2), FeedForward(EMBED, 25)),
        "module.feed_forward.linear1: expected a multiple of the mesh's W = ",
    ),
    "kind": (lambda: nn.Linear(4, 4), "expected a MultiHeadAttention, or a layer or stack"),
    "latent": (LATENT, "Its latents belong to no head"),
    "part": (
        lambda: EncoderLayer(EMBED, attention(2), _Gate()),
        "module.feed_forward: expected a part that can be split, got _Gate",
    ),
    "projection": (
        lambda: _with("q_proj", nn.Sequential(nn.Linear(EMBED, EMBED))),
        "module.q_proj: expected a linear layer, or peft's LoRA layer of one without DoRA, got Sequential",
    ),
    "DoRA": (
        lambda: _with_peft(encoder(1), ["q_proj"], use_dora=True),
        "module.layers.0.self_attention.q_proj: expected a linear layer, or peft's LoRA layer of one without DoRA",
    ),
    "position": (
        lambda: attention(4, position="log scale"),
        "module.position: expected a part that learns nothing, got LogScale. Its gradient would be another",
    ),
    "norm": (lambda: _with("q_norm", _Gate()), "module.q_norm: expected parameters (4,) of all heads"),
    "extra": (lambda: _with("gate", _Gate()), "module.gate.weight: expected a parameter of a projection"),
    "other": (lambda: attention(4), "tensor_parallel: module: expected the same in every process"),
}


@in_processes(2)
@pytest.mark.parametrize("everywhere", [True, False])
def test_what_cannot_be_split_is_refused_on_every_process(everywhere: bool) -> None:
    wrong = everywhere or dist.get_rank() == 0
    for name, (make, said) in REFUSALS.items():
        if name == "other" and everywhere:
            continue
        module = make() if wrong else attention(2)
        before = [type(parameter) for parameter in module.parameters()]
        with refuses(said):
            tensor_parallel(module, line())
        assert [type(parameter) for parameter in module.parameters()] == before
        assert getattr(module, "head_shard", None) is None
    mesh: Any = "cpu" if wrong else line()
    with refuses("mesh: expected a DeviceMesh, got str"):
        tensor_parallel(attention(2), mesh)
    split = tensor_parallel(attention(2), line())
    with refuses("expected a whole attention, got one after tensor_parallel"):
        tensor_parallel(split, line())


@in_processes(2)
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("chunked", torch.float64), pytest.param("native", torch.float32, marks=needs_native)]
)
def test_the_weights_that_one_process_drops_are_dropped(kernel: str, dtype: torch.dtype) -> None:
    """The same generator in every process, as for dropout elsewhere."""
    (x,), lengths = sequences(13, dtype=dtype), torch.tensor([13, 7])
    for kv_heads in (8, 1):
        whole = attention(kv_heads, dtype=dtype, dropout=0.3, sinks=True)
        for given in (masks.causal(), masks.lengths(lengths, lengths), mask("heads", 2, 13)):
            with clearhead.use_kernel(kernel):
                split = compare_heads(whole, x, mask=given)
        rows = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
        with refuses("expected padded inputs where heads are split"):
            split(rows)
