"""Heads split over processes: calls, stacks, what is refused, and the collectives.

Outputs and gradients of every mask and dtype are in test_every_case.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import clearhead
from clearhead import masks
from clearhead.distributed import tensor_parallel
from clearhead.errors import ClearheadError, ShapeError
from clearhead.transformer import EncoderLayer, FeedForward
from tests.support.native import needs_native

from .building import EMBED, HEADS, attention, collectives, decoder, encoder, full, gradients, mask, require_close
from .comparing import compare_in_parts
from .meshes import line
from .processes import Processes


def _compare(whole: nn.Module, split: nn.Module, tolerance: float, *inputs: Any, **options: Any) -> None:
    """Outputs and gradients of a module and of its copy that is split."""
    results = []
    for module in (whole, split):
        own = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs]
        output = module(*own, **options)
        torch.manual_seed(2)
        (output * torch.randn_like(output)).sum().backward()
        grads = {f"input {i}": x.grad for i, x in enumerate(own) if isinstance(x, torch.Tensor)}
        results.append({"output": output.detach()} | grads | gradients(module))
    expected, found = results
    assert found.keys() == expected.keys()
    for name, number in expected.items():
        require_close(found[name], number, tolerance, name)


def _norms_of_heads() -> None:
    whole = attention(4, q_norm="per head", k_norm="per head")
    x = torch.randn(3, 13, EMBED, dtype=torch.float64)
    _compare(whole, tensor_parallel(copy.deepcopy(whole), line()), 1e-12, x, mask=masks.causal())


def test_norms_of_every_head_go_with_their_heads(two: Processes) -> None:
    two.run(_norms_of_heads)


def _calls() -> None:
    """Other ways to call a module."""
    whole = attention(2, position="rotary", sinks=True)
    split = tensor_parallel(copy.deepcopy(whole), line())
    x, memory = torch.randn(3, 11, EMBED, dtype=torch.float64), torch.randn(3, 7, EMBED, dtype=torch.float64)
    _compare(whole, split, 1e-12, x[0], mask=masks.causal())
    _compare(whole, split, 1e-12, x, positions=torch.arange(11) * 2, mask=mask("function of heads", 3, 11))
    cross = attention(4)
    other = tensor_parallel(copy.deepcopy(cross), line())
    _compare(cross, other, 1e-12, x, memory, mask=mask("heads", 3, 11, 7))
    _compare(cross, other, 1e-12, x, memory, memory.flip(0))
    learnt = torch.randn(1, HEADS, 11, 11, dtype=torch.float64, requires_grad=True)
    found = []
    for module in (whole, split):
        module(x, mask=masks.bias(learnt)).square().sum().backward()
        found.append(learnt.grad)
        learnt.grad = None
    require_close(found[1], found[0], 1e-12, "a bias of the call")  # type: ignore[arg-type]
    with torch.no_grad():
        average = [
            module(x, mask=masks.causal(), need_weights=True, average_attn_weights=False)[1]
            for module in (whole, split)
        ]
        require_close(average[1], average[0], 1e-12, "weights")
        cache, steps = split.make_cache(3, 11), []
        for token in x.split(1, 1):
            steps.append(split(token, mask=masks.causal(), cache=cache))
        require_close(torch.cat(steps, 1), whole(x, mask=masks.causal()), 1e-12, "cached")
        lengths = torch.tensor([600, 5, 300])
        long = torch.randn(3, 600, EMBED, dtype=torch.float64)
        padded = [module(long, mask=masks.lengths(lengths, lengths) & masks.causal()) for module in (whole, split)]
        require_close(padded[1], padded[0], 1e-12, "padded")
        rows = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
        require_close(split(rows).values(), whole(rows).values(), 1e-12, "jagged")


def test_other_calls(two: Processes) -> None:
    two.run(_calls)


def _stacks(gated: bool) -> None:
    x, memory = torch.randn(2, 9, EMBED, dtype=torch.float64), torch.randn(2, 5, EMBED, dtype=torch.float64)
    whole = encoder(gated=gated)
    _compare(whole, tensor_parallel(copy.deepcopy(whole), line()), 1e-12, x, mask=mask("lengths", 2, 9))
    layer = whole.layers[1]
    _compare(layer, tensor_parallel(copy.deepcopy(layer), line()), 1e-12, x, mask=masks.causal())
    both = decoder()
    _compare(both, tensor_parallel(copy.deepcopy(both), line()), 1e-12, x, memory, mask=masks.causal())


@pytest.mark.parametrize("gated", [False, True])
def test_layers_and_stacks(two: Processes, gated: bool) -> None:
    two.run(_stacks, gated)


def _with_peft(module: nn.Module, targets: list[str], **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=5, target_modules=targets, **options)
    return get_peft_model(module, config).base_model.model  # type: ignore[arg-type]


def _adapted(kv_heads: int) -> None:
    """peft's LoRA layers around every projection and feed-forward layer; both of their matrices learn."""
    targets = ["q_proj", "k_proj", "v_proj", "out_proj", "linear1", "linear2"]
    whole = _with_peft(encoder(kv_heads=kv_heads), targets).double()
    learning = [parameter for parameter in whole.parameters() if parameter.requires_grad]
    assert len(learning) == 2 * 2 * len(targets)
    with torch.no_grad():
        for parameter in learning:
            parameter.normal_()
    split = tensor_parallel(copy.deepcopy(whole), line())
    x, found = torch.randn(2, 9, EMBED, dtype=torch.float64), []
    for module in (whole, split):
        own = x.clone().requires_grad_()
        output = module(own, mask=masks.causal())
        output.square().sum().backward()
        grads = {name: full(parameter.grad) for name, parameter in module.named_parameters() if parameter.requires_grad}
        found.append({"output": output.detach(), "input": own.grad} | grads)
    assert found[0].keys() == found[1].keys()
    for name, number in found[0].items():
        require_close(found[1][name], number, 1e-12, name)
    for part in split.modules():
        if hasattr(part, "merge"):
            part.merge()  # type: ignore[operator]
    require_close(split(x, mask=masks.causal()), found[0]["output"], 1e-12, "merged")


def test_lora_layers_are_split_as_what_they_adapt(two: Processes) -> None:
    for kv_heads in (2, 1):
        two.run(_adapted, kv_heads)


def _clipped(kv_heads: int) -> None:
    """`clip_grad_norm_` counts each gradient once, whether it is split or whole in every process."""
    whole = encoder(kv_heads=kv_heads)
    split = tensor_parallel(copy.deepcopy(whole), line())
    x = torch.randn(2, 9, EMBED, dtype=torch.float64)
    norms = []
    for module in (whole, split):
        module(x, mask=masks.causal()).square().sum().backward()
        norms.append(full(nn.utils.clip_grad_norm_(module.parameters(), 1.0)))
    assert norms[0] > 1
    require_close(norms[1], norms[0], 1e-12, "norm")
    expected = gradients(whole)
    for name, number in gradients(split).items():
        require_close(number, expected[name], 1e-12, name)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_gradients_are_clipped_by_the_norm_of_one_process(two: Processes, kv_heads: int) -> None:
    two.run(_clipped, kv_heads)


def _collectives() -> list[dict[str, int]]:
    """Collectives of an attention, and of a layer with each kind of feed-forward part; forward and backward."""
    counts: list[dict[str, int]] = []
    makes = (
        lambda: attention(4, position="rotary", sinks=True, mask="relative"),
        lambda: attention(4, position="rotary", dtype=torch.float32),
        lambda: encoder(1, kv_heads=4),
        lambda: encoder(1, kv_heads=4, gated=True),
    )
    for make in makes:
        module = tensor_parallel(make(), line())
        x = torch.randn(2, 9, EMBED, dtype=next(module.parameters()).dtype, requires_grad=True)
        outputs: list[torch.Tensor] = []
        module(x)  # the first call compares the inputs
        counts.append(collectives(lambda: outputs.append(module(x, mask=masks.causal()))))  # noqa: B023
        counts.append(collectives(lambda: outputs[0].sum().backward()))  # noqa: B023
    return counts


def test_one_all_reduce_forward_and_one_backward(two: Processes) -> None:
    for counts in two.run(_collectives):
        assert counts == [{"all_reduce": 1}] * 4 + [{"all_reduce": 2}] * 4


#: What costs more than one all-reduce backward: parts of the module, inputs, and how many there are. One more for each
#: parameter that every process holds, and for each memory.
MORE: dict[str, tuple[dict[str, Any], int, int]] = {
    "a key/value head for two processes": ({"kv_heads": 1}, 1, 1 + 4),  # weights and biases of keys and values
    "shared norms": ({"kv_heads": 4, "q_norm": "norm", "k_norm": "norm"}, 1, 1 + 2),
    "norms of each head": ({"kv_heads": 4, "q_norm": "per head", "k_norm": "per head"}, 1, 1),
    "all shared": ({"kv_heads": 1, "q_norm": "layer norm", "k_norm": "norm"}, 1, 1 + 4 + 3),
    "cross-attention": ({"kv_heads": 4}, 2, 1 + 1),
    "cross-attention with values": ({"kv_heads": 4}, 3, 1 + 2),
    "cross-attention and a shared head": ({"kv_heads": 1}, 2, 1 + 4 + 1),
}


def _more_collectives(name: str) -> list[dict[str, int]]:
    parts, count, _ = MORE[name]
    module = tensor_parallel(attention(**parts), line())
    inputs = [torch.randn(2, 9, EMBED, dtype=torch.float64, requires_grad=True) for _ in range(count)]
    outputs: list[torch.Tensor] = []
    first = collectives(lambda: module(*inputs))
    forward = collectives(lambda: outputs.append(module(*inputs)))
    assert first == forward | {"allgather_base": 1}  # the comparison of the inputs
    return [forward, collectives(lambda: outputs[0].sum().backward())]


@pytest.mark.parametrize("name", MORE)
def test_what_every_process_holds_costs_all_reduces_backward_alone(two: Processes, name: str) -> None:
    for counts in two.run(_more_collectives, name):
        assert counts == [{"all_reduce": 1}, {"all_reduce": MORE[name][2]}]


def _plain_plan(left_out: tuple[str, ...]) -> None:
    plan = {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
    plan = {name: style for name, style in plan.items() if name not in left_out} | {"out_proj": RowwiseParallel()}
    module = parallelize_module(attention(2), line(), plan)
    with pytest.raises(ShapeError, match=r"use clearhead.distributed.tensor_parallel"):
        module(torch.randn(2, 5, EMBED, dtype=torch.float64))


def test_a_plan_of_pytorch_s_that_splits_the_wrong_heads_is_refused(two: Processes) -> None:
    two.run(_plain_plan, ())
    two.run(_plain_plan, ("k_proj", "v_proj"))


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(EMBED))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _wrong_module(name: str) -> Any:
    whole = attention(2)
    if name == "heads":
        return clearhead.MultiHeadAttention(30, 5)
    if name == "kv heads":
        return clearhead.MultiHeadAttention(36, 12, num_kv_heads=3)
    if name == "hidden":
        return EncoderLayer(EMBED, whole, FeedForward(EMBED, 25))
    if name == "kind":
        return nn.Linear(4, 4)
    if name == "latent":
        return clearhead.MultiHeadLatentAttention(
            EMBED, 4, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4
        )
    if name == "part":
        return EncoderLayer(EMBED, whole, _Gate())
    if name == "projection":
        whole.q_proj = nn.Sequential(whole.q_proj)
    if name == "DoRA":
        return _with_peft(encoder(1), ["q_proj"], use_dora=True)
    if name == "norm":
        whole.q_norm = _Gate()
    if name == "extra":
        whole.gate = _Gate()
    if name == "twice":
        tensor_parallel(whole, line())
    if name == "other":
        return attention(4)
    return whole


def _refused(name: str, everywhere: bool) -> str:
    wrong = everywhere or dist.get_rank() == 0
    mesh: Any = "cpu" if name == "mesh" and wrong else line()
    if name == "twice":
        module, wrong = _wrong_module(name), True
    else:
        module = _wrong_module(name) if wrong else attention(2)
    before = [type(parameter) for parameter in module.parameters()]
    with pytest.raises(ClearheadError) as caught:
        tensor_parallel(module, mesh)
    assert [type(parameter) for parameter in module.parameters()] == before
    assert name == "twice" or getattr(module, "head_shard", None) is None
    return str(caught.value)


REFUSALS = {
    "heads": "num_heads, num_kv_heads: expected H a multiple of the mesh's W = ",
    "kv heads": "got H = 12, Hkv = 3",
    "hidden": "module.feed_forward.linear1: expected a multiple of the mesh's W = ",
    "kind": "expected a MultiHeadAttention, or a layer or stack",
    "latent": "Its latents belong to no head",
    "part": "module.feed_forward: expected a part that can be split, got _Gate",
    "projection": "module.q_proj: expected a linear layer, or peft's LoRA layer of one without DoRA, got Sequential",
    "DoRA": "module.layers.0.self_attention.q_proj: expected a linear layer, or peft's LoRA layer of one without DoRA",
    "norm": "module.q_norm: expected parameters (4,) of all heads",
    "extra": "module.gate.weight: expected a parameter of a projection",
    "mesh": "mesh: expected a DeviceMesh, got str",
    "twice": "expected a whole attention, got one after tensor_parallel",
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("everywhere", [True, False])
def test_what_cannot_be_split_is_refused_on_every_process(two: Processes, name: str, everywhere: bool) -> None:
    for message in two.run(_refused, name, everywhere):
        assert REFUSALS[name] in message


def test_different_modules_are_refused(two: Processes) -> None:
    for message in two.run(_refused, "other", False):
        assert "tensor_parallel: module: expected the same in every process" in message


def test_heads_that_three_processes_cannot_share(three: Processes) -> None:
    for message in three.run(_refused, "projection", True):
        assert "H a multiple of the mesh's W = 3" in message


def _dropped(kernel: str, dtype: torch.dtype) -> None:
    """The same generator in every process, as for dropout elsewhere: heads drop what they drop on one process."""
    x, lengths = torch.randn(3, 13, EMBED, dtype=dtype), torch.tensor([13, 0, 7])
    for kv_heads in (8, 1):
        whole = attention(kv_heads, dtype=dtype, dropout=0.3, sinks=True)
        split = tensor_parallel(copy.deepcopy(whole), line())
        for given in (masks.causal(), masks.lengths(lengths, lengths), mask("heads", 3, 13)):
            with clearhead.use_kernel(kernel):
                compare_in_parts(whole, None, x, prepare=lambda module: tensor_parallel(module, line()), mask=given)
        rows = torch.nested.nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
        with pytest.raises(ClearheadError, match="expected padded inputs where heads are split"):
            split(rows)


def test_the_weights_that_one_process_drops_are_dropped(two: Processes) -> None:
    two.run(_dropped, "chunked", torch.float64)


@needs_native
def test_native_drops_what_it_drops_on_one_process(two: Processes) -> None:
    two.run(_dropped, "native", torch.float32)
