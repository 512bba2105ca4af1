"""The native kernel writes its results and nothing beside them, and reads nothing it was not given."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import clearhead
from clearhead import masks
from tests.support.native import NativeArguments, needs_native, on_sets_of_dtype, plan_of, threads
from tests.support.native_cases import CASES, numbers

GUARD = 64  # numbers before and behind each tensor
BORDER = -131072.0  # exact in bfloat16 too
SIZES = [(1, 1, 1, 1), (3, 17, 5, 3), (50, 131, 16, 19), (97, 7, 33, 1), (8, 300, 64, 64), (61, 547, 64, 32)]

pytestmark = needs_native


class Guarded:
    """Makes tensors that lie in the middle of a larger memory, and looks at what became of the rest."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def empty(self, *shape: int, dtype: torch.dtype | None = None, border: float = BORDER) -> Tensor:
        count = int(torch.Size(shape).numel())
        memory = torch.full((count + 2 * GUARD,), border, dtype=dtype)
        self._memory.append(memory)
        return memory[GUARD : GUARD + count].view(shape)

    def untouched(self) -> bool:
        return all(
            bool((memory[:GUARD] == BORDER).all() and (memory[-GUARD:] == BORDER).all()) for memory in self._memory
        )


def request(query: Tensor, key: Tensor, value: Tensor, high: int) -> NativeArguments:
    length, count = query.shape[2], key.shape[2]
    return NativeArguments(query, key, value, scale=0.4, low=-length, high=min(high, count), stop=count)


def operands(sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value and the output's gradient."""
    length, count, dim, value_dim = sizes
    shapes = ((length, dim), (count, dim), (count, value_dim), (length, value_dim))
    return [torch.randn(2, 2, *shape).to(dtype) for shape in shapes]


def between_nan(tensors: list[Tensor]) -> list[Tensor]:
    return [Guarded().empty(*x.shape, dtype=x.dtype, border=torch.nan).copy_(x) for x in tensors]


def everything(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, high: int = 1000) -> tuple[Tensor, ...]:
    """Outputs, lse, and gradients."""
    call = request(query, key, value, high)
    plan = plan_of(call, differentiable=True)
    lse = plan.empty_lse(query)
    output = plan.forward(call, lse)
    lse_gradient = torch.linspace(-1, 1, lse.numel()).view(lse.shape)
    gradients = plan.backward(call, output, lse, gradient, lse_gradient)
    return plan_of(call).forward(call), output, lse, *gradients


def guard_allocations(monkeypatch: pytest.MonkeyPatch) -> Guarded:
    """Guard what the kernel's plans allocate."""
    guarded = Guarded()

    def new_empty(self: Tensor, *shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        return guarded.empty(*_flat(shape), dtype=dtype or self.dtype)

    def new_empty_strided(self: Tensor, shape: Any, strides: Any, dtype: torch.dtype | None = None) -> Tensor:
        return guarded.empty(*shape, dtype=dtype or self.dtype).as_strided(shape, strides)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)
    monkeypatch.setattr(Tensor, "new_empty_strided", new_empty_strided)
    monkeypatch.setattr(
        torch, "empty_like", lambda tensor, dtype=None: guarded.empty(*tensor.shape, dtype=dtype or tensor.dtype)
    )
    return guarded


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("high", [0, 1000], ids=["causal", "all"])
@on_sets_of_dtype
def test_nothing_is_written_outside(
    sizes: tuple[int, ...], high: int, dtype: torch.dtype, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = guard_allocations(monkeypatch)
    found = everything(*operands(sizes, dtype), high=high)
    assert all(tensor.isfinite().all() and not (tensor == BORDER).any() for tensor in found)
    assert guarded.untouched()


@pytest.mark.parametrize("sizes", SIZES[:-1])
@pytest.mark.parametrize("high", [0, 1000], ids=["causal", "all"])
@pytest.mark.parametrize("averages", [False, True], ids=["weights", "their mean"])
def test_statistics_write_nothing_outside(sizes: tuple[int, ...], high: int, averages: bool, instructions: str) -> None:
    length, count, _, value_dim = sizes
    guarded = Guarded()
    query, key, value, _ = between_nan(operands(sizes))
    rows = [guarded.empty(2, 2, length) for _ in range(5)]
    columns = [guarded.empty(2, 2, count).zero_() for _ in range(2)]
    top_k = min(3, count)
    keys = torch.full((2 * 2 * length * top_k + 2 * GUARD,), 7, dtype=torch.int64)
    top_keys = keys[GUARD:-GUARD].view(2, 2, length, top_k)
    top_weights, output = guarded.empty(2, 2, length, top_k), guarded.empty(2, 2, length, value_dim)
    weights = guarded.empty(2, 1 if averages else 2, length, count).zero_()
    pooled = guarded.empty(2, 2, min(7, length), min(7, count)).zero_()
    call = request(query, key, value, high)
    names = ("largest", "visible", "entropy", "confidence", "norm", "received", "viewers")
    plan_of(call).statistics(
        call,
        output,
        **dict(zip(names, (*rows, *columns), strict=True)),
        top_weights=top_weights,
        top_keys=top_keys,
        top=top_k,
        weights=weights,
        weights_strides=(weights.stride(0), 0 if averages else weights.stride(1), weights.stride(2)),
        map=pooled,
        map_rows=pooled.shape[2],
        map_columns=pooled.shape[3],
    )
    found = (*rows, *columns, top_weights, output, weights, pooled)
    assert all(tensor.isfinite().all() and not (tensor == BORDER).any() for tensor in found)
    assert bool(((top_keys >= -1) & (top_keys < count)).all())
    assert bool((keys[:GUARD] == 7).all() and (keys[-GUARD:] == 7).all())
    assert guarded.untouched()


def _flat(shape: tuple[object, ...]) -> tuple[int, ...]:
    return tuple(shape[0]) if isinstance(shape[0], (tuple, torch.Size)) else shape


@pytest.mark.parametrize("sizes", SIZES)
@on_sets_of_dtype
def test_what_lies_beside_the_inputs_does_not_matter(
    sizes: tuple[int, ...], dtype: torch.dtype, instructions: str
) -> None:
    plain = operands(sizes, dtype)
    for expected, found in zip(everything(*plain), everything(*between_nan(plain)), strict=True):
        assert torch.equal(found, expected)


#: Saved tensors as hooks may return them: the same numbers between NaN, or fewer digits of them.
RETURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: between_nan([x])[0],
    "transposed": lambda x: between_nan([x.mT])[0].mT if x.dim() > 1 else x,
    "rows with gaps": lambda x: between_nan([torch.stack([x, torch.full_like(x, torch.nan)], -1)])[0][..., 0],
    "float64": lambda x: between_nan([x.double()])[0],
    "float16": lambda x: between_nan([x.half()])[0],
}


@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("sizes", SIZES[:-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_tensors_between_borders(
    dtype: torch.dtype, sizes: tuple[int, ...], returned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward pass reads what came back, and nothing beside it, and writes its gradients only."""
    *inputs, factors = operands(sizes, dtype)
    leaves = [x.requires_grad_() for x in inputs]

    def gradients() -> tuple[Tensor, ...]:
        with clearhead.use_kernel("native"):
            output, lse = clearhead.attention(*leaves, masks.causal("bottom_right"), return_lse=True)
        visible = lse.isfinite()
        return torch.autograd.grad((output, lse), leaves, (factors, visible.float()))

    plain = gradients()
    guarded = guard_allocations(monkeypatch)
    with saved_tensors_hooks(lambda x: x, lambda x: RETURNED[returned](x) if x.is_floating_point() else x):
        found = gradients()
    assert guarded.untouched()
    for expected, x in zip(plain, found, strict=True):
        bound = 1e-5 if returned != "float16" and dtype == torch.float32 else 2e-2
        torch.testing.assert_close(x, expected, rtol=0, atol=bound * max(1.0, float(expected.abs().max())))


def test_several_threads_at_once() -> None:
    """Each gets what it would get alone, with threads of their own inside."""
    names = ["plain", "causal", "one query of many heads", "documents", "bias and bool"]
    alone = {name: numbers(CASES[name], "native", CASES[name].inputs())["output"] for name in names}
    wrong: list[str] = []

    def work(_: int) -> None:
        torch.set_num_threads(2)
        for name in 3 * names:
            found = numbers(CASES[name], "native", CASES[name].inputs())["output"]
            if not torch.allclose(found, alone[name], rtol=1e-5, atol=1e-6):
                wrong.append(name)

    with threads(torch.get_num_threads()):  # `work` changes it
        list(ThreadPoolExecutor(3).map(work, range(3)))
    assert not wrong


_FORKED = """
import os, torch, clearhead
torch.set_num_threads(2)
x = torch.randn(1, 4, 300, 16)
with clearhead.use_kernel("native"):
    expected = clearhead.attention(x, x, x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.allclose(clearhead.attention(x, x, x), expected, atol=1e-6) else 1)
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_computes_too() -> None:
    assert subprocess.run([sys.executable, "-c", _FORKED], timeout=120, check=False).returncode == 0
