"""Attention written a second time, in float64: what every kernel is compared with.

Nothing of Clearhead's is used here, masks included: plain Python rules say which keys a query sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from .exact import exact_attention

#: rule(b, h, i, j): may query i of head h in batch item b attend to key j? All four are plain numbers. A bias of −∞
#: has to be in the rule as well.
Rule = Callable[[int, int, int, int], bool]


@dataclass(frozen=True)
class Problem:
    """One attention request: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv), sinks (H,) or (B, H, L)."""

    query: Tensor
    key: Tensor
    value: Tensor
    rule: Rule
    biases: tuple[Tensor, ...] = ()
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything gradients are compared for."""
        return (self.query, self.key, self.value, *(() if self.sinks is None else (self.sinks,)), *self.biases)


@dataclass(frozen=True)
class Answer:
    """output (B, H, L, Dv), lse (B, H, L), weights (B, H, L, S), and the float64 inputs they hang on."""

    output: Tensor
    lse: Tensor
    weights: Tensor
    leaves: tuple[Tensor, ...]


def solve(problem: Problem) -> Answer:
    """The formulas of the design, with the keys that the rule shows."""
    leaves = tuple(tensor.detach().double().clone().requires_grad_() for tensor in problem.tensors)
    query, key, value, *rest = leaves
    sinks, biases = (None, rest) if problem.sinks is None else (rest[0], rest[1:])
    sizes = (*query.shape[:3], key.shape[2])
    visible = torch.tensor([problem.rule(*cell) for cell in product(*map(range, sizes))], dtype=torch.bool)
    bias = sum(_whole_bias(each, *sizes[:2]) for each in biases) if biases else None
    options = {"scale": problem.scale, "softcap": problem.softcap, "sinks": sinks}
    result = exact_attention(query, key, value, visible.view(sizes), bias=bias, **options)
    return Answer(result.output, result.lse, result.weights, leaves)


def gradients(answer: Answer, output_gradient: Tensor, lse_gradient: Tensor | None = None) -> list[Tensor]:
    """Gradients of every input for given gradients of the output and the log-sum-exp; −∞ has none to pass on."""
    loss = (answer.output * output_gradient.double()).sum()
    if lse_gradient is not None:
        finite = answer.lse.isfinite()
        loss = loss + (answer.lse[finite] * lse_gradient.double()[finite]).sum()
    return _gradients(answer, loss)


def weights_gradients(answer: Answer, weights_gradient: Tensor) -> list[Tensor]:
    """Gradients of every input for a given gradient of the weights."""
    return _gradients(answer, (answer.weights * weights_gradient.double()).sum())


def _gradients(answer: Answer, loss: Tensor) -> list[Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in answer.leaves]
    return list(torch.autograd.grad(loss, answer.leaves, retain_graph=True, materialize_grads=True))


def _whole_bias(bias: Tensor, batch: int, heads: int) -> Tensor:
    """A bias with a batch and heads: (1 or B, 1 or H, …)."""
    if bias.dim() == 3 and bias.shape[0] not in (1, batch):
        return bias.unflatten(0, (batch, heads))
    return bias[:, None] if bias.dim() == 3 else bias
