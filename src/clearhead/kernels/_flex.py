"""PyTorch's FlexAttention: a kernel compiled for this machine, which skips the blocks of keys a mask rules out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache
from shutil import which
from types import FunctionType
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from .._call.call import Call, Results
from .._call.layout import Layout
from .._torch_private import has_avx2, mark_static, sizes_apart
from ..masks._bound import BoundMask
from ..masks._grid import Block
from ..masks._structure import joined
from ._base import Kernel, Plan, Refusal, applicable, refusals_of_half
from ._flex_blocks import lower_tensors
from ._flex_rule import SIDE, Limits, is_visible, pick, table

_BLOCKS = [f"{full}{of}" for of in ("kv_num_blocks", "kv_indices") for full in ("", "full_")]
_BLOCKS_OF_KEYS = [name.replace("kv", "q") for name in _BLOCKS]  # its backward pass reads them
_LISTS = {"visible", "bias"}  # as long as the mask makes them
_SHORTEST = 1 << 20  # filling up to this takes a millisecond, compiling for another length ten seconds
_NARROWEST = 16  # the head size from which on PyTorch's CUDA kernels run


@final
class FlexKernel(Kernel):
    """`torch.nn.attention.flex_attention`, compiled once for each signature of a call."""

    name: ClassVar[str] = "flex"
    twice_differentiable: ClassVar[bool] = False
    compiles: ClassVar[bool] = True
    formula: ClassVar[frozenset[str]] = frozenset({"softcap"})
    seeds_dropout: ClassVar[bool] = False

    def refusals(self, layout: Layout, bound: BoundMask) -> tuple[Refusal, ...]:
        if layout.tracing and not _fits_graph(layout):
            return (Refusal("it fits into graphs of torch.compile on CUDA devices alone"),)
        computed = [part for part in bound.parts if part.has_bias and not part.structure.biases]
        if layout.device.type != "cpu" and len(computed) == 1 and computed[0].structure.slopes is not None:
            computed = []  # PyTorch's C++ compiles no rule that reads several lists of numbers
        reasons = applicable(
            {
                "torch.func cannot transform it, or derive it forwards": layout.transformed,
                "it gives out no log-sum-exp": layout.lse and layout.device.type != "cuda",
                "it has no dropout": layout.dropout_p > 0,
                "a size is 0": layout.empty,
                "it computes in float32, not in float64": layout.dtype == torch.float64,
                "a computed bias would have to be built whole, (B, H, L, S)": bool(computed),
            }
        )
        return (*reasons, *_reasons_of_device(layout))

    def plan(self, layout: Layout, bound: BoundMask) -> Plan:
        return self._compute

    def _compute(self, call: Call) -> Results:
        # Other strides would be compiled for anew.
        inputs = [tensor.contiguous() for tensor in (call.query, call.key, call.value)]
        if not call.layout.gradients:
            inputs = [tensor.detach() for tensor in inputs]  # on the CPU it refuses inputs that need gradients
        in_blocks = call.layout.device.type != "cpu" and call.layout.query[2] % SIDE == call.layout.key[2] % SIDE == 0
        numbers, limits = _numbers(call)
        options = numbers, limits, call.layout.scale, call.layout.lse
        if call.layout.tracing:  # the whole graph is compiled
            output, lse = _attend(*inputs, *options)
        else:
            inputs = [_fixed_sizes(tensor, in_blocks) for tensor in inputs]
            if call.layout.device.type == "cpu":
                for name in _LISTS & numbers.keys():
                    numbers[name] = _fixed_size(numbers[name])
            attend = _compiled(_signature(call, inputs, numbers, limits))
            with sizes_apart():
                output, lse = attend(*inputs, *options)
        masked = call.coverage.masked_queries  # (1 or B, 1, L, 1)
        if masked is not None:
            output = output.masked_fill(masked, 0)
            lse = None if lse is None else lse.masked_fill(masked[..., 0], float("-inf"))
        return Results(output, lse)


def _numbers(call: Call) -> tuple[dict[str, Tensor], Limits]:
    """Every tensor that a compiled kernel reads besides query, key and value, by name; and constants of its rule."""
    lowered, limits = (
        ({}, (None, None)) if call.mask is None else lower_tensors(call.bound, bool(call.layout.gradients))
    )
    numbers, biases = dict(lowered), None
    if call.layout.softcap is not None:
        numbers["softcap"] = torch.full((), call.layout.softcap, device=call.query.device)
    for part in call.bound.parts:
        if part.structure.slopes is None:  # which are among what is lowered
            biases = joined(biases, part.bias(Block(call.grid), call.layout.compute_dtype), torch.add)
    if biases is not None:
        numbers["bias"], numbers["bias_steps"] = table(biases)
    return numbers, limits


def _attend(
    query: Tensor, key: Tensor, value: Tensor, numbers: dict[str, Tensor], limits: Limits, scale: float, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """What is compiled. Sizes are symbols, numbers are tensors, so that calls of one signature are compiled once."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    if query.dim() == 5:  # whole blocks
        query, key, value = query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return is_visible(numbers, limits, b, h, i, j)

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if "softcap" in numbers:
            score = numbers["softcap"] * torch.tanh(score / numbers["softcap"])
        if "slopes" in numbers:
            score = score - numbers["slopes"][h] * (i + numbers["shift"] - j).abs()
        if "bias" in numbers:
            score = score + pick(numbers["bias"], numbers["bias_steps"], b, h, i, j)
        return score

    named: dict[str, Any] = {name: numbers.get(name) for name in (*_BLOCKS, *_BLOCKS_OF_KEYS)}
    sizes, sides = (query.shape[2], key.shape[2]), (SIDE, SIDE)
    blocks = BlockMask(sizes, BLOCK_SIZE=sides, mask_mod=rule, **named) if _BLOCKS[0] in numbers else None
    changes = {"softcap", "slopes", "bias"} & numbers.keys()
    score_mod, grouped = change if changes else None, query.shape[1] != key.shape[1]
    if not lse:
        return flex_attention(query, key, value, score_mod, blocks, scale, grouped), None
    aux = AuxRequest(lse=True)
    output, results = flex_attention(query, key, value, score_mod, blocks, scale, grouped, return_aux=aux)
    return output, results.lse


def _fixed_sizes(tensor: Tensor, in_blocks: bool) -> Tensor:
    """The tensor (B, H, L, D) with H and D as constants, which generated code for GPUs needs.

    Whole blocks become a dimension of their own, (B, H, L / SIDE, SIDE, D). Code for GPUs then checks no edges. PyTorch
    does not take them on a CPU.
    """
    view = tensor.unflatten(2, (-1, SIDE)) if in_blocks else tensor.view(tensor.shape)  # not the caller's tensor
    for dim in (1, *range(3, view.dim())):
        mark_static(view, dim)
    return view


def _fixed_size(numbers: Tensor) -> Tensor:
    """A list filled up to a power of two, whose length the compiler takes for a constant.

    PyTorch's generated C++ confuses the names of sizes when functions of cells read tensors of any length.
    """
    length = max(_SHORTEST, 1 << (numbers.numel() - 1).bit_length())
    filled = F.pad(numbers, (0, length - numbers.numel()))
    mark_static(filled, 0)
    return filled


def _signature(call: Call, inputs: list[Tensor], numbers: dict[str, Tensor], limits: Limits) -> tuple[object, ...]:
    """The properties of a call for which the compiler makes one graph: all but sizes, which are symbols unless 1."""
    heads = (call.query.shape[1], call.key.shape[1], call.query.shape[-1], call.value.shape[-1])
    lists = _LISTS if call.layout.device.type == "cpu" else set[str]()
    fixed = tuple((name, tensor.numel() if name in lists else None) for name, tensor in numbers.items())
    ones = tuple(tuple(size == 1 for size in tensor.shape) for tensor in (*inputs, *numbers.values()))
    constants = (call.layout.scale, bool(call.layout.gradients), call.layout.learns_bias, call.layout.lse, limits)
    return (call.query.dtype, call.query.device, *constants, heads, fixed, ones)


@lru_cache(maxsize=128)
def _compiled(signature: tuple[object, ...]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A compiled copy of `_attend` for calls of one signature.

    A copy, because the compiler counts what it has compiled of one function and gives up at eight.
    """
    function = FunctionType(_attend.__code__.replace(), _attend.__globals__, closure=_attend.__closure__)
    return torch.compile(function, dynamic=True, fullgraph=True)


def _fits_graph(layout: Layout) -> bool:
    """Whether a graph compiles it: exported ones hold other operators, and PyTorch's C++ has no backward pass."""
    return layout.device.type == "cuda" and torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


def _reasons_of_device(layout: Layout) -> list[Refusal]:
    """Reasons that depend on the device."""
    if layout.device.type == "cuda":
        reasons: list[Refusal] = []
        if min(layout.query[3], layout.value[3]) < _NARROWEST:
            reasons.append(Refusal("PyTorch takes head sizes of {least} or more", least=_NARROWEST))
        if layout.learns_bias and torch.are_deterministic_algorithms_enabled():
            reasons.append(Refusal("it sums the gradient of a bias in any order"))
        return reasons
    if layout.device.type != "cpu":
        return [Refusal("PyTorch has it for CPUs and CUDA devices only")]
    builds = _builds_for_this_cpu()
    return [
        *applicable({"it has no backward on the CPU": bool(layout.gradients)}),
        *refusals_of_half(layout),
        *applicable(
            {
                "PyTorch builds it for x86 processors with AVX2 alone, on Linux and Windows": not builds,
                "there is no C++ compiler to build it with": builds and not _finds_compiler(),
            }
        ),
    ]


def _builds_for_this_cpu() -> bool:
    return sys.platform != "darwin" and has_avx2()


def _finds_compiler() -> bool:
    """Whether PyTorch would find a C++ compiler. Its own check would import its whole compiler."""
    command = os.environ.get("CXX") or ("cl" if sys.platform == "win32" else "g++")
    return which(command.split()[0]) is not None
