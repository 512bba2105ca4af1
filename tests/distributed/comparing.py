"""One call of a module that is split over processes, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from clearhead.distributed import context_parallel, shard_sequence
from clearhead.distributed._layout import Layout

from .building import full, gradients, require_close

__all__ = ["TOLERANCES", "compare_in_parts"]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


def compare_in_parts(
    whole: nn.Module,
    mesh: DeviceMesh | None,
    *inputs: Tensor,
    method: str = "auto",
    layout: Layout = "contiguous",
    prepare: Callable[[Any], Any] = lambda module: module,
    averaged: DeviceMesh | None = None,
    what: str = "",
    seed: int = 4,
    **options: Any,
) -> Any:
    """Raise unless output and every gradient are those of one process; the module on parts.

    Gradients are those of the module's parameters, of the inputs, and of the mask's biases that learn.

    Args:
        whole: the module of one process.
        mesh: over the processes that share the sequence; or ``None``, where none do.
        inputs: whole sequences (B, L, E).
        method, layout: of `context_parallel`.
        prepare: done to the copy before.
        averaged: over the processes of which each weighs some items of the batch alone, and whose gradients of
            parameters are averaged, as `fully_shard` does; or ``None``.
        what: is compared, for messages.
        seed: of this process; that of one process is the first's.
        options: of the call.
    """
    split = prepare(copy.deepcopy(whole))
    if mesh is not None:
        split = context_parallel(split, mesh, method=method, layout=layout)  # type: ignore[arg-type]
    first = seed - dist.get_rank() if seed < 4 else seed
    half = inputs[0].dtype in (torch.bfloat16, torch.float16)
    judge = copy.deepcopy(whole).double() if half else None
    expected, factors = _one_process(whole, inputs, options, first)
    exact = expected if judge is None else _one_process(judge, [x.double() for x in inputs], options, first)[0]

    def cut(x: Tensor) -> Tensor:
        return x if mesh is None else shard_sequence(x, mesh, dim=-2, layout=layout)

    parts = [cut(x).clone().requires_grad_() for x in inputs]
    count = 1 if averaged is None else averaged.size()
    if averaged is not None:
        own = torch.arange(len(factors)) % count == averaged.get_local_rank()
        factors = factors * count * own.view(-1, *[1] * (factors.dim() - 1))
    torch.manual_seed(seed)
    output = split(*parts, **options)
    (output * cut(factors)).sum().backward()
    found: dict[str, Any] = {"output": output.detach()}
    found |= {f"input {index}": _summed(part.grad, averaged) / count for index, part in enumerate(parts)}
    found |= {name: _summed(_summed(grad, mesh), averaged) / count for name, grad in _gradients_of_biases(options)}
    found |= {name: _summed(grad, mesh) for name, grad in gradients(split).items()}
    assert found.keys() == expected.keys()
    for name, number in exact.items():
        if judge is not None and name.endswith(("k_proj.bias", "k_norm.bias")):
            continue  # without positions no weight depends on it: its gradient is zero, and what is left is rounding
        of_part = name == "output" or name.startswith("input")
        right, one = (cut(x) if of_part else x for x in (number, expected[name]))
        if judge is None:
            tolerance = TOLERANCES[inputs[0].dtype]
            require_close(found[name], right, tolerance, f"{what} {name}")
        elif right.numel():  # twice the error of one process, whose numbers this large are rounded like
            errors = [(each.double() - right).abs().max() for each in (found[name], one)]
            assert errors[0] <= 2 * errors[1] + right.abs().max() * 2**-8, (what, name, errors)
    return split


def _summed(x: Any, mesh: DeviceMesh | None) -> Tensor:
    """The sum over the processes of a mesh, in float32 at least."""
    found = full(x).to(torch.promote_types(x.dtype, torch.float32), copy=True)
    if mesh is not None:
        dist.all_reduce(found, group=mesh.get_group())
    return found


def _gradients_of_biases(options: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Gradients of the tensors of the call's mask that learn, and none left."""
    for index, tensor in enumerate(getattr(options.get("mask"), "bias_tensors", tuple)()):
        if tensor.requires_grad:
            found, tensor.grad = tensor.grad, None
            yield f"bias {index}", found


def _one_process(module: nn.Module, inputs: Any, options: dict[str, Any], seed: int) -> tuple[dict[str, Any], Tensor]:
    """Output and gradients of one process, and what its output was weighed with."""
    own = [x.detach().clone().requires_grad_() for x in inputs]
    torch.manual_seed(seed)
    output = module(*own, **options)
    torch.manual_seed(3)
    factors = torch.randn(output.shape).to(output.dtype)
    (output * factors).sum().backward()
    found: dict[str, Any] = {"output": output.detach()} | {f"input {i}": x.grad for i, x in enumerate(own)}
    return found | dict(_gradients_of_biases(options)) | gradients(module), factors
