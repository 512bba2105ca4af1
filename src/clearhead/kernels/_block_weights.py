"""The weights of a block from its scores, and back to the gradient of the product q·k."""

from __future__ import annotations

import torch
from torch import Tensor

from .._call.call import Call
from ..masks._grid import Block
from ._blocks import LongSum, block_sinks

_PLAIN_KEYS = 4096  # whose weights PyTorch's softmax sums well enough


def block_weights(call: Call, block: Block, scores: Tensor, overflows: bool = False) -> tuple[Tensor, Tensor]:
    """Softmax of whole rows, in place: p (b, h, l, s) and lse (b, h, l, 1).

    Args:
        call, block: of the scores.
        scores: (b, h, l, s).
        overflows: whether a row may have no finite score although it sees a key. Its weights are then 0, not NaN.
    """
    sinks = block_sinks(call, block, scores.dtype)
    if scores.shape[-1] == 0:
        lse = scores.new_full((*scores.shape[:-1], 1), float("-inf"))
        return scores, lse if sinks is None else torch.logaddexp(lse, sinks)
    row_max = scores.amax(-1, keepdim=True)
    empty = row_max == float("-inf") if overflows or call.coverage.masked_queries is not None else None
    if empty is not None:
        scores.masked_fill_(empty, 0)  # any finite number: the softmax of a row of −∞ is NaN
    weights = _drop_subnormal(call, _softmax(scores))
    # The largest weight is e^0 / Σ, so its logarithm is the one of the sum.
    lse = row_max - weights.amax(-1, keepdim=True).log()
    if empty is not None:
        weights.masked_fill_(empty, 0)
        lse.masked_fill_(empty, float("-inf"))
    if sinks is not None:
        key_lse, lse = lse, torch.logaddexp(lse, sinks)
        weights.mul_((key_lse - lse).exp())
    return weights, lse


def block_softmax(call: Call, block: Block, scores: Tensor) -> Tensor:
    """The weights without lse, in place, which is faster without sinks and fully masked rows."""
    if call.sinks is not None or call.coverage.masked_queries is not None or scores.shape[-1] == 0:
        return block_weights(call, block, scores)[0]
    return _drop_subnormal(call, _softmax(scores))


def block_share(call: Call, scores: Tensor, lse: Tensor) -> Tensor:
    """The weights of some keys of each row, in place, from the lse (b, h, l) of all its keys."""
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # fully masked rows, whose scores are −∞
    return _drop_subnormal(call, scores.sub_(lse[..., None]).exp_())


def product_gradient(
    call: Call, block: Block, scores_gradient: Tensor, tanh: Tensor | None, biases: list[LongSum]
) -> None:
    """Turn the gradient of a block's scores into that of q·k, in place, and add up the gradients of biases.

    A bias is added to scores that are capped already: its gradient is without tanh's derivative.
    """
    if call.mask is not None:
        call.mask.add_bias_gradients([sums.run for sums in biases], block, scores_gradient)
    if tanh is not None:
        scores_gradient.mul_(1 - tanh.square())
    scores_gradient.mul_(call.layout.scale)


def _softmax(scores: Tensor) -> Tensor:
    """In place. PyTorch's own adds vector after vector, which loses digits in long rows; its `sum` is pairwise."""
    weights = torch.softmax(scores, -1, out=scores)
    return weights if weights.shape[-1] <= _PLAIN_KEYS else weights.div_(weights.sum(-1, keepdim=True))


def _drop_subnormal(call: Call, weights: Tensor) -> Tensor:
    """Set weights to zero, in place, that are no more than ten times the smallest normal number of their dtype.

    Processors multiply subnormal numbers many times slower than others. A bias that grows with the distance (`ALiBi`)
    makes whole regions of them; without a bias they are too rare to be worth a look at every weight.
    """
    if call.mask is None or not call.mask.has_bias:
        return weights
    return torch.threshold_(weights, 10 * torch.finfo(weights.dtype).tiny, 0.0)
