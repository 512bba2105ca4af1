"""Both kinds of parallelism beside what PyTorch has for training: fully_shard, compile, checkpoints, clipping."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from clearhead import masks
from clearhead.distributed import clip_grad_norm_, context_parallel, gather_sequence, shard_sequence, tensor_parallel
from clearhead.distributed._layout import Layout
from clearhead.errors import DistributedError

from .building import EMBED, attention, encoder, full, gradients, mask, require_close
from .meshes import line, square
from .processes import Processes, processes


def _loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed over the labels; −100 is none."""
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def _labels(length: int) -> torch.Tensor:
    labels = torch.randint(0, EMBED, (2, length))
    labels[1, length // 2 :] = -100
    return labels


def _sharded(stack: Any, mesh: DeviceMesh) -> Any:
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(stack, mesh=mesh)


def _replicated(stack: Any, mesh: DeviceMesh) -> Any:
    return DistributedDataParallel(stack, process_group=mesh.get_group())


def _trained(averaged: Callable[[Any, DeviceMesh], Any], layout: Layout, method: str) -> None:
    """Steps of one process, and of parts of the sequence whose gradients are averaged."""
    mesh, world = line(), dist.get_world_size()
    whole, split = encoder(), context_parallel(encoder(), mesh, method=method, layout=layout)  # type: ignore[arg-type]
    model = averaged(split, mesh)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (whole, split)]
    for step in range(2):
        torch.manual_seed(step)
        x, labels = torch.randn(2, 13, EMBED, dtype=torch.float64), _labels(13)
        count = (labels != -100).sum()
        (_loss(whole(x, mask=masks.causal()), labels) / count).backward()
        parts = [shard_sequence(each, mesh, layout=layout) for each in (x, labels)]
        (_loss(model(parts[0], mask=masks.causal()), parts[1]) * world / count).backward()
        for name, one in gradients_kept(whole).items():
            require_close(gradients_kept(split)[name], one, 1e-12, name)
        norms = [full(nn.utils.clip_grad_norm_(module.parameters(), 0.05)) for module in (whole, split)]
        require_close(norms[1], norms[0], 1e-12, "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(whole.named_parameters(), split.parameters(), strict=True):
        require_close(full(other), one, 1e-12, name)


def gradients_kept(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: full(grad) for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("averaged", [_sharded, _replicated])
@pytest.mark.parametrize(("layout", "method"), [("zigzag", "heads"), ("contiguous", "gather"), ("zigzag", "ring")])
def test_training_in_parts_is_training_on_one_process(
    two: Processes, layout: Layout, method: str, averaged: Callable[[Any, DeviceMesh], Any]
) -> None:
    two.run(_trained, averaged, layout, method)


def _batch_and_sequence(rows: int) -> None:
    """Rows of processes have other batch items; the processes of a row share their sequences."""
    mesh = init_device_mesh("cpu", (rows, dist.get_world_size() // rows), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(3)
    whole = encoder()
    split = _sharded(context_parallel(copy.deepcopy(whole), mesh["cp"]), mesh["dp", "cp"])
    x, labels = torch.randn(2, 13, EMBED, dtype=torch.float64), _labels(13)
    count = (labels != -100).sum()
    (_loss(whole(x, mask=masks.causal()), labels) / count).backward()
    items = [each.tensor_split(rows)[mesh["dp"].get_local_rank()] for each in (x, labels)]
    parts = [shard_sequence(each, mesh["cp"]) for each in items]
    (_loss(split(parts[0], mask=masks.causal()), parts[1]) * dist.get_world_size() / count).backward()
    kept = gradients_kept(whole)
    assert kept
    for name, one in kept.items():
        require_close(gradients_kept(split)[name], one, 1e-12, name)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_mesh_splits_the_batch_and_the_sequence(two: Processes, rows: int) -> None:
    two.run(_batch_and_sequence, rows)


@pytest.mark.slow
def test_a_mesh_splits_the_batch_and_the_sequence_of_four(four: Processes) -> None:
    four.run(_batch_and_sequence, 2)


def _three_ways(kv_heads: int) -> None:
    """Heads over one dimension; over the other parameters and the batch, or parameters and the sequence."""
    mesh = square()
    for sequences in (False, True):
        whole = encoder(kv_heads=kv_heads)
        split: Any = tensor_parallel(copy.deepcopy(whole), mesh["tp"])
        if sequences:
            split = context_parallel(split, mesh["cp"])
        _sharded(split, mesh["cp"])
        x, labels = torch.randn(2, 13, EMBED, dtype=torch.float64), _labels(13)
        count = (labels != -100).sum()
        (_loss(whole(x, mask=masks.causal()), labels) / count).backward()
        dim = 1 if sequences else 0
        parts = [shard_sequence(each, mesh["cp"], dim=dim) for each in (x, labels)]
        (_loss(split(parts[0], mask=masks.causal()), parts[1]) * 2 / count).backward()
        for name, one in gradients_kept(whole).items():
            require_close(gradients_kept(split)[name], one, 1e-12, name)
        state = get_model_state_dict(split, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            for name, number in whole.state_dict().items():
                assert torch.equal(state[name], number)


def _clipped() -> None:
    """Gradients on both dimensions of a mesh, on one of them, and plain ones, by the norm of one process."""
    mesh = square()
    torch.manual_seed(11)
    whole = [encoder(kv_heads=1), nn.Linear(EMBED, 7).double(), nn.Linear(7, 5).double()]
    split: list[Any] = copy.deepcopy(whole)
    split[0] = _sharded(context_parallel(tensor_parallel(split[0], mesh["tp"]), mesh["cp"]), mesh["cp"])
    fully_shard(split[1], mesh=mesh["cp"])
    x = torch.randn(2, 13, EMBED, dtype=torch.float64)
    nn.Sequential(*whole)(x).square().sum().backward()
    (nn.Sequential(*split)(shard_sequence(x, mesh["cp"])).square().sum() * 2).backward()
    for parameter in split[2].parameters():  # as DistributedDataParallel does
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=mesh["cp"].get_group())
        parameter.grad /= 2
    both = [nn.ModuleList(modules) for modules in (whole, split)]
    for most in (1e9, 3.0, 0.0):
        norms = [nn.utils.clip_grad_norm_(both[0].parameters(), most), clip_grad_norm_(both[1].parameters(), most)]
        require_close(norms[1], norms[0], 1e-12, "norm")
        kept = [gradients_kept(modules) for modules in both]
        assert kept[0].keys() == kept[1].keys()
        for name, one in kept[0].items():
            require_close(kept[1][name], one, 1e-12, name)


def test_one_norm_of_gradients_on_several_meshes(four: Processes) -> None:
    four.run(_clipped)


@pytest.mark.parametrize("kv_heads", [pytest.param(8, marks=pytest.mark.slow), 1])
def test_with_fully_shard_on_one_mesh(four: Processes, kv_heads: int) -> None:
    four.run(_three_ways, kv_heads)


def _compiled() -> None:
    whole = encoder(1, kv_heads=4, dtype=torch.float32)
    split: Any = tensor_parallel(copy.deepcopy(whole), line())
    graph: Any = torch.compile(split, fullgraph=True)
    x = torch.randn(2, 16, EMBED)
    outputs = []
    for module in (split, graph):
        output = module(x, mask=masks.causal())
        output.square().sum().backward()
        outputs.append({"output": output.detach()} | gradients(split))
    for name, number in outputs[0].items():
        require_close(outputs[1][name], number, 1e-5, name)


@pytest.mark.slow
def test_compiled_in_one_graph(two: Processes) -> None:
    two.run(_compiled, seconds=300)


def _recomputed(method: str) -> None:
    """Activation checkpointing makes the same exchanges again."""

    class Recomputed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            return checkpoint(partial(self.inner, **options), x, use_reentrant=False)

    whole, x = attention(2, position="rotary", sinks=True), torch.randn(2, 13, EMBED, dtype=torch.float64)
    split: Any = context_parallel(copy.deepcopy(whole), line(), method=method)  # type: ignore[arg-type]
    part = shard_sequence(x, line())
    found = []
    for module in (split, Recomputed(split)):
        module(part, mask=mask("heads", 2, 13)).square().sum().backward()
        found.append(gradients(split))
    for name, number in found[0].items():
        assert torch.equal(found[1][name], number), name
    heads: Any = tensor_parallel(copy.deepcopy(whole), line())
    for module in (whole, Recomputed(heads)):
        module(x, mask=masks.causal()).square().sum().backward()
    expected = gradients(whole)
    for name, number in gradients(heads).items():
        require_close(number, expected[name], 1e-12, name)


@pytest.mark.parametrize("method", ["heads", "gather", "ring"])
def test_activation_checkpointing(two: Processes, method: str) -> None:
    two.run(_recomputed, method)


def _saved(folder: str) -> None:
    split = tensor_parallel(encoder(), line())
    dcp.save({"model": get_model_state_dict(split)}, checkpoint_id=folder)


def _loaded(folder: str, layout: Layout) -> None:
    """A checkpoint of heads split over other processes, read into a module with other values."""
    whole, fresh = encoder(), encoder()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    split: Any = tensor_parallel(fresh, line())
    state = {"model": get_model_state_dict(split)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(split, state["model"])
    torch.manual_seed(1)
    x = torch.randn(2, 9, EMBED, dtype=torch.float64)
    require_close(split(x, mask=masks.causal()), whole(x, mask=masks.causal()), 1e-12)


def test_a_checkpoint_of_four_processes_is_read_by_two_and_by_one(
    four: Processes, two: Processes, tmp_path: Path
) -> None:
    four.run(_saved, str(tmp_path))
    two.run(_loaded, str(tmp_path), "contiguous")
    with processes(1) as one:
        one.run(_loaded, str(tmp_path), "contiguous")


def _model_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    split = _sharded(context_parallel(encoder(), line(), layout="zigzag"), line())
    return split, torch.optim.AdamW(split.parameters(), lr=0.1)


def _step(split: Any, optimizer: torch.optim.Optimizer, seed: int) -> dict[str, torch.Tensor]:
    """One step on a seed's sequence; the whole output before it, and all parameters after it."""
    torch.manual_seed(seed)
    x, labels = (
        shard_sequence(each, line(), layout="zigzag")
        for each in (torch.randn(2, 13, EMBED, dtype=torch.float64), _labels(13))
    )
    output = split(x, mask=masks.causal())
    (_loss(output, labels) * dist.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()
    found = {"output": gather_sequence(output.detach(), line(), layout="zigzag")}
    return found | {name: full(parameter.detach()) for name, parameter in split.named_parameters()}


def _saved_parts(folder: str) -> dict[str, torch.Tensor]:
    """A checkpoint after two steps; and the step after it."""
    split, optimizer = _model_and_optimizer()
    for seed in range(2):
        _step(split, optimizer, seed)
    model, state = get_state_dict(split, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=folder)
    return _step(split, optimizer, 2)


def _loaded_parts(folder: str) -> dict[str, torch.Tensor]:
    """The step after a checkpoint, which is read into a module with other values."""
    split, optimizer = _model_and_optimizer()
    with torch.no_grad():
        for parameter in split.parameters():
            parameter.zero_()
    model, state = get_state_dict(split, optimizer)
    read = {"model": model, "optimizer": state}
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(split, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    return _step(split, optimizer, 2)


def test_a_checkpoint_of_four_parts_with_optimizer_state_is_read_by_two_and_by_one(
    four: Processes, two: Processes, tmp_path: Path
) -> None:
    expected, *others = four.run(_saved_parts, str(tmp_path))
    with processes(1) as one:
        others += two.run(_loaded_parts, str(tmp_path)) + one.run(_loaded_parts, str(tmp_path))
    for found in others:
        assert found.keys() == expected.keys()
        for name, number in expected.items():
            require_close(found[name], number, 1e-12, name)


def _ends(method: str, step: str) -> str:
    """The last process ends in the middle; what the first one says."""
    split: Any = tensor_parallel if method == "tensor" else partial(context_parallel, method=method)
    module = split(attention(1 if step == "backward of shared heads" else 4), line())
    x = torch.randn(2, 8, EMBED, dtype=torch.float64, requires_grad=step == "backward")
    learnt = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    output = module(x, mask=masks.bias(learnt) if step == "backward of a bias" else None)
    if dist.get_rank() == 1:
        os._exit(1)
    go_on = output.sum().backward if "backward" in step else partial(module, x)
    with pytest.raises(DistributedError) as caught:
        go_on()
    return str(caught.value)


AGREED = "could not agree on the call, because one of them has ended"
SAID = {
    ("gather", "forward"): AGREED,
    ("gather", "backward"): "context_parallel: backward: reduce-scatter: the exchange failed",
    ("heads", "backward"): "context_parallel: backward: all-to-all: the exchange failed",
    ("ring", "backward"): "context_parallel: backward: ring: the exchange failed",
    ("tensor", "forward"): (
        "tensor_parallel: forward: all-reduce of the output of module.out_proj: the exchange failed. "
        "Another process has ended"
    ),
    ("tensor", "backward"): "tensor_parallel: backward: all-reduce of the gradient of the input of module: the exch",
    ("tensor", "backward of shared heads"): "tensor_parallel: backward: all-reduce of the gradient of module.",
    ("tensor", "backward of a bias"): "tensor_parallel: backward: all-reduce of a bias's gradient: the exchange failed",
}


def _said_by_the_first(two: Processes, function: Callable[..., str], *arguments: object, seconds: float) -> str:
    """What a function gives in the first process; the other one ends in it."""
    for end in two._ends:
        end.send((function, arguments))
    assert two._ends[0].poll(seconds), "it still waits"
    good, said = two._ends[0].recv()
    assert good, said
    return said


@pytest.mark.parametrize(("method", "step"), SAID)
def test_a_process_that_ends_ends_the_others(method: str, step: str) -> None:
    with processes(2, seconds=10) as two:
        assert SAID[method, step] in _said_by_the_first(two, _ends, method, step, seconds=40)


def _raises() -> str:
    """A mask that raises in the last process alone, between the collectives; what each process says."""

    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("of the user's")
        return q >= k

    module = tensor_parallel(attention(4), line())
    with pytest.raises((DistributedError, ValueError)) as caught:
        module(torch.randn(2, 8, EMBED, dtype=torch.float64), mask=masks.mask_mod(rule))
    return str(caught.value)


def test_a_process_that_raises_ends_the_others() -> None:
    with processes(2, seconds=5) as two:
        first, second = two.run(_raises, seconds=40)
    assert SAID["tensor", "forward"] in first
    assert "of the user's" in second


def _interrupted(method: str, place: str, killed: bool) -> str:
    """The last process is killed, or raises, inside an attention that all agreed on; what each process says.

    Args:
        place: ``"projections"``: before the first exchange. ``"mask"``: after it.
    """

    def interrupt() -> None:
        if dist.get_rank() == 1:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("of the user's")

    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        interrupt()
        return q >= k

    module: Any = context_parallel(attention(4), line(), method=method)  # type: ignore[arg-type]
    part = shard_sequence(torch.randn(2, 8, EMBED, dtype=torch.float64), line())
    module(part)  # the processes are connected
    if place == "projections":
        module.v_proj.register_forward_hook(lambda *_: interrupt())
    with pytest.raises((DistributedError, ValueError)) as caught:
        module(part, mask=masks.mask_mod(rule) if place == "mask" else None)
    return str(caught.value)


INTERRUPTED = {
    ("heads", "projections"): "context_parallel: forward: all-to-all: the exchange failed",
    ("heads", "mask"): "context_parallel: forward: all-to-all: the exchange failed",
    ("gather", "projections"): "context_parallel: forward: all-gather: the exchange failed",
    ("ring", "projections"): "context_parallel: forward: ring: the exchange failed",
}


@pytest.mark.parametrize(("method", "place"), INTERRUPTED)
def test_a_process_that_is_killed_in_an_attention_ends_the_others(method: str, place: str) -> None:
    with processes(2, seconds=10) as two:
        said = _said_by_the_first(two, _interrupted, method, place, True, seconds=20)
        assert INTERRUPTED[method, place] in said
        two.started[1].join(5)
        assert two.started[1].exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("method", "place"), [("heads", "mask"), ("gather", "projections"), ("ring", "projections")])
def test_a_process_that_raises_in_an_attention_ends_the_others(method: str, place: str) -> None:
    with processes(2, seconds=3) as two:
        first, second = two.run(_interrupted, method, place, False, seconds=20)
    assert INTERRUPTED[method, place] in first
    assert "of the user's" in second


def _autocast() -> None:
    whole, x = attention(4, dtype=torch.float32), torch.randn(2, 13, EMBED)
    for method in ("heads", "gather", "ring"):
        split: Any = context_parallel(copy.deepcopy(whole), line(), method=method)  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = shard_sequence(whole(x, mask=masks.causal()), line())
            found = split(shard_sequence(x, line()), mask=masks.causal())
        assert found.dtype == expected.dtype
        require_close(found, expected, 2e-2, method)


def test_autocast(two: Processes) -> None:
    two.run(_autocast)
