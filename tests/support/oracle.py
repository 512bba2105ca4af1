"""Attention written a second time, one query at a time in float64: what every kernel is compared with.

Nothing of Clearhead's is used here, masks included: which keys a query sees is asked of plain Python rules. Only the
keys a query sees are ever read, so what is stored in the others cannot matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: rule(b, h, i, j): may query i of head h in batch item b attend to key j? All four are plain numbers. A bias of −∞
#: has to be in the rule as well.
Rule = Callable[[int, int, int, int], bool]


@dataclass(frozen=True)
class Problem:
    """One attention request: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv), sinks (H,)."""

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
    """Go through the formulas of the design for every batch item, head and query."""
    leaves = tuple(tensor.detach().double().clone().requires_grad_() for tensor in problem.tensors)
    query, key, value, *rest = leaves
    sinks, biases = (None, rest) if problem.sinks is None else (rest[0], rest[1:])
    batch, heads, length, head_dim = query.shape
    count = key.shape[2]
    group = heads // key.shape[1]
    scale = head_dim**-0.5 if problem.scale is None else problem.scale
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for b in range(batch):
        for h in range(heads):
            keys, values = key[b, h // group], value[b, h // group]
            for i in range(length):
                added = [_bias_row(bias, batch, heads, b, h, i, count) for bias in biases]
                seen = [
                    j for j in range(count) if problem.rule(b, h, i, j) and all(row[j] > -torch.inf for row in added)
                ]
                scores = scale * (keys[seen] * query[b, h, i]).sum(-1)
                if problem.softcap is not None:
                    scores = problem.softcap * torch.tanh(scores / problem.softcap)
                for bias in biases:
                    scores = scores + _bias_row(bias, batch, heads, b, h, i, count)[seen]
                rows.append(_mix(scores, values, seen, None if sinks is None else sinks[h]))
    shape = (batch, heads, length)
    if not rows:
        zeros = query.new_zeros
        return Answer(zeros(*shape, value.shape[-1]), zeros(shape), zeros(*shape, count), leaves)
    output, lse, weights = (torch.stack(column) for column in zip(*rows, strict=True))
    return Answer(output.reshape(*shape, value.shape[-1]), lse.reshape(shape), weights.reshape(*shape, count), leaves)


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


def _mix(scores: Tensor, values: Tensor, seen: list[int], sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """o, lse and p of one query from the scores of the keys it sees."""
    weights = values.new_zeros(values.shape[0])
    terms = scores if sink is None else torch.cat([scores, sink[None]])
    if len(terms) == 0:
        return values.new_zeros(values.shape[-1]), values.new_tensor(-torch.inf), weights
    lse = torch.logsumexp(terms, 0)
    shares = torch.exp(scores - lse)
    return shares @ values[seen], lse, weights.scatter(0, torch.tensor(seen, dtype=torch.int64), shares)


def _bias_row(bias: Tensor, batch: int, heads: int, b: int, h: int, i: int, count: int) -> Tensor:
    """What bias adds to the scores of one query, (S,)."""

    def pick(tensor: Tensor, index: int) -> Tensor:
        return tensor[0 if tensor.shape[0] == 1 else index]

    if bias.dim() == 4:
        table = pick(pick(bias, b), h)
    elif bias.dim() == 3:
        table = pick(bias, b) if bias.shape[0] in (1, batch) else bias[b * heads + h]
    else:
        table = bias
    return pick(table, i).expand(count)
