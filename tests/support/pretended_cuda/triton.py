"""The Triton kernels on the pretended device: their formulas, which compute from nothing but the arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.gpu import kernel_formulas
from clearhead.kernels._triton import Operands

from .memory import bytes_of, device

if TYPE_CHECKING:
    from .mode import PretendedDevice

_FLOAT = torch.float32


def rows(
    operands: Operands,
    *,
    sinks: Tensor | None = None,
    first_keys: Tensor | None = None,
    want: Collection[str] = ("lse",),
    top: int = 0,
) -> dict[str, Tensor]:
    results = kernel_formulas.rows(operands, sinks, first_keys, _FLOAT)
    largest = kernel_formulas.top(operands, results["lse"], top, _FLOAT) if top else ()
    wanted = {name: result for name, result in results.items() if name in want}
    return wanted | dict(zip(("top_weights", "top_keys"), largest, strict=False))


def columns(operands: Operands, lse: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return kernel_formulas.columns(operands, lse, counted, _FLOAT)


def weights(operands: Operands, lse: Tensor, *, average: bool = False) -> Tensor:
    p = kernel_formulas.weights(operands, lse, _FLOAT)
    return p.mean(1) if average else p


def pooled(
    operands: Operands, lse: Tensor, cells: tuple[int, int], *, counted: Tensor | None = None, largest: bool = False
) -> Tensor:
    return kernel_formulas.pooled(kernel_formulas.weights(operands, lse, _FLOAT), cells, counted, largest)


def weights_gradients(operands: Operands, lse: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return kernel_formulas.gradients(operands, kernel_formulas.weights(operands, lse, _FLOAT), gradient)


def connect(mode: PretendedDevice) -> None:
    """Let Clearhead find these functions where it would import its kernels. Launches are counted as ``triton_…``."""
    name = "clearhead.kernels._triton._calls"
    sys.modules[name] = module = ModuleType(name)
    for formula in (rows, columns, weights, pooled, weights_gradients):
        setattr(module, formula.__name__, _on_device(mode, formula))


def _on_device(mode: PretendedDevice, formula: Callable[..., Any]) -> Callable[..., Any]:
    def run(operands: Operands, *others: Any, **options: Any) -> Any:
        arguments = (operands, others, options)
        if not all(each.is_cuda for each in tree_leaves(arguments) if isinstance(each, Tensor)):
            raise RuntimeError(f"{formula.__name__}: expected all tensors to be on the device")
        with torch.no_grad():
            on_cpu, others, options = tree_map_only(Tensor, device.to_cpu, arguments)
            results = formula(on_cpu, *others, **options)
        several = {"rows": 3 if options.get("top") else 1, "weights_gradients": 2}
        mode.seen.operators[f"triton_{formula.__name__}"] += several.get(formula.__name__, 1)
        mode.seen.largest = max(mode.seen.largest, *map(bytes_of, tree_leaves(results)))
        index = operands.query.device.index or 0
        return tree_map_only(Tensor, lambda each: device.to_device(each, index), results)

    return run
