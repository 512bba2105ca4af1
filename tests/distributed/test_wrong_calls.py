"""Hundreds of generated wrong calls, half of them wrong on one process alone: all refuse each, and none waits."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import masks
from clearhead.caches import KVCache
from clearhead.distributed import context_parallel, shard_sequence
from clearhead.distributed._agreement import agreement
from clearhead.errors import ClearheadError, DistributedError, DTypeError, ShapeError
from clearhead.transformer import Decoder

from .building import EMBED, attention, decoder, encoder, refuses
from .comparing import halve_heads, sequence_mesh
from .processes import in_processes, line

LENGTH = 9
Arguments = dict[str, Any]
Makes = dict[str, Callable[[Tensor, random.Random], Arguments]]


def _changed(x: Tensor, **changes: Any) -> Arguments:
    return {"query": x, **changes}


def _cache() -> KVCache:
    return KVCache(2, 4, 9, 4)


# What is drawn must not depend on this process's part: every process draws the same.

#: What is wrong with a call, from this process's part of a good one.
ARGUMENTS: Makes = {
    "features": lambda x, rng: _changed(x.new_zeros(*x.shape[:2], rng.choice([1, 5, EMBED - 1, EMBED + 1, 2 * EMBED]))),
    "dtype": lambda x, rng: _changed(x.to(rng.choice([torch.float32, torch.float16, torch.int64]))),
    "kind": lambda x, rng: _changed(rng.choice([None, 3, [1.0], "x"])),
    "dimensions": lambda x, rng: _changed(rng.choice([x[0, 0], x[None], x[0, 0, 0]])),
    "mask of numbers": lambda x, rng: _changed(x, mask=torch.randn(LENGTH, LENGTH)),
    "mask of another kind": lambda x, rng: _changed(x, mask=rng.choice([3, "causal", [True]])),
    "mask of another size": lambda x, rng: _changed(x, mask=torch.ones(rng.randrange(2, 8), LENGTH, dtype=torch.bool)),
    "lengths too long": lambda x, rng: _changed(x, mask=masks.lengths(torch.tensor([LENGTH + rng.randrange(1, 9), 1]))),
    "mask of another batch": lambda x, rng: _changed(x, mask=masks.keep(keys=torch.ones(3, LENGTH, dtype=torch.bool))),
    "slopes of other heads": lambda x, rng: _changed(x, mask=clearhead.positions.ALiBi(rng.choice([1, 7, 9]))),
    "flag": lambda x, rng: _changed(x, need_weights=rng.choice(["yes", [True], torch.ones(2)])),
    "positions": lambda x, rng: _changed(x, positions=rng.choice([torch.arange(3), -4, 1.5, torch.zeros(LENGTH)])),
    "cache": lambda x, rng: _changed(x, cache=rng.choice([3, _cache()])),
    "jagged": lambda x, rng: _changed(torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)),
    "name": lambda x, rng: _changed(x, attn_mask=None),
}

#: The same of an attention alone, of any stack, and of a decoder.
OF_ATTENTION: Makes = {
    "value without key": lambda x, rng: _changed(x, value=x),
    "value of another length": lambda x, rng: _changed(x, key=x, value=x[:, : rng.randrange(3)]),
}
OF_STACKS: Makes = {
    "caches": lambda x, rng: _changed(x, cache=rng.choice([[], [_cache()] * 2, [3, 4], [_cache(), _cache()]])),
}
OF_DECODERS: Makes = {
    "memory": lambda x, rng: _changed(x, memory=rng.choice([None, 3, x[0], x[:1], x[..., :5], x.float()])),
    "memory mask": lambda x, rng: _changed(x, memory_mask=rng.choice([3, torch.randn(LENGTH, LENGTH)])),
}

#: What is right alone, and wrong beside a process that makes the good call.
DIFFERENCES: Makes = {
    "batch": lambda x, rng: _changed(x.new_zeros(rng.choice([1, 3, 5]), *x.shape[1:])),
    "length": lambda x, rng: _changed(x.new_zeros(2, x.shape[1] + rng.choice([5, 7, 12]), EMBED)),
    "another mask": lambda x, rng: _changed(x, mask=rng.choice([masks.causal(), masks.sliding_window(2, 2)])),
    "other positions": lambda x, rng: _changed(x, positions=rng.randrange(1, 9)),
    "weights": lambda x, rng: _changed(x, need_weights=True),
    "no batch": lambda x, rng: _changed(x[0]),
}
OF_ATTENTION_ALONE: Makes = {
    "another key": lambda x, rng: _changed(x, key=x.clone()),
    "a gradient of the query": lambda x, rng: _changed(x.clone().requires_grad_()),
}

#: What surrounds a call of one process alone.
SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "another kernel": lambda: clearhead.use_kernel("reference"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}

#: Texts in the errors of an attention.
NAMED = {
    **dict.fromkeys(("batch", "no batch"), "batch size: expected the same in every process, got ["),
    **dict.fromkeys(("no gradients", "a gradient of the query"), "gradients: expected the same in every process"),
    "length": "as shard_sequence cuts them",
    "cache": "cache: expected a cache of the split module",
    "another mask": "mask: expected the same in every process",
    "other positions": "positions: expected the same in every process",
    "weights": "need_weights: expected the same in every process",
    "another key": "key is query: expected the same in every process",
    "another kernel": "kernel: expected the same in every process",
    "autocast": "autocast: expected the same in every process",
}


def _refused(what: str, call: Callable[[], Any], also: tuple[type[Exception], ...], named: str) -> None:
    try:
        call()
    except (ClearheadError, *also) as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} {error}") from error
    else:
        raise AssertionError(f"{what} was not refused")
    # So ends a time-out, and so are refused processes that are not in the same call.
    assert "another call" not in said, f"{what}: {said}"
    assert named in said, f"{what}: {said}"


def _split(mesh: DeviceMesh) -> dict[str, Any]:
    made: dict[str, Any] = {
        "attention": attention(4),
        "ring": attention(4),
        "encoder": encoder(1),
        "layer": encoder().layers[1],  # pre-norm
        "decoder": decoder(),
    }
    for name, module in made.items():
        options: Any = {"method": "ring", "layout": "zigzag"} if name == "ring" else {}
        context_parallel(halve_heads(module), mesh, **options)
    return made


def _makes(kind: str) -> tuple[Makes, Makes]:
    """What is wrong in every process, and in one alone."""
    if kind in ("attention", "ring"):
        return {name: make for name, make in (ARGUMENTS | OF_ATTENTION).items() if name != "name"}, (
            DIFFERENCES | OF_ATTENTION_ALONE
        )
    return ARGUMENTS | (OF_STACKS if kind != "layer" else {}) | (OF_DECODERS if kind == "decoder" else {}), DIFFERENCES


def _all_refused(seed: int, count: int) -> set[str]:
    """The kinds that were refused, in every process."""
    rng = random.Random(seed)
    mesh = sequence_mesh()
    modules, seen = _split(mesh), set[str]()
    for number in range(count):
        kind = rng.choice([*modules])
        everywhere, alone = _makes(kind)
        name = rng.choice([*everywhere] if number % 2 == 0 else [*everywhere, *alone, *SURROUNDINGS])
        wrong = dist.get_rank() == rng.randrange(dist.get_world_size()) or number % 2 == 0
        layout = "zigzag" if kind == "ring" else "contiguous"
        x = shard_sequence(torch.zeros(2, LENGTH, EMBED, dtype=torch.float64), mesh, layout=layout)  # type: ignore[arg-type]
        good: Arguments = {"query": x} | ({"memory": x} if kind == "decoder" else {})
        makes = everywhere | alone
        changed = good | makes[name](x, rng) if name in makes else good
        module, given = modules[kind], changed if wrong else good
        if kind not in ("attention", "ring"):
            good, given = ({"x": each["query"], **each} for each in (good, given))
            del good["query"], given["query"]
        # The parts of a layer are PyTorch's too; only the process that is wrong shows their errors.
        also = (RuntimeError, TypeError) if wrong and kind not in ("attention", "ring") else ()
        named = NAMED.get(name, "") if kind in ("attention", "ring") else ""
        with SURROUNDINGS[name]() if name in SURROUNDINGS and wrong else nullcontext():
            _refused(f"{number} {name} of {kind}", lambda module=module, given=given: module(**given), also, named)
        seen.add(name)
        if number % 25 == 0:  # and the next good call goes on
            assert module(**good).shape == x.shape
    return seen


@in_processes(2, 3, 4)
def test_every_process_refuses_what_one_refuses() -> None:
    """With four processes heads are split too."""
    world = dist.get_world_size()
    seen = _all_refused(world, 500 if world == 2 else 100)
    assert len(seen) >= 28 or world > 2


def _last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _part(mesh: DeviceMesh) -> Tensor:
    torch.manual_seed(3)
    return shard_sequence(torch.randn(2, LENGTH, EMBED, dtype=torch.float64), mesh)


def _stack_raises(module: Any, inputs: tuple[Tensor, ...], part: nn.Module) -> None:
    """A part raises in the last process alone; the next call goes on."""
    expected = module(*inputs)
    hook = part.register_forward_hook(lambda *_: 1 / 0) if _last() else None
    with refuses("division by zero", ZeroDivisionError if _last() else DistributedError):
        module(*inputs)
    if hook is not None:
        hook.remove()
    assert torch.equal(module(*inputs), expected)


@in_processes(2, 3)
def test_what_one_process_raises_anywhere_in_a_stack_all_refuse() -> None:
    x = _part(line())
    for made in (encoder(), decoder()):
        split: Any = context_parallel(made, line())
        inputs = (x, x) if isinstance(made, Decoder) else (x,)
        for part in (split.layers[0].norm1, split.layers[0].dropout, split.layers[1].feed_forward, split.norm):
            _stack_raises(split, inputs, part)


@in_processes(4)
def test_what_one_of_four_raises_in_a_stack_all_refuse() -> None:
    """Before the agreement of an attention, and before that at the end."""
    split: Any = context_parallel(halve_heads(encoder()), sequence_mesh())
    for part in (split.layers[1].norm1, split.norm):
        _stack_raises(split, (_part(sequence_mesh()),), part)


@in_processes(3)
def test_groups_that_still_wait_are_told_of_a_failure_in_an_earlier_group() -> None:
    """The last process raises. The second one learns that in its second group, while its third group waits."""
    groups = []
    for ranks in ((0,), (1,), (2,), (1, 2), (0, 1)):
        group = dist.new_group(ranks, timeout=timedelta(seconds=20))
        if dist.get_rank() in ranks:
            groups.append(group)
    said, kind = "of the last process", ValueError if _last() else DistributedError
    with refuses(said, kind), agreement("here", groups, "cpu") as exchange:
        if _last():
            raise ValueError(said)
        exchange({})


@in_processes(2)
def test_the_process_that_raises_does_not_wait() -> None:
    """The last process raises before the others have made the call."""
    split, x = context_parallel(encoder(), line()), _part(line())
    if not _last():
        dist.barrier()
    with refuses("unexpected keyword argument 'attn_mask'", TypeError if _last() else DistributedError):
        split(x, **({"attn_mask": None} if _last() else {}))
    if _last():
        dist.barrier()


@in_processes(2)
def test_a_stack_that_is_recomputed_refuses() -> None:
    """Recomputing ends a forward pass by an exception, in every process alike."""
    split, x = context_parallel(encoder(), line()), _part(line())
    for _ in range(2):
        recomputed: Any = checkpoint(split, x.clone().requires_grad_(), use_reentrant=False)
        recomputed.sum().backward()
        _refuses_caches(split, x)


def _refuses_caches(split: Any, x: Tensor) -> None:
    with refuses("a list of caches, one per layer", DTypeError if _last() else DistributedError):
        split(x, cache=3 if _last() else None)


@in_processes(2)
def test_a_copy_of_a_split_stack_has_its_own_parameters() -> None:
    split, x = context_parallel(encoder(), line()), _part(line())
    expected, other = split(x), copy.deepcopy(split)
    nn.init.zeros_(other.norm.weight)
    assert torch.equal(split(x), expected)
    assert not other(x).any()


@in_processes(2)
def test_a_fully_sharded_stack_refuses() -> None:
    split, x = context_parallel(encoder(), line()), _part(line())
    for module in (*split.layers, split):
        fully_shard(module, mesh=line())
    expected = split(x)
    _stack_raises(split, (x,), split.layers[1].norm1)
    with refuses("expected (B, length, 32)", ShapeError if _last() else DistributedError):
        split(x[..., :5] if _last() else x)
    assert torch.equal(split(x), expected)


@in_processes(2)
def test_a_compiled_stack_refuses() -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # Dynamo looks at it
    split, x = context_parallel(encoder(), line()), _part(line())
    graph: Any = torch.compile(split, backend="eager")
    assert torch.equal(graph(x), split(x))
    # Attention is run outside graphs; what the processes agree on is not traced.
    (graph_break,) = torch._dynamo.utils.counters["graph_break"]
    assert "LocalSequence.call" in graph_break
    _refuses_caches(graph, x)
    assert torch.equal(graph(x), split(x))
