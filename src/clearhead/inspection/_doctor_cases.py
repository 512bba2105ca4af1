"""The calls that `clearhead doctor` computes on every kernel: small, generated, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import masks
from .._attention import attention, explain
from ..kernels._choice import Explanation

Result = dict[str, Tensor]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One kind of call, with H = 6 and D = 16.

    Args:
        name: what is special about the call.
        batch_size: B.
        num_kv_heads: Hkv.
        value_dim: Dv.
        query_length: L.
        key_length: S.
        mask: makes the mask, or ``None``.
        bias: whether a bias is added to the scores.
        bias_gradient: whether it wants a gradient.
        softcap: as `clearhead.attention` takes it.
        sinks: whether there are sinks.
        hidden_item: batch item whose keys are all hidden and hold NaN, or ``None``.
        dtypes: what it is computed in.
        all_threads: whether kernels run on all threads, which takes long on a busy machine; else on one.
    """

    name: str
    batch_size: int = 2
    num_kv_heads: int = 6
    value_dim: int = 16
    query_length: int = 37
    key_length: int = 53
    mask: Callable[[], masks.Mask] | None = None
    bias: bool = False
    bias_gradient: bool = False
    softcap: float | None = None
    sinks: bool = False
    hidden_item: int | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES
    all_threads: bool = False


@dataclass(frozen=True)
class Inputs:
    """The tensors of one case in one dtype; values are those that the dtype can hold exactly."""

    case: Case
    tensors: Mapping[str, Tensor] = field(repr=False)

    @classmethod
    def generate(cls, case: Case, dtype: torch.dtype) -> Inputs:
        """Draw the tensors from a fixed seed and round them to `dtype`."""
        generator = torch.Generator().manual_seed(7)
        batch, heads, head_dim = case.batch_size, 6, 16
        shapes = {
            "query": (batch, heads, case.query_length, head_dim),
            "key": (batch, case.num_kv_heads, case.key_length, head_dim),
            "value": (batch, case.num_kv_heads, case.key_length, case.value_dim),
            "output_gradient": (batch, heads, case.query_length, case.value_dim),
            "sinks": (heads,),
        }
        if case.bias:
            shapes["bias"] = (1, heads, case.query_length, case.key_length)
        drawn = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for name, shape in shapes.items()
        }
        if case.hidden_item is not None:
            drawn["key"][case.hidden_item] = float("nan")
            drawn["value"][case.hidden_item] = float("nan")
        return cls(case, drawn)

    def widened(self) -> Inputs:
        """The same numbers in float64."""
        return Inputs(self.case, {name: tensor.double() for name, tensor in self.tensors.items()})

    def explain(self) -> Explanation:
        """Every kernel's reasons against this call, and against its gradients where they are enabled."""
        return explain(**self._arguments(self._leaves()))

    def compute(self) -> Result:
        """Run the call on the kernel that is forced.

        Returns:
            The ``"output"`` and, where gradients are enabled, by name that of every input.
        """
        leaves = self._leaves()
        output = attention(**self._arguments(leaves))
        if not torch.is_grad_enabled():
            return {"output": output}
        gradients = torch.autograd.grad(output, list(leaves.values()), self.tensors["output_gradient"])
        return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}

    def _leaves(self) -> dict[str, Tensor]:
        """Copies of the inputs that gradients are wanted for."""
        names = ["query", "key", "value"]
        names += ["bias"] if self.case.bias_gradient else []
        names += ["sinks"] if self.case.sinks else []
        return {name: self.tensors[name].clone().requires_grad_() for name in names}

    def _arguments(self, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
        mask = None if self.case.mask is None else self.case.mask()
        if self.case.bias:
            mask = masks.bias(leaves.get("bias", self.tensors["bias"]))
        tensors = {name: leaves.get(name) for name in ("query", "key", "value", "sinks")}
        return {**tensors, "mask": mask, "softcap": self.case.softcap}


CASES: tuple[Case, ...] = (
    Case("plain"),
    Case("causal", mask=masks.causal),
    Case("window", mask=lambda: masks.sliding_window(5, 3)),
    Case("padding", mask=lambda: masks.lengths(torch.tensor([11, 0])), hidden_item=1),
    Case("grouped heads", num_kv_heads=2),
    Case("Dv differs", value_dim=11),
    Case("bias", bias=True),
    Case("bias + gradient", bias=True, bias_gradient=True),
    Case("soft-cap + sinks", softcap=5.0, sinks=True),
    Case(
        "long",
        batch_size=1,
        query_length=401,
        key_length=601,
        mask=lambda: masks.causal("bottom_right"),
        dtypes=(torch.float32, torch.bfloat16),
        all_threads=True,
    ),
)
