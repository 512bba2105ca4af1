"""Wrong uses of split modules that look right to each process, and what the processes agree on to refuse them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import clearhead
from clearhead import masks
from clearhead.distributed import context_parallel, gather_sequence, shard_sequence, tensor_parallel
from clearhead.errors import ArgumentError, DeviceError, DistributedError, DTypeError
from clearhead.transformer import Encoder, EncoderLayer, FeedForward, load_transformer

from .building import EMBED, attention, collectives, decoder, encoder, full, refuses, sequences
from .comparing import compare_heads, compare_in_parts
from .processes import in_processes, line

SPLITS: dict[str, Any] = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}


@in_processes(2)
def test_modules_in_another_order() -> None:
    """Modules that are built alike, or of which one learns nothing."""
    x, first = shard_sequence(*sequences(9), line()), dist.get_rank() == 1
    for learns in (True, False):
        modules = [context_parallel(attention(4).requires_grad_(learns or index == 0), line()) for index in range(2)]
        with refuses("context_parallel: number of the module: expected the same in every", DistributedError) as caught:
            modules[first](x)
        assert str(caught.value).endswith("split and call modules in one order in every process.")
        for module in (*modules, copy.deepcopy(modules[0])):
            module(x)
    stacks = [context_parallel(encoder(1), line()) for _ in range(2)]
    with refuses("number of the module: expected the same", DistributedError):
        stacks[first](x)
    stacks[0](x)


@in_processes(2)
def test_a_part_of_another_layout() -> None:
    split, stack, both = (context_parallel(x, line(), layout="zigzag") for x in (attention(4), encoder(1), decoder()))
    (x,), layouts = sequences(9), ("zigzag", "contiguous")
    good, wrong = (shard_sequence(x, line(), layout=layout) for layout in layouts)  # type: ignore[arg-type]
    said = (
        ': expected a part in layout "zigzag", got one in layout "contiguous". Give shard_sequence and '
        "context_parallel the same layout."
    )
    calls: dict[str, Callable[[], Any]] = {
        "query": lambda: split(wrong),
        "key": lambda: split(good, wrong),
        "x": lambda: stack(x=wrong),
        "memory": lambda: both(good, wrong),
    }
    for name, call in calls.items():
        with refuses(name + said, ArgumentError):
            call()
    assert split(good).shape == good.shape
    with refuses('got one in layout "contig', ArgumentError if dist.get_rank() else DistributedError):
        split(wrong if dist.get_rank() else good)
    for lost in (wrong * 1, wrong.clone(), wrong[:]):  # nothing is claimed of results
        assert split(lost).shape == wrong.shape
    wrong.copy_(good)
    torch.testing.assert_close(split(wrong), split(good))  # to rounding: GEMMs depend on where a tensor lies in memory


@in_processes(2)
def test_a_whole_sequence_in_every_process() -> None:
    split, stack = context_parallel(attention(4), line()), context_parallel(encoder(1), line())
    (x,) = sequences(9)
    part = shard_sequence(x, line())
    said = (
        ": expected this process's part of a sequence, got the whole sequence. Give each process its part: "
        'shard_sequence(tensor, mesh, layout="contiguous").'
    )
    for whole in (x, gather_sequence(part, line())):
        for name, call in {"query": split, "key": lambda x: split(part, x), "x": stack}.items():
            with refuses(name + said, ArgumentError):
                call(whole)
    with torch.no_grad():
        caches = stack.eval().make_cache(2, 9)
        assert stack(x, cache=caches).shape == x.shape  # every process is given all new tokens


@in_processes(2)
@pytest.mark.parametrize("function", SPLITS)
def test_loading_pickling_and_moving_to_meta(function: str) -> None:
    for make in (lambda: attention(4, sinks=True), lambda: encoder(1)):
        whole, split = make(), SPLITS[function](make(), line())
        state = {name: x + 1 for name, x in whole.state_dict().items()}
        outer = nn.ModuleDict({"split": split})
        if function == "tensor_parallel":
            before = [full(x).clone() for x in split.parameters()]
            with pytest.raises(ArgumentError, match=r"^state_dict: .*: expected a DTensor, got a plain tensor\. Load"):
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
            with refuses(f"{function}: a split module cannot be pickled, because its", DistributedError):
                pickle.dumps(module)
        with refuses(f"{function}: query: expected a tensor on cpu, the device of the mesh", DeviceError):
            split.to("meta")(torch.zeros(2, 5, EMBED, dtype=torch.float64, device="meta"))


@in_processes(2)
@pytest.mark.parametrize("function", SPLITS)
def test_modules_of_other_libraries(function: str) -> None:
    layer = nn.TransformerEncoderLayer(EMBED, 4, batch_first=True)
    for theirs in (layer, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)):
        clearhead.upgrade(theirs)
        with refuses("clearhead.transformer.load_transformer(module) builds one with its parameters.", DTypeError):
            SPLITS[function](theirs, line())
    assert isinstance(SPLITS[function](load_transformer(theirs), line()), Encoder)
    # A class of transformers, without the seconds that importing its models takes.
    bert = type("BertModel", (nn.Module,), {"__module__": "transformers.models.bert"})()
    with refuses("got BertModel. clearhead.checkpoints.layers_from_transformers(model)", DTypeError):
        SPLITS[function](bert, line())


#: An input of one process alone: what the error names, and how the input is made.
OTHER_INPUTS: dict[str, tuple[str, Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "length": ("length of the query: expected the same in every process, got [9, 7]", lambda x: (x[:, :7],)),
    "batch": ("batch size of the query: expected the same in every process, got [2, 1]", lambda x: (x[:1],)),
    "no batch": ("dimensions of the query: expected the same in every process, got [3, 2]", lambda x: (x[0],)),
    "dtype": ("dtype of the query: expected the same in every process, got another in", lambda x: (x.float(),)),
    "key": ("length of the key: expected the same in every process, got [9, 7]", lambda x: (x, x[:, :7])),
}


@in_processes(2)
@pytest.mark.parametrize("of_stack", [False, True])
def test_another_input_in_one_process_after_tensor_parallel(of_stack: bool) -> None:
    (x,), other = sequences(9), dist.get_rank() == 1
    for said, change in OTHER_INPUTS.values():
        split: Any = tensor_parallel(encoder(1) if of_stack else attention(4), line())
        with refuses(f"tensor_parallel: {said}", DistributedError) as caught:
            split(*(change(x) if other else [x] * len(change(x))))
        assert str(caught.value).endswith(" Give every process the same input.")
        good = split(x)
        assert collectives(partial(split, x)) == {"all_reduce": 2 if of_stack else 1}
        assert split(x[:, :4]).shape == (2, 4, EMBED)
        assert torch.equal(split(x), good)


def _see_all(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= 0 * k


class _Turning:
    """A position part without a text of its own."""

    def __call__(self, q: Tensor, k: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        return q, k


def _layer(**options: Any) -> EncoderLayer:
    feed_forward = FeedForward(EMBED, 24, activation=options.pop("activation", None))
    return EncoderLayer(EMBED, attention(4), feed_forward, **options).double()


#: What the first process has, what the other has, and what is named.
OTHERS: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
    *(
        (partial(attention, 4, **{name: one}), partial(attention, 4, **{name: other}), f"{name} of the module")
        for name, one, other in (
            ("softcap", None, 5.0),
            ("scale", None, 0.1),
            ("dropout", 0.0, 0.1),
            ("mask", None, "alibi"),
            ("mask", masks.sliding_window(2, 0), masks.sliding_window(3, 0)),
            ("position", None, "rotary"),
            ("position", "rotary", "rotary of the length"),
            ("q_norm", None, "norm"),
            ("k_norm", None, "layer norm"),
        )
    ),
    (_layer, partial(_layer, activation=nn.functional.gelu), "parts beside attention"),
    (_layer, partial(_layer, dropout=0.1), "parts beside attention"),
    (_layer, partial(_layer, norm_first=True), "module"),
    (partial(attention, 4), partial(attention, 2), "module"),
    (partial(attention, 4), lambda: attention(4).requires_grad_(False), "module"),
    (partial(encoder, 1), partial(encoder, 2), "attention modules"),
]


@in_processes(2)
@pytest.mark.parametrize("function", SPLITS)
def test_another_module_is_refused_by_name(function: str) -> None:
    for make, other, said in OTHERS:
        module = other() if dist.get_rank() else make()
        got = r"(in process 1 of the group|got \[1, 2\])"
        with pytest.raises(DistributedError, match=rf"^{function}: {said}: expected the same .* {got}"):
            SPLITS[function](module, line())
        SPLITS[function](make(), line())


@in_processes(2)
@pytest.mark.parametrize("function", SPLITS)
def test_equal_modules_are_split(function: str) -> None:
    """Objects of this process alone, and addresses that differ, make no other module."""
    for _ in range(dist.get_rank() + 1):
        kept = [_Turning() for _ in range(97)]
    SPLITS[function](attention(4, position=kept[-1], mask=masks.mask_mod(_see_all)), line())


@in_processes(2)
def test_a_layer_that_is_used_twice_is_split_once() -> None:
    layer = encoder(1, kv_heads=1).layers[0]
    whole, (x,) = Encoder([layer, layer]).double(), sequences(9)
    compare_heads(whole, x, mask=masks.causal())
    compare_in_parts(whole, line(), x, mask=masks.causal())


@in_processes(2)
def test_parameters_that_two_parts_share_are_refused() -> None:
    whole = encoder(2, kv_heads=4)
    first, second = (layer.self_attention for layer in whole.layers)
    second.q_proj.weight = first.q_proj.weight  # type: ignore[union-attr]
    name = "module.layers.1.self_attention.q_proj.weight"
    said = "expected a part or parameter that is split in one way, got that of module."
    with refuses(f"{name}: {said}layers.0", ArgumentError):
        tensor_parallel(whole, line())
    rows = _layer()
    rows.self_attention.out_proj = rows.self_attention.q_proj  # type: ignore[union-attr]
    with refuses(f"{said}self_att", ArgumentError):
        tensor_parallel(rows, line())


@in_processes(2)
def test_dropout_of_processes_that_were_seeded_apart_is_refused() -> None:
    split, (x,) = tensor_parallel(_layer(dropout=0.5), line()), sequences(9)
    torch.manual_seed(dist.get_rank())
    split.eval()(x)
    split.train()
    said = "tensor_parallel: dropout: state of PyTorch's generator: expected the same in every process"
    with refuses(said, DistributedError):
        split(x)
    torch.manual_seed(3)
    output = split(x).detach()
    first = output.clone()
    dist.broadcast(first, 0)
    assert torch.equal(output, first)


@pytest.mark.parametrize("function", SPLITS)
@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("backend", ["gloo", "fake"])
def test_processes_of_a_mesh_of_devices_agree_over_gloo(backend: str, default: str, function: str) -> None:
    """There is no CUDA device here. The backend "fake" stands for one that exchanges tensors of a device only."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh.from_group(cast(Any, dist.group.WORLD), "cuda")
        with torch.device(default):
            SPLITS[function](clearhead.MultiHeadAttention(12, 4), mesh)
            with refuses("module: expected a MultiHeadAttention", DTypeError):
                SPLITS[function](nn.Linear(2, 2), mesh)
    finally:
        dist.destroy_process_group()
