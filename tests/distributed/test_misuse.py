"""Wrong uses of split modules that look right to each process: order, layout, whole sequences, loading, leaving."""

from __future__ import annotations

import atexit
import copy
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import clearhead
from clearhead.distributed import context_parallel, gather_sequence, shard_sequence, tensor_parallel
from clearhead.errors import ArgumentError, ClearheadError, DeviceError, DistributedError, DTypeError
from clearhead.transformer import Encoder, load_transformer

from .building import EMBED, attention, collectives, decoder, encoder, full
from .meshes import line
from .processes import Processes

SPLITS = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}


def _sequence(length: int = 9) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(2, length, EMBED, dtype=torch.float64)


def _other_order(other: bool) -> None:
    """Modules that are built alike, or of which one learns nothing."""
    modules = [context_parallel(attention(4).requires_grad_(not other or index == 0), line()) for index in range(2)]
    x = shard_sequence(_sequence(), line())
    first = dist.get_rank() == 1
    with pytest.raises(DistributedError) as caught:
        modules[first](x)
    said = str(caught.value)
    assert said.startswith("context_parallel: number of the module: expected the same in every process, got [")
    assert said.endswith("is numbered when it is split: split and call modules in one order in every process.")
    for module in (*modules, copy.deepcopy(modules[0])):
        module(x)
    stacks = [context_parallel(encoder(1), line()) for _ in range(2)]
    with pytest.raises(DistributedError, match="number of the module: expected the same"):
        stacks[first](x)
    stacks[0](x)


@pytest.mark.parametrize("other", [False, True])
def test_modules_in_another_order(two: Processes, other: bool) -> None:
    two.run(_other_order, other)


def _other_layout() -> None:
    split: Any = context_parallel(attention(4), line(), layout="zigzag")
    stack: Any = context_parallel(encoder(1), line(), layout="zigzag")
    both: Any = context_parallel(decoder(), line(), layout="zigzag")
    x = _sequence()
    good, wrong = (shard_sequence(x, line(), layout=layout) for layout in ("zigzag", "contiguous"))  # type: ignore[arg-type]
    said = (
        ': expected a part in layout "zigzag", got one in layout "contiguous". Give shard_sequence and '
        "context_parallel the same layout."
    )
    calls = {
        "query": lambda: split(wrong),
        "key": lambda: split(good, wrong),
        "x": lambda: stack(x=wrong),
        "memory": lambda: both(good, wrong),
    }
    for name, call in calls.items():
        with pytest.raises(ArgumentError) as caught:
            call()
        assert str(caught.value) == name + said
    assert split(good).shape == good.shape
    with pytest.raises(ArgumentError if dist.get_rank() else DistributedError, match='got one in layout "contig'):
        split(wrong if dist.get_rank() else good)
    for lost in (wrong * 1, wrong.clone(), wrong[:]):  # nothing is claimed of results
        assert split(lost).shape == wrong.shape
    wrong.copy_(good)
    torch.testing.assert_close(split(wrong), split(good))  # to rounding: GEMMs depend on where a tensor lies in memory


def test_a_part_of_another_layout(two: Processes) -> None:
    two.run(_other_layout)


def _whole() -> None:
    split, stack = context_parallel(attention(4), line()), context_parallel(encoder(1), line())
    x = _sequence()
    part = shard_sequence(x, line())
    said = (
        "expected this process's part of a sequence, got the whole sequence. Give each process its part: "
        'shard_sequence(tensor, mesh, layout="contiguous").'
    )
    for whole in (x, gather_sequence(part, line())):
        for name, call in {"query": split, "key": lambda x: split(part, x), "x": stack}.items():
            with pytest.raises(ArgumentError) as caught:
                call(whole)
            assert str(caught.value) == f"{name}: {said}"
    with torch.no_grad():
        caches = stack.eval().make_cache(2, 9)
        assert stack(x, cache=caches).shape == x.shape  # every process is given all new tokens


def test_a_whole_sequence_in_every_process(two: Processes) -> None:
    two.run(_whole)


def _state(function: str) -> None:
    for make in (lambda: attention(4, sinks=True), lambda: encoder(1)):
        whole, split = make(), SPLITS[function](make(), line())
        state = {name: x + 1 for name, x in whole.state_dict().items()}
        outer = nn.ModuleDict({"split": split})
        if function == "tensor_parallel":
            before = [full(x).clone() for x in split.parameters()]
            with pytest.raises(
                ArgumentError, match=r"^state_dict: .*: expected a DTensor, got a plain tensor\. Load it"
            ):
                split.load_state_dict(state)
            with pytest.raises(ArgumentError, match=r"^state_dict: split\..*: expected a DTensor, got a plain tensor"):
                outer.load_state_dict({f"split.{name}": x for name, x in state.items()})
            assert all(torch.equal(full(x), y) for x, y in zip(split.parameters(), before, strict=True))
            copy.deepcopy(split).load_state_dict(split.state_dict())
            set_model_state_dict(split, dict(state), options=StateDictOptions(full_state_dict=True))
        else:
            split.load_state_dict(state)
        for name, x in split.named_parameters():
            assert torch.equal(full(x), state[name]), name
        for module in (split, outer, copy.deepcopy(split)):
            with pytest.raises(DistributedError, match=rf"^{function}: a split module cannot be pickled, because its"):
                pickle.dumps(module)
        x = torch.zeros(2, 5, EMBED, dtype=torch.float64, device="meta")
        with pytest.raises(DeviceError, match=rf"^{function}: query: expected a tensor on cpu, the device of the mesh"):
            split.to("meta")(x)


@pytest.mark.parametrize("function", SPLITS)
def test_loading_pickling_and_moving_to_meta(two: Processes, function: str) -> None:
    two.run(_state, function)


def _other_model(function: str) -> None:
    layer = nn.TransformerEncoderLayer(EMBED, 4, batch_first=True)
    for theirs in (layer, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)):
        clearhead.upgrade(theirs)
        with pytest.raises(DTypeError) as caught:
            SPLITS[function](theirs, line())  # type: ignore[type-var]
        assert str(caught.value).endswith(
            "clearhead.transformer.load_transformer(module) builds one with its parameters. Split that one."
        )
    assert isinstance(SPLITS[function](load_transformer(theirs), line()), Encoder)
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=EMBED, num_attention_heads=4, num_hidden_layers=1, intermediate_size=EMBED, vocab_size=7
    )
    with pytest.raises(DTypeError, match=r"got BertModel\. clearhead\.checkpoints\.layers_from_transformers\(model\)"):
        SPLITS[function](BertModel(config), line())  # type: ignore[type-var]


@pytest.mark.parametrize("function", SPLITS)
def test_modules_of_other_libraries(two: Processes, function: str) -> None:
    two.run(_other_model, function)


#: An input of one process alone: what the error names, and how the input is made.
OTHER_INPUTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "length": (r"length of the query: expected the same in every process, got \[9, 7\]", lambda x: x[:, :7]),
    "batch": (r"batch size of the query: expected the same in every process, got \[2, 1\]", lambda x: x[:1]),
    "no batch": (r"dimensions of the query: expected the same in every process, got \[3, 2\]", lambda x: x[0]),
    "dtype": (r"dtype of the query: expected the same in every process, got another in process 1", Tensor.float),
    "key": (r"length of the key: expected the same in every process, got \[9, 11\]", lambda x: x),
}


def _other_input(name: str, of_stack: bool) -> None:
    said, change = OTHER_INPUTS[name]
    other = dist.get_rank() == 1
    split: Any = tensor_parallel(encoder(1) if of_stack else attention(4), line())
    x = _sequence()
    inputs = (x, _sequence(11 if other else 9)) if name == "key" else (change(x) if other else x,)
    with pytest.raises(DistributedError, match=rf"^tensor_parallel: {said}.*\. Give every process the same input\.$"):
        split(*inputs)
    good = split(x)
    assert collectives(lambda: split(x)) == {"all_reduce": 2 if of_stack else 1}
    assert split(x[:, :4]).shape == (2, 4, EMBED)
    assert torch.equal(split(x), good)


@pytest.mark.parametrize(("name", "of_stack"), [*((name, False) for name in OTHER_INPUTS), ("length", True)])
def test_another_input_in_one_process_after_tensor_parallel(two: Processes, name: str, of_stack: bool) -> None:
    two.run(_other_input, name, of_stack)


def _other_last_input(store: str, rank: int, end: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=2)
    )
    split: Any = tensor_parallel(attention(4), init_device_mesh("cpu", (2,)))
    x = _sequence()
    split(x)
    try:
        split(x[:, :7] if rank == 1 else x)
    except DistributedError as error:
        end.send(str(error))
    end.close()
    os._exit(0)


def test_another_length_in_one_process_after_an_equal_call() -> None:
    """Only the process whose length has changed compares it. Both raise when the time-out ends."""
    said = _answers([(_other_last_input, (0,)), (_other_last_input, (1,))])
    assert said[0].startswith("tensor_parallel: forward: all-reduce of the output of module.out_proj: the exchange")
    assert said[1].startswith("tensor_parallel: the processes could not agree on the call, because one of them has")


def _answers(calls: Sequence[tuple[Callable[..., None], tuple[object, ...]]]) -> list[str]:
    """What functions of a store, these arguments and a pipe send, each in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in calls]
        started = [
            context.Process(target=function, args=(f"{folder}/store", *arguments, there))
            for (function, arguments), (_, there) in zip(calls, pipes, strict=True)
        ]
        for process in started:
            process.start()
        said = [here.recv() if here.poll(60) else "no answer in time" for here, _ in pipes]
        for process in started:
            process.join(10)
            process.kill()
    return said


def _refuses_and_ends(store: str, rank: int, in_stack: bool, end: Any) -> None:
    """The first process refuses a call, and ends at once."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (3,))
    split: Any = context_parallel(encoder(1) if in_stack else attention(4), mesh)
    x = shard_sequence(_sequence(), mesh)
    try:
        split(x[..., :5] if rank == 0 else x)
    except ClearheadError as error:
        end.send(str(error))
    end.close()
    atexit._run_exitfuncs()  # a process of multiprocessing leaves them out
    os._exit(0)


@pytest.mark.parametrize("in_stack", [False, True])
def test_a_process_that_refuses_and_ends_is_understood(in_stack: bool) -> None:
    for _ in range(3):
        said = _answers([(_refuses_and_ends, (rank, in_stack)) for rank in range(3)])
        assert "got (2, 3, 5)" in said[0]
        for text in said[1:]:
            assert "process 0 of the group refused the call" in text
            assert "got (2, 3, 5)" in text
