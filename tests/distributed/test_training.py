"""Both kinds of parallelism beside what PyTorch has for training: fully_shard, compile, checkpoints, clipping."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import masks
from clearhead.distributed import clip_grad_norm_, context_parallel, gather_sequence, shard_sequence, tensor_parallel
from clearhead.errors import ArgumentError, DTypeError, KernelError

from .building import (
    EMBED,
    HEADS,
    METHODS,
    attention,
    encoder,
    full,
    gradients,
    layouts,
    mask,
    methods,
    require_close,
    sequences,
)
from .processes import Groups, in_processes, line, processes, square


def _loss(output: Tensor, labels: Tensor) -> Tensor:
    """Summed over the labels; −100 is none."""
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def _batch() -> list[Tensor]:
    """A sequence, its labels, and how many of them count."""
    (x,), labels = sequences(13), torch.randint(0, EMBED, (2, 13))
    labels[1, 13 // 2 :] = -100
    return [x, labels, (labels != -100).sum()]


def _sharded(stack: Any, mesh: DeviceMesh) -> Any:
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(stack, mesh=mesh)


def _replicated(stack: Any, mesh: DeviceMesh) -> Any:
    return DistributedDataParallel(stack, process_group=mesh.get_group())


def _require_same_gradients(split: nn.Module, whole: nn.Module) -> None:
    for (name, one), other in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None, name
        require_close(full(other.grad), one.grad, 1e-12, name)


def _compare_step(whole: nn.Module, split: nn.Module, cut: Callable[[Tensor], Tensor], parts: int) -> None:
    """Gradients of one process, and of parts of a batch, of which each process has one; averaged over all parts."""
    x, labels, count = _batch()
    (_loss(whole(x, mask=masks.causal()), labels) / count).backward()
    (_loss(split(cut(x), mask=masks.causal()), cut(labels)) * parts / count).backward()
    _require_same_gradients(split.module if isinstance(split, DistributedDataParallel) else split, whole)


@in_processes(2)
@pytest.mark.parametrize("averaged", [_sharded, _replicated])
@pytest.mark.parametrize(("layout", "method"), [("zigzag", "heads"), ("contiguous", "gather"), ("zigzag", "ring")])
def test_training_in_parts_is_training_on_one_process(layout: Any, method: Any, averaged: Callable[..., Any]) -> None:
    """Steps of one process, and of parts of the sequence whose gradients are averaged."""
    mesh = line()
    whole, split = encoder(), context_parallel(encoder(), mesh, method=method, layout=layout)
    model, cut = averaged(split, mesh), partial(shard_sequence, mesh=mesh, layout=layout)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (whole, split)]
    for step in range(2):
        torch.manual_seed(step)
        _compare_step(whole, model, cut, dist.get_world_size())
        norms = [full(nn.utils.clip_grad_norm_(module.parameters(), 0.05)) for module in (whole, split)]
        require_close(norms[1], norms[0], 1e-12, "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(whole.named_parameters(), split.parameters(), strict=True):
        require_close(full(other), one, 1e-12, name)


@in_processes(4)
@pytest.mark.parametrize(("heads", "sequence"), [(True, False), (True, True), (False, True)])
def test_with_fully_shard_on_one_mesh(heads: bool, sequence: bool) -> None:
    """Each dimension of the mesh splits heads, the sequence or the batch."""
    mesh, whole = square(), encoder(kv_heads=1)
    split: Any = tensor_parallel(copy.deepcopy(whole), mesh["tp"]) if heads else copy.deepcopy(whole)
    split = context_parallel(split, mesh["cp"]) if sequence else split
    split = _sharded(split, mesh["cp"] if heads else mesh)

    def cut(x: Tensor) -> Tensor:
        if not (heads and sequence):
            x = x.tensor_split(2)[mesh["cp" if heads else "tp"].get_local_rank()]
        return shard_sequence(x, mesh["cp"]) if sequence else x

    _compare_step(whole, split, cut, 2 if heads else 4)
    state = get_model_state_dict(split, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        for name, number in whole.state_dict().items():
            assert torch.equal(state[name], number)


@in_processes(4)
def test_one_norm_of_gradients_on_several_meshes() -> None:
    """Gradients on both dimensions of a mesh, on one of them, and plain ones, by the norm of one process."""
    mesh = square()
    torch.manual_seed(11)
    whole = [encoder(kv_heads=1), nn.Linear(EMBED, 7).double(), nn.Linear(7, 5).double()]
    split: list[Any] = copy.deepcopy(whole)
    split[0] = _sharded(context_parallel(tensor_parallel(split[0], mesh["tp"]), mesh["cp"]), mesh["cp"])
    fully_shard(split[1], mesh=mesh["cp"])
    (x,) = sequences(13)
    nn.Sequential(*whole)(x).square().sum().backward()
    (nn.Sequential(*split)(shard_sequence(x, mesh["cp"])).square().sum() * 2).backward()
    for parameter in split[2].parameters():  # as DistributedDataParallel does
        dist.all_reduce(parameter.grad, group=mesh["cp"].get_group())
        parameter.grad /= 2
    both = [nn.ModuleList(modules) for modules in (whole, split)]
    for most in (1e9, 3.0, 0.0):
        norms = [nn.utils.clip_grad_norm_(both[0].parameters(), most), clip_grad_norm_(both[1].parameters(), most)]
        require_close(norms[1], norms[0], 1e-12, "norm")
        _require_same_gradients(both[1], both[0])


@pytest.mark.parametrize("most", [0, 0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_norm_of_all_gradients(dtype: torch.dtype, most: float) -> None:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((5, 3), (7,), (0,), ())]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 11
    before = torch.cat([x.grad.double().flatten() for x in parameters if x.grad is not None])
    without = nn.Parameter(torch.zeros(2))
    norm = clip_grad_norm_(iter([*parameters, parameters[0], without]), most)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, before.norm(), rtol=1e-6, atol=0)
    expected = before * min(1.0, most / (before.norm().item() + 1e-6))
    found = torch.cat([x.grad.double().flatten() for x in parameters if x.grad is not None])
    torch.testing.assert_close(found, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    assert without.grad is None
    assert clip_grad_norm_([], 1.0) == clip_grad_norm_(without, 1.0) == 0


@pytest.mark.parametrize(
    ("parameters", "most", "kind", "said"),
    [
        ([], -1.0, ArgumentError, "max_norm: expected a number of at least 0, got -1.0."),
        ([], float("nan"), ArgumentError, "max_norm: expected a number of at least 0, got nan."),
        ([], "1", DTypeError, "max_norm: expected a number of at least 0, got str."),
        (3, 1.0, DTypeError, "parameters: expected tensors, got 3."),
        ([torch.zeros(1), "x"], 1.0, DTypeError, "parameters: expected tensors, got str."),
    ],
)
def test_wrong_arguments(parameters: Any, most: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        clip_grad_norm_(parameters, most)
    assert str(caught.value) == said


@pytest.mark.slow
@in_processes(2, seconds=300)
def test_compiled_in_one_graph() -> None:
    split: Any = tensor_parallel(encoder(1, kv_heads=4, dtype=torch.float32), line())
    graph: Any = torch.compile(split, fullgraph=True)
    x = torch.randn(2, 16, EMBED)
    outputs = []
    for module in (split, graph):
        output = module(x, mask=masks.causal())
        output.square().sum().backward()
        outputs.append({"output": output.detach()} | gradients(split))
    for name, number in outputs[0].items():
        require_close(outputs[1][name], number, 1e-5, name)


class _Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, **options: Any) -> Any:
        return checkpoint(partial(self.inner, **options), x, use_reentrant=False)


@in_processes(2)
@methods
def test_activation_checkpointing(method: Any) -> None:
    """The same exchanges are made again, and what is computed again is not recorded."""
    whole, (x,) = attention(2, position="rotary", sinks=True), sequences(13)
    split: Any = context_parallel(copy.deepcopy(whole), line(), method=method)
    found = []
    for module in (split, _Recomputed(split)):
        with clearhead.record(split, ("entropy", "received")) as rec:
            module(shard_sequence(x, line()), mask=mask("heads", 2, 13)).square().sum().backward()
        assert len(rec[""]) == 1
        found.append(gradients(split))
    for name, number in found[0].items():
        assert torch.equal(found[1][name], number), name
    heads: Any = tensor_parallel(copy.deepcopy(whole), line())
    for module in (whole, _Recomputed(heads)):
        module(x, mask=masks.causal()).square().sum().backward()
    _require_same_gradients(heads, whole)


def _saved(folder: Path) -> None:
    split = tensor_parallel(encoder(), line())
    dcp.save({"model": get_model_state_dict(split)}, checkpoint_id=folder)


def _loaded(folder: Path) -> None:
    """A checkpoint of heads split over other processes, read into a module with other values."""
    whole, split = encoder(), tensor_parallel(_zeroed(encoder()), line())
    state = {"model": get_model_state_dict(split)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(split, state["model"])
    (x,) = sequences(9)
    require_close(split(x, mask=masks.causal()), whole(x, mask=masks.causal()), 1e-12)


def _zeroed(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def test_a_checkpoint_of_four_processes_is_read_by_two_and_by_one(groups: Groups, tmp_path: Path) -> None:
    groups(4).run(_saved, tmp_path)
    groups(2).run(_loaded, tmp_path)
    with processes(1) as one:
        one.run(_loaded, tmp_path)


@in_processes(2)
def test_autocast() -> None:
    whole, x = attention(4, dtype=torch.float32), torch.randn(2, 13, EMBED)
    for method in METHODS:
        split: Any = context_parallel(copy.deepcopy(whole), line(), method=method)  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = shard_sequence(whole(x, mask=masks.causal()), line())
            found = split(shard_sequence(x, line()), mask=masks.causal())
        assert found.dtype == expected.dtype
        require_close(found, expected, 2e-2, method)


# Second derivatives: those of one process where heads are split, and an error wherever parts are exchanged.


MATCH = "second derivatives do not follow exchanges"


def _penalty(module: Any, x: Tensor, learnt: Tensor) -> dict[str, Tensor]:
    """The first derivatives of the input and a bias, and the gradients of their squares."""
    of = [tensor.detach().clone().requires_grad_() for tensor in (x, learnt)]
    output = module(of[0], mask=masks.bias(of[1]) & masks.causal())
    torch.manual_seed(4)
    first = torch.autograd.grad((output * torch.randn_like(output)).sum(), of, create_graph=True)
    sum(x.square().sum() for x in first).backward()  # type: ignore[union-attr]
    module.out_proj.bias.grad = torch.zeros_like(module.out_proj.bias)  # nothing depends on it
    found = dict(zip(("input", "bias", "second input", "second bias"), [*first, *(x.grad for x in of)], strict=True))
    return {name: cast(Tensor, x).detach() for name, x in found.items()} | gradients(module)


@in_processes(2)
def test_where_heads_are_split_they_are_those_of_one_process() -> None:
    (x,) = sequences(9)
    learnt = torch.randn(1, HEADS, 9, 9, dtype=torch.float64, requires_grad=True)
    for kv_heads in (2, 1):
        whole = attention(kv_heads, sinks=True)
        expected = _penalty(copy.deepcopy(whole), x, learnt)
        found = _penalty(tensor_parallel(whole, line()), x, learnt)
        for name, number in expected.items():
            require_close(found[name], number, 1e-12, name)


def _first_then_second(output: Tensor, x: Tensor) -> None:
    """The first derivative may be part of a graph; each way to ask for the second raises."""
    (expected,) = torch.autograd.grad(output.square().sum(), x, retain_graph=True)
    (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    require_close(first.detach(), expected, 1e-15)
    with pytest.raises(KernelError, match=MATCH):
        torch.autograd.grad(first.sum(), x, allow_unused=True, retain_graph=True)
    with pytest.raises(KernelError, match=MATCH):
        first.square().sum().backward(retain_graph=True)


@in_processes(2)
@layouts
@methods
def test_where_sequences_are_split_they_are_refused(method: Any, layout: Any) -> None:
    split = context_parallel(attention(2), line(), method=method, layout=layout)
    x = shard_sequence(*sequences(9), line(), layout=layout).clone().requires_grad_()
    output = split(x, mask=masks.causal())
    _first_then_second(output, x)
    # The gradient that comes in is constant, and that of the scores depends on the input all the same.
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(KernelError, match=MATCH):
        first.sum().backward()


@in_processes(2)
def test_through_a_gathered_sequence_they_are_refused() -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    _first_then_second(gather_sequence(x, line()), x)
    (first,) = torch.autograd.grad(gather_sequence(x, line()).sum(), x, create_graph=True)
    assert not first.requires_grad  # of a linear function it is zero
