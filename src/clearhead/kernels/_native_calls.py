"""Calling the compiled kernel: tensors into addresses, sizes and strides, in the order of `native/module.cpp`."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from .._native import extension, instruction_set_number

if TYPE_CHECKING:
    from ._native_statistics import WeightStatistics

__all__ = [
    "LEAVE_NOBODY",
    "LEAVE_OUT",
    "LEAVE_TO_OTHERS",
    "TYPES",
    "Fixed",
    "Request",
    "address",
    "backward",
    "empty_lse",
    "empty_output",
    "fixed_numbers",
    "forward",
    "statistics",
    "threads_for",
]

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: What the module does where masks leave queries or keys out; see `Leaving` in `native/module.cpp`.
LEAVE_NOBODY, LEAVE_TO_OTHERS, LEAVE_OUT = range(3)
_MATRICES = 10  # where the three inputs begin among the numbers
_LEVELS = 1 << 16  # of the bits that decide about dropout
_WORK_OF_ONE = 1 << 11  # multiplications of scores that one thread ends before a second has begun


@dataclass(frozen=True)
class Request:
    """One call without any object of Clearhead's in it, so that it can also be the arguments of a PyTorch operator.

    Args:
        query: (B, H, L, D).
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv).
        sinks: (H,), or ``None``.
        visible: bool (1 or B, 1 or H, 1 or L, 1 or S), or ``None``.
        bias: float of such a shape, or ``None``.
        first, last: int32 (1 or B, 1 or L): row i sees first ≤ j < last; both or neither.
        seed: int64 scalar; ``None`` drops nothing.
        scale: factor of the scores.
        softcap: 0 is none.
        dropout_p: probability that a weight is dropped.
        low, high, stop: row i sees i + low ≤ j ≤ i + high and j < stop.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    visible: Tensor | None
    bias: Tensor | None
    first: Tensor | None
    last: Tensor | None
    seed: Tensor | None
    scale: float
    softcap: float
    dropout_p: float
    low: int
    high: int
    stop: int


def forward(request: Request, lse: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Output (B, H, L, Dv) in the inputs' dtype, or in float32; lse (B, H, L) in float64 is written if it is given."""
    output = empty_output(request.query, request.value, dtype)
    numbers, kept = _numbers(request, lse)
    threads, wide = threads_for(request) or torch.get_num_threads(), output.dtype == torch.float32
    _module().forward(instruction_set_number(), threads, *numbers, *_matrix(output), wide, LEAVE_NOBODY)
    del kept
    return output


class Fixed(NamedTuple):
    """What is the same from call to call for tensors that lie alike: all but their addresses.

    Args:
        sizes: the numbers before those of query, key and value.
        band: those between lse and the masks.
        visible, bias: steps of the masks.
        dropout: the last ones.
    """

    sizes: tuple[float, ...]
    band: tuple[float, ...]
    visible: tuple[float, ...]
    bias: tuple[float, ...]
    dropout: tuple[float, ...]


def fixed_numbers(request: Request) -> Fixed | None:
    """``None`` where rows have to be laid out first, or numbers to be copied."""
    given = (request.query, request.key, request.value)
    if any(_with_whole_rows(tensor) is not tensor for tensor in given):
        return None
    if request.bias is not None and request.bias.dtype != torch.float32:
        return None
    numbers, _ = _numbers(request, None)
    rest = numbers[_MATRICES + 13 :]
    return Fixed(numbers[:_MATRICES], rest[:8], rest[9:13], rest[14:18], rest[18:])


def threads_for(request: Request) -> int | None:
    """One where waking another thread takes longer than the work; ``None`` stands for PyTorch's number."""
    (batch, heads, length, dim), keys = request.query.shape, request.key.shape[2]
    return 1 if batch * heads * length * keys * dim <= _WORK_OF_ONE else None


def empty_lse(query: Tensor) -> Tensor:
    """(B, H, L) in float64: its rounding is a relative error of all weights that a backward pass computes from it."""
    return query.new_empty(query.shape[:3], dtype=torch.float64)


def backward(
    request: Request,
    output: Tensor,
    lse: Tensor,
    output_gradient: Tensor,
    lse_gradient: Tensor | None,
    bias_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, and δ − dl (B, H, L), from which that of the sinks follows.

    That of the bias is added to `bias_gradient`, float32 (1 or B, H, L, S), if it is given.
    """
    if output.dtype != torch.float32:  # δ = dO·o needs an o that is not rounded
        output = forward(request, dtype=torch.float32)
    gradients = [tensor.new_empty(tensor.shape) for tensor in (request.query, request.key, request.value)]
    correction = torch.empty_like(lse, dtype=torch.float32)
    output_gradient = _with_whole_rows(output_gradient)
    lse_gradient = None if lse_gradient is None else lse_gradient.float().contiguous()
    numbers, kept = _numbers(request, lse)
    _module().backward(
        instruction_set_number(),
        threads_for(request) or torch.get_num_threads(),
        *numbers,
        *_matrix(output_gradient),
        *_matrix(output),
        *_matrix(gradients[0]),
        *_matrix(gradients[1]),
        *_matrix(gradients[2]),
        address(lse_gradient),
        correction.data_ptr(),
        *((0,) * 4 if bias_gradient is None else _mask(bias_gradient)[:4]),
        LEAVE_NOBODY,
    )
    del kept
    return gradients[0], gradients[1], gradients[2], correction


def statistics(request: Request, wanted: WeightStatistics) -> None:
    """Write what is wanted of the weights, which are those before dropout."""
    numbers, kept = _numbers(request, wanted.lse)
    top, pooled = wanted.top_weights, wanted.map
    _module().statistics(
        instruction_set_number(),
        threads_for(request) or torch.get_num_threads(),
        *numbers,
        *((0,) * 4 if wanted.output is None else _matrix(wanted.output)),
        *map(address, (wanted.counted, wanted.largest, wanted.visible)),
        *map(address, (wanted.entropy, wanted.confidence, wanted.norm)),
        *map(address, (wanted.received, wanted.viewers)),
        *map(address, (top, wanted.top_keys)),
        0 if top is None else top.shape[-1],
        *((0,) * 4 if wanted.weights is None else _mask(wanted.weights)[:4]),
        *((0,) * 3 if pooled is None else (pooled.data_ptr(), *pooled.shape[2:])),
        wanted.map_peaks,
    )
    del kept


def empty_output(query: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(B, H, L, Dv), with heads beside each other where the query's are: merging them is then free."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, value.shape[-1], dtype=dtype).transpose(1, 2)
    return query.new_empty(batch, heads, length, value.shape[-1], dtype=dtype)


def _module() -> ModuleType:
    return cast(ModuleType, extension)


def _numbers(request: Request, lse: Tensor | None) -> tuple[tuple[float, ...], tuple[Tensor | None, ...]]:
    """What `read_problem` reads, and tensors that have to live as long as their addresses are in use."""
    query, key, value = (_with_whole_rows(tensor) for tensor in (request.query, request.key, request.value))
    sinks = None if request.sinks is None else request.sinks.float().contiguous()
    bias = None if request.bias is None else request.bias.float()
    numbers = (
        TYPES[query.dtype],
        *query.shape[:2],
        key.shape[1],
        query.shape[2],
        key.shape[2],
        query.shape[3],
        value.shape[3],
        request.scale,
        request.softcap,
        *_matrix(query),
        *_matrix(key),
        *_matrix(value),
        address(lse),
        address(sinks),
        request.low,
        request.high,
        request.stop,
        *_spans(request.first, request.last),
        *_mask(request.visible),
        *_mask(bias),
        *_dropout(request),
    )
    return numbers, (query, key, value, sinks, bias)


def _dropout(request: Request) -> tuple[int, int, float]:
    """How many of 65536 draws drop an entry, the seed, and what a kept entry is multiplied with."""
    if request.seed is None:
        return 0, 0, 1.0
    dropped = round(request.dropout_p * _LEVELS)
    return dropped, int(request.seed), _LEVELS / (_LEVELS - dropped) if dropped < _LEVELS else 0.0


def address(tensor: Tensor | None) -> int:
    """Of its first number; 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


def _matrix(tensor: Tensor) -> tuple[int, int, int, int]:
    batch, head, row, _ = tensor.stride()
    return tensor.data_ptr(), batch, head, row


def _mask(tensor: Tensor | None) -> tuple[int, ...]:
    return (0,) * 5 if tensor is None else (tensor.data_ptr(), *_steps(tensor))


def _spans(first: Tensor | None, last: Tensor | None) -> tuple[int, ...]:
    return (0,) * 4 if first is None else (first.data_ptr(), address(last), *_steps(first))


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """Strides, zero where a size of 1 broadcasts."""
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _with_whole_rows(tensor: Tensor) -> Tensor:
    """The numbers of a row have to lie side by side, as they are; all other strides are the kernel's business."""
    tensor = tensor.resolve_neg()  # the kernel would read x where a view says −x
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
