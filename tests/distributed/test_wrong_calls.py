"""Five hundred generated wrong calls, half of them wrong on one process alone: all refuse each, and none waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.distributed import context_parallel, gather_sequence, shard_sequence, tensor_parallel
from clearhead.errors import ClearheadError

from .building import EMBED, attention, encoder
from .meshes import line
from .processes import Processes

COUNT = 500
LENGTH = 9
Arguments = dict[str, Any]


def _changed(x: Tensor, **changes: Any) -> Arguments:
    return {"query": x, **changes}


def _random_size(x: Tensor, rng: random.Random) -> Tensor:
    sizes = list(x.shape)
    sizes[2] = rng.choice([1, 5, EMBED - 1, EMBED + 1, 2 * EMBED])
    return x.new_zeros(sizes)


#: What is wrong with a call, from this process's part of a good one.
ARGUMENTS: dict[str, Callable[[Tensor, random.Random], Arguments]] = {
    "features": lambda x, rng: _changed(_random_size(x, rng)),
    "dtype": lambda x, rng: _changed(x.to(rng.choice([torch.float32, torch.float16, torch.int64]))),
    "kind": lambda x, rng: _changed(rng.choice([None, 3, [1.0], "x"])),
    "dimensions": lambda x, rng: _changed(rng.choice([x[0, 0], x[None], x[0, 0, 0]])),
    "value without key": lambda x, rng: _changed(x, value=x),
    "value of another length": lambda x, rng: _changed(x, key=x, value=x[:, : rng.randrange(x.shape[1])]),
    "mask of numbers": lambda x, rng: _changed(x, mask=torch.randn(LENGTH, LENGTH)),
    "mask of another kind": lambda x, rng: _changed(x, mask=rng.choice([3, "causal", [True]])),
    "mask of another size": lambda x, rng: _changed(x, mask=torch.ones(rng.randrange(2, 8), LENGTH, dtype=torch.bool)),
    "lengths too long": lambda x, rng: _changed(x, mask=masks.lengths(torch.tensor([LENGTH + rng.randrange(1, 9), 1]))),
    "mask of another batch": lambda x, rng: _changed(x, mask=masks.keep(keys=torch.ones(3, LENGTH, dtype=torch.bool))),
    "slopes of other heads": lambda x, rng: _changed(x, mask=clearhead.positions.ALiBi(rng.choice([1, 7, 9]))),
    "flag": lambda x, rng: _changed(x, need_weights=rng.choice(["yes", [True], torch.ones(2)])),
    "positions": lambda x, rng: _changed(x, positions=rng.choice([torch.arange(3), -4, 1.5, torch.zeros(LENGTH)])),
    "cache": lambda x, rng: _changed(x, cache=rng.choice([3, clearhead.caches.KVCache(2, 4, 9, 4)])),
    "jagged": lambda x, rng: _changed(torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)),
}

#: What is right alone, and wrong beside a process that makes the good call.
DIFFERENCES: dict[str, Callable[[Tensor, random.Random], Arguments]] = {
    "batch": lambda x, rng: _changed(x.new_zeros(rng.choice([1, 3, 5]), *x.shape[1:])),
    "length": lambda x, rng: _changed(x.new_zeros(2, x.shape[1] + rng.choice([5, 7, 12]), EMBED)),
    "another mask": lambda x, rng: _changed(x, mask=rng.choice([masks.causal(), masks.sliding_window(2, 2)])),
    "other positions": lambda x, rng: _changed(x, positions=rng.randrange(1, 9)),
    "weights": lambda x, rng: _changed(x, need_weights=True),
    "no batch": lambda x, rng: _changed(x[0]),
    "memory": lambda x, rng: _changed(x, key=x.clone()),
}

#: What surrounds a call of one process alone.
SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no gradients": torch.no_grad,
    "another kernel": lambda: clearhead.use_kernel("reference"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def _refused(what: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except ClearheadError:
        return
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} {error}") from error
    raise AssertionError(f"{what} was not refused")


def _all_refused(seed: int, count: int) -> set[str]:
    """The kinds that were refused, in every process."""
    rng, mesh = random.Random(seed), line()
    modules = {
        "attention": context_parallel(attention(4), mesh),
        "ring": context_parallel(attention(4), mesh, method="ring", layout="zigzag"),
        "stack": context_parallel(encoder(1), mesh),
    }
    seen: set[str] = set()
    for number in range(count):
        name = rng.choice([*ARGUMENTS, *DIFFERENCES, *SURROUNDINGS])
        of_stack = name in ("features", "dtype", "kind", "dimensions", "mask of numbers", "mask of another kind")
        kind = rng.choice(["attention", "ring", "stack"] if of_stack else ["attention", "ring"])
        layout = "zigzag" if kind == "ring" else "contiguous"
        everywhere = name in ARGUMENTS and number % 2 == 0
        wrong = everywhere or dist.get_rank() == rng.randrange(2)
        x = shard_sequence(torch.zeros(2, LENGTH, EMBED, dtype=torch.float64), mesh, layout=layout)  # type: ignore[arg-type]
        makes = ARGUMENTS | DIFFERENCES
        given = makes[name](x, rng) if name in makes else {"query": x}
        given = given if wrong else {"query": x}
        given |= {"x": given.pop("query")} if kind == "stack" else {}
        surroundings = SURROUNDINGS[name] if name in SURROUNDINGS and wrong else nullcontext
        with surroundings():
            _refused(f"{number} {name} of {kind}", lambda module=modules[kind], given=given: module(**given))
        seen.add(name)
        if number % 25 == 0:  # and the next good call goes on
            assert modules[kind](x).shape == x.shape
    return seen


def test_every_process_refuses_what_one_refuses(two: Processes) -> None:
    for seen in two.run(_all_refused, 17, COUNT):
        assert len(seen) >= 20


def _wrong_set_ups(seed: int, count: int) -> None:
    """The same of the functions that split."""
    rng, mesh = random.Random(seed), line()
    for number in range(count):
        name = rng.choice(["mesh", "method", "layout", "module", "dim", "tensor", "twice", "heads"])
        wrong = number % 2 == 0 or dist.get_rank() == rng.randrange(2)
        module: Any = attention(4)
        if name in ("dim", "tensor"):
            given: Arguments = {"tensor": torch.zeros(2, 4, 3), "dim": 1}
            bad = {"dim": rng.choice([3, -4, "1", 0.5]), "tensor": rng.choice([None, 3, torch.zeros(())])}
            given |= {name: bad[name]} if wrong else {}
            _refused(f"{number} {name}", lambda given=given: gather_sequence(mesh=mesh, **given))
            continue
        options: Arguments = {"mesh": mesh}
        # Drawn in every process, as what follows is.
        bad_option = rng.choice([None, "everywhere", 3])
        bad_module = rng.choice([torch.nn.Linear(2, 2), None, clearhead.MultiHeadAttention])
        if wrong and name in ("mesh", "method", "layout"):
            options[name] = bad_option
        if wrong and name == "module":
            module = bad_module
        if name == "twice":
            context_parallel(module, mesh)
            module = module if wrong else attention(4)  # the other process splits for the first time
        if name == "heads" and wrong:
            module = clearhead.MultiHeadAttention(35, 5)
        splits = tensor_parallel if name == "heads" or (name == "mesh" and rng.random() < 0.5) else context_parallel
        _refused(f"{number} {name}", lambda module=module, options=options, splits=splits: splits(module, **options))


def test_every_process_refuses_a_wrong_set_up(two: Processes) -> None:
    two.run(_wrong_set_ups, 23, 100)
