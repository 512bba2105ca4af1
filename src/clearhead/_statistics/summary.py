"""Tables over layers and heads, and calls folded into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks import shown
from ..errors import UnknownNameError
from .definitions import LARGEST, PER_QUERY
from .result import AttentionStatistics
from .vectors import TopK


@dataclass(frozen=True)
class Summary:
    """One number per head.

    Args:
        values: statistic → module name → (H,) tensor.
        heads: numbers of these heads in the model, for the table. Default: 0, 1, …

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

    def __getitem__(self, statistic: str) -> dict[str, Tensor]:
        if not isinstance(statistic, str) or statistic not in self.values:
            known = ", ".join(map(repr, self.values)) or "none"
            raise UnknownNameError("statistic", expected=f"one of {known}", got=shown(statistic))
        return self.values[statistic]

    def __str__(self) -> str:
        return "\n\n".join(_table(statistic, layers, self.heads) for statistic, layers in self.values.items())


def summarize(recorded: Mapping[str, Sequence[AttentionStatistics]]) -> Summary:
    """Per module and head, the mean over counted queries or batch items, or the largest of the items."""
    values: dict[str, dict[str, Tensor]] = {}
    for module, calls in recorded.items():
        for statistic in PER_QUERY:
            # By queries, and not by calls: a short text counts less than a long one.
            if statistic in calls[0].names:
                values.setdefault(statistic, {})[module] = _weighted_mean(calls, statistic)
        numbers = [call.head_numbers() for call in calls]
        for label in numbers[0]:
            items = torch.cat([each[label] for each in numbers])  # (items, H)
            values.setdefault(label, {})[module] = items.amax(0) if label in LARGEST else items.mean(0)
    # Layers can differ in their number of heads, but not in which of them are recorded.
    return Summary(values, max((calls[0].heads for calls in recorded.values()), key=len, default=()))


def fold(calls: Sequence[AttentionStatistics]) -> AttentionStatistics:
    """Concatenate calls along the batch, padding shorter ones."""
    results: dict[str, Any] = {}
    for name in calls[0].names:
        parts = [call.results[name] for call in calls]
        if isinstance(parts[0], TopK):
            results[name] = TopK(
                _concatenate([part.indices for part in parts], -1), _concatenate([part.weights for part in parts], 0)
            )
        else:
            results[name] = _concatenate(parts, 0)
    counted = _concatenate([call.counted for call in calls], 0)
    longest = max(calls, key=lambda call: call.query_length)
    folded = longest.like(results, counted, max(call.key_length for call in calls))
    totals = [call.totals for call in calls if call.totals is not None]
    folded.totals = (
        {name: torch.stack([each[name] for each in totals]).sum(0) for name in totals[0]} if totals else None
    )
    return folded


def _concatenate(tensors: Sequence[Tensor], fill: int) -> Tensor:
    shape = [max(tensor.shape[dim] for tensor in tensors) for dim in range(1, tensors[0].dim())]
    padded: list[Tensor] = []
    for tensor in tensors:
        whole = tensor.new_full((tensor.shape[0], *shape), fill)
        whole[tuple(slice(size) for size in tensor.shape)] = tensor
        padded.append(whole)
    return torch.cat(padded)


def _weighted_mean(calls: Sequence[AttentionStatistics], statistic: str) -> Tensor:
    """Mean over every counted query of every call and batch item, (H,)."""
    sums = torch.stack([call.head_sums(statistic)[0] for call in calls]).sum(0)
    counts = torch.stack([call.head_sums(statistic)[1] for call in calls]).sum(0)
    return sums / counts.clamp(min=1)


def _table(statistic: str, layers: Mapping[str, Tensor], numbers: Sequence[int]) -> str:
    heads = numbers or range(max(len(values) for values in layers.values()))
    width = max(len(statistic), *(len(name) for name in layers))
    lines = [f"{statistic:<{width}}  " + " ".join(f"{f'h{head}':>7}" for head in heads)]
    for name, values in layers.items():
        lines.append(f"{name:<{width}}  " + " ".join(f"{value:7.3f}" for value in values.tolist()))
    return "\n".join(lines)
