"""Tables over layers and heads, and concatenation of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any

import torch
from torch import Tensor

from .._checks import shown
from ..errors import UnknownNameError
from .definitions import BY_MAXIMUM, PER_QUERY
from .result import AttentionStatistics
from .vectors import TopK


@dataclass(frozen=True)
class Summary:
    """One number per head.

    Args:
        values: statistic → module name → (H,) tensor.
        heads: the numbers of these heads in the model, of the layer with the most. Default 0, 1, …
        heads_of: module name → the numbers of its heads, where layers have different ones. Default: `heads`.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True).eval()
        >>> with clearhead.record(model, statistics=("entropy",)) as rec:
        ...     _ = model(torch.randn(2, 5, 12))
        >>> rec.summary()["entropy"]["self_attn"].shape
        torch.Size([3])
    """

    values: dict[str, dict[str, Tensor]]
    heads: tuple[int, ...] = ()
    heads_of: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def __getitem__(self, statistic: str) -> dict[str, Tensor]:
        if not isinstance(statistic, str) or statistic not in self.values:
            known = ", ".join(map(repr, self.values)) or "none"
            raise UnknownNameError("statistic", expected=f"one of {known}", got=shown(statistic))
        return self.values[statistic]

    def __str__(self) -> str:
        return "\n\n".join(_table(statistic, layers, self) for statistic, layers in self.values.items())


def summarize(recorded: Mapping[str, Sequence[AttentionStatistics]]) -> Summary:
    """One number per module and head: the mean over counted queries or batch items, or the maximum over items."""
    values: dict[str, dict[str, Tensor]] = {}
    for module, calls in recorded.items():
        for statistic in PER_QUERY:
            if statistic in calls[0].names:
                # The mean weights all queries equally, so a short text counts less than a long one.
                sums = torch.stack([torch.stack(call.head_sums(statistic)) for call in calls]).sum(0)  # (2, H)
                values.setdefault(statistic, {})[module] = sums[0] / sums[1].clamp(min=1)
        numbers = [call.head_numbers() for call in calls]
        for label in numbers[0]:
            items = torch.cat([by_label[label] for by_label in numbers])  # (items, H)
            values.setdefault(label, {})[module] = items.amax(0) if label in BY_MAXIMUM else items.mean(0)
    heads_of = {module: calls[0].heads for module, calls in recorded.items()}
    return Summary(values, max(heads_of.values(), key=len, default=()), heads_of)


def fold(calls: Sequence[AttentionStatistics]) -> AttentionStatistics:
    """Concatenate calls along the batch, padding shorter ones."""
    results: dict[str, Any] = {}
    for name in calls[0].names:
        tensors = [call.results[name] for call in calls]
        if isinstance(tensors[0], TopK):
            indices, weights = zip(*tensors, strict=True)
            results[name] = TopK(_concatenate(indices, -1), _concatenate(weights, 0))
        else:
            results[name] = _concatenate(tensors, int(name == "sees"))  # padding is no masked query
    longest = max(calls, key=lambda call: call.query_length)
    counted = _concatenate([call.counted for call in calls], 0)
    folded = longest.like(results, counted, max(call.key_length for call in calls))
    totals = [call.totals for call in calls if call.totals is not None]
    if totals:
        folded.totals = {name: torch.stack([sums[name] for sums in totals]).sum(0) for name in totals[0]}
    return folded


def _concatenate(tensors: Sequence[Tensor], fill: int) -> Tensor:
    shape = [max(tensor.shape[dim] for tensor in tensors) for dim in range(1, tensors[0].dim())]
    padded = [tensor.new_full((tensor.shape[0], *shape), fill) for tensor in tensors]
    for target, tensor in zip(padded, tensors, strict=True):
        target[tuple(slice(size) for size in tensor.shape)] = tensor
    return torch.cat(padded)


def _table(statistic: str, layers: Mapping[str, Tensor], summary: Summary) -> str:
    width = max(len(statistic), *(len(name) for name in layers))
    lines: list[str] = []
    for numbers, names in _numbered_alike(
        {name: summary.heads_of.get(name, summary.heads or range(len(layers[name]))) for name in layers}
    ):
        lines.append(f"{statistic:<{width}}  " + " ".join(f"{f'h{head}':>7}" for head in numbers))
        for name in names:
            lines.append(f"{name:<{width}}  " + " ".join(f"{value:7.3f}" for value in layers[name].tolist()))
    return "\n".join(lines)


def _numbered_alike(heads: Mapping[str, Sequence[int]]) -> list[tuple[Sequence[int], list[str]]]:
    """Layers one after another whose columns have the same numbers, under the longest of them.

    The last head has another number in a layer with fewer heads.
    """
    groups: list[tuple[Sequence[int], list[str]]] = []
    for name, numbers in heads.items():
        if groups and all(map(eq, groups[-1][0], numbers)):
            longest, names = groups.pop()
            groups.append((max(longest, numbers, key=len), [*names, name]))
        else:
            groups.append((numbers, [name]))
    return groups
