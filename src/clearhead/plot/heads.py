"""What pictures say about a head in a number, a letter and a choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError, explain_problem, shape_text

__all__ = ["KINDS", "HeadSummary", "clearest_head", "require_head", "require_weights", "summarize"]

KINDS = {
    "special": "special tokens",
    "itself": "the token itself",
    "previous": "the token before",
    "next": "the token after",
    "far": "tokens further away",
    "broad": "everything about alike",
    "mixed": "several places",
}

BROAD = 0.85


@dataclass(frozen=True)
class HeadSummary:
    """One head in short.

    Args:
        entropy: mean over queries of −Σ_j p_j log p_j, in nats; 0 is one token, log S is all alike.
        spread: entropy / log S, in [0, 1].
        kind: a key of `KINDS`: ``"broad"`` if spread > 0.85, else the place that gets more than half of the weight.
        contrast: mean over queries of the most that one key gets beyond its average over all queries, among keys
            that are no special tokens and at least two positions away.
    """

    entropy: float
    spread: float
    kind: str
    contrast: float


def summarize(weights: Sequence[Tensor], special: Sequence[bool] | None = None) -> list[list[HeadSummary]]:
    """Describe every head of every layer.

    Args:
        weights: one (H, L, S) tensor per layer.
        special: per key, whether it is a special token such as ``[CLS]``. Default: none is.

    Returns:
        One list per layer with one `HeadSummary` per head.

    Example:
        >>> [[head]] = summarize([torch.eye(4)[None]])
        >>> head.kind, head.entropy
        ('itself', 0.0)
    """
    return [_summarize_layer(layer.double(), special) for layer in weights]


def clearest_head(summaries: Sequence[Sequence[HeadSummary]]) -> tuple[int, int]:
    """Choose the head to show first: the one with the largest `contrast`.

    Heads that look at special tokens, at neighbours, or at the same token from everywhere are common and need no
    large picture; this is the one where different words most clearly look at different words further away.

    Returns:
        Layer and head, both counted from 0.
    """
    places = [(layer, head) for layer, heads in enumerate(summaries) for head in range(len(heads))]
    return max(places, key=lambda place: summaries[place[0]][place[1]].contrast)


def require_weights(weights: Sequence[Tensor], tokens: Sequence[str], key_tokens: Sequence[str]) -> None:
    """Raise unless there is one (H, L, S) tensor per layer that fits the tokens.

    Raises:
        ArgumentError: if there is no layer.
        ShapeError: for any other shape.
    """
    if not weights:
        raise ArgumentError(explain_problem("weights", expected="one (H, L, S) tensor per layer", got="none"))
    for index, layer in enumerate(weights):
        if layer.dim() != 3 or layer.shape[0] == 0 or tuple(layer.shape[1:]) != (len(tokens), len(key_tokens)):
            raise ShapeError(
                explain_problem(
                    f"weights[{index}]",
                    expected=f"(H, L, S) = (H, {len(tokens)}, {len(key_tokens)}), as many as there are tokens",
                    got=shape_text(layer.shape),
                    fix="Give one batch item: outputs.attentions[layer][0].",
                )
            )


def require_head(weights: Sequence[Tensor], layer: int, head: int) -> None:
    """Raise unless the layer and the head, counted from 0, exist.

    Raises:
        ArgumentError: naming the range.
    """
    if not 0 <= layer < len(weights):
        raise ArgumentError(explain_problem("layer", expected=_range(len(weights)), got=str(layer)))
    heads = weights[layer].shape[0]
    if not 0 <= head < heads:
        raise ArgumentError(explain_problem("head", expected=_range(heads), got=str(head)))


def _range(count: int) -> str:
    return f"0 to {count - 1} (counted from 0)" if count > 1 else "0 (there is only one)"


def _summarize_layer(layer: Tensor, special: Sequence[bool] | None) -> list[HeadSummary]:
    _, length, keys = layer.shape
    is_special = torch.zeros(keys, dtype=torch.bool) if special is None else torch.tensor(list(special))
    offset = torch.arange(keys) - torch.arange(length)[:, None]  # (L, S)
    entropy = torch.special.entr(layer).sum(-1).mean(-1)  # (H,)
    places = {
        "special": is_special.expand(length, keys),
        "itself": (offset == 0) & ~is_special,
        "previous": (offset == -1) & ~is_special,
        "next": (offset == 1) & ~is_special,
        "far": (offset.abs() > 1) & ~is_special,
    }
    shares = {name: (layer * place).sum(-1).mean(-1) for name, place in places.items()}  # (H,) each
    ordinary = torch.ones(length, dtype=torch.bool) if length != keys else ~is_special
    beyond = (layer - layer.mean(1, keepdim=True)) * places["far"]  # (H, L, S)
    peaks = beyond.amax(-1)[:, ordinary]  # (H, ordinary queries)
    contrast = peaks.mean(-1) if peaks.shape[-1] else torch.zeros(layer.shape[0])
    most = max(torch.tensor(float(keys)).log().item(), 1e-12)
    result = []
    for head in range(layer.shape[0]):
        spread = min(entropy[head].item() / most, 1.0)
        kind = _kind(spread, {name: share[head].item() for name, share in shares.items()})
        result.append(HeadSummary(entropy[head].item(), spread, kind, contrast[head].item()))
    return result


def _kind(spread: float, shares: dict[str, float]) -> str:
    if spread > BROAD:
        return "broad"
    largest = max(shares, key=lambda name: shares[name])
    return largest if shares[largest] > 0.5 else "mixed"
