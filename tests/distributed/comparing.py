"""One call of a module on parts of a sequence, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
    mesh: DeviceMesh,
    *inputs: Tensor,
    method: str = "auto",
    layout: Layout = "contiguous",
    prepare: Callable[[Any], Any] = lambda module: module,
    what: str = "",
    seed: int = 4,
    **options: Any,
) -> Any:
    """Raise unless output and every gradient are those of one process; the module on parts.

    Args:
        whole: the module of one process.
        mesh: over the processes.
        inputs: whole sequences (B, L, E).
        method, layout: of `context_parallel`.
        prepare: done to the copy before.
        what: is compared, for messages.
        seed: of this process; that of one process is the first's.
        options: of the call.
    """
    split = context_parallel(prepare(copy.deepcopy(whole)), mesh, method=method, layout=layout)  # type: ignore[type-var, arg-type]
    first = seed - dist.get_rank() if seed < 4 else seed
    judge = copy.deepcopy(whole).double() if inputs[0].dtype in (torch.bfloat16, torch.float16) else None
    expected, factors = _one_process(whole, inputs, options, first)
    exact = expected if judge is None else _one_process(judge, [x.double() for x in inputs], options, first)[0]

    def cut(x: Tensor) -> Tensor:
        return shard_sequence(x, mesh, dim=-2, layout=layout)

    parts = [cut(x).clone().requires_grad_() for x in inputs]
    torch.manual_seed(seed)
    output = split(*parts, **options)
    (output * cut(factors)).sum().backward()
    found = {"output": output.detach()} | {f"input {index}": part.grad for index, part in enumerate(parts)}
    for name, parameter in split.named_parameters():
        assert parameter.grad is not None, name
        contribution = full(parameter.grad).clone()
        dist.all_reduce(contribution, group=mesh.get_group())
        found[name], parameter.grad = contribution, None
    assert found.keys() == expected.keys()
    for name, number in exact.items():
        if judge is not None and name.endswith(("k_proj.bias", "k_norm.bias")):
            continue  # without positions no weight depends on it: its gradient is zero, and what is left is rounding
        of_part = name == "output" or name.startswith("input")
        right, one = (cut(x) if of_part else x for x in (number, expected[name]))
        if judge is None:
            require_close(found[name], right, TOLERANCES[right.dtype], f"{what} {name}")  # type: ignore[arg-type]
        else:  # twice the error of one process, whose numbers this large are rounded like
            errors = [(each.double() - right).abs().max() for each in (found[name], one)]  # type: ignore[union-attr]
            assert errors[0] <= 2 * errors[1] + right.abs().max() * 2**-8, (what, name, errors)
    return split


def _one_process(module: nn.Module, inputs: Any, options: dict[str, Any], seed: int) -> tuple[dict[str, Any], Tensor]:
    """Output and gradients of one process, and what its output was weighed with."""
    own = [x.detach().clone().requires_grad_() for x in inputs]
    torch.manual_seed(seed)
    output = module(*own, **options)
    torch.manual_seed(3)
    factors = torch.randn(output.shape).to(output.dtype)
    (output * factors).sum().backward()
    found: dict[str, Any] = {"output": output.detach()} | {f"input {i}": x.grad for i, x in enumerate(own)}
    return found | gradients(module), factors
