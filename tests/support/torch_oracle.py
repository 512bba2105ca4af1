"""What `torch.nn.MultiheadAttention` answers when it is told in full what to hide.

PyTorch is never asked the questions it gets wrong: every rule is written into one float mask (N·H, L, S), queries that
see nothing are opened to all keys and cut out of the result afterwards. That cut comes before the output projection,
so PyTorch runs with the identity in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

Answer = tuple[Tensor, Tensor | None]


def explicit_bias(
    sizes: tuple[int, int, int, int], attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """All three ways to hide as numbers to add to the scores: (N, H, L, S), float64, −inf where hidden."""
    batch, heads, length, keys = sizes
    total = torch.zeros(sizes, dtype=torch.float64)
    if is_causal:
        total = total.masked_fill(torch.ones(length, keys, dtype=torch.bool).triu(1), float("-inf"))
    if attn_mask is not None:
        per_item = {2: (1, 1), 3: (batch, heads) if attn_mask.shape[0] == batch * heads else (batch, 1)}
        if attn_mask.dim() < 4:
            attn_mask = attn_mask.reshape(*per_item[attn_mask.dim()], length, keys)
        total = _add(total, attn_mask)
    if key_padding_mask is not None:
        total = _add(total, key_padding_mask.reshape(batch, 1, 1, keys))
    return total


def _add(total: Tensor, mask: Tensor) -> Tensor:
    return total + mask if mask.is_floating_point() else total.masked_fill(mask, float("-inf"))


def hidden_rows(module: nn.MultiheadAttention, bias: Tensor) -> Tensor:
    """(N, H, L): the queries that see no key; a module that appends keys has none, since those are always visible."""
    if module.bias_k is not None or module.add_zero_attn:
        return torch.zeros(bias.shape[:3], dtype=torch.bool)
    return (bias == float("-inf")).all(-1)


@dataclass(frozen=True)
class Meant:
    """PyTorch's own module in training mode without dropout, which keeps it off its inference fast path."""

    module: nn.MultiheadAttention

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, need_weights: bool, average: bool
    ) -> Answer:
        """As `forward`, with all masks already in `bias` (N, H, L, S)."""
        module = self.module
        unbatched = query.dim() == 2
        hidden = hidden_rows(module, bias)
        opened = bias.masked_fill(hidden[..., None], 0.0)
        mixed, weights = functional_call(
            module,
            self._identity(),
            (query, key, value),
            {"attn_mask": opened.flatten(0, 1), "need_weights": True, "average_attn_weights": False},
        )
        heads_last = hidden.movedim(1, -1)[..., None]  # (N, L, H, 1)
        if unbatched:
            mixed, weights = mixed[None], weights[None]
        elif not module.batch_first:
            mixed = mixed.transpose(0, 1)
        mixed = mixed.unflatten(-1, (module.num_heads, -1)).masked_fill(heads_last, 0.0).flatten(-2)  # (N, L, E)
        output = F.linear(mixed, module.out_proj.weight, module.out_proj.bias)
        weights = weights.masked_fill(hidden[..., None], 0.0)
        weights = weights.mean(1) if average else weights
        if unbatched:
            output, weights = output[0], weights[0]
        elif not module.batch_first:
            output = output.transpose(0, 1)
        return output, weights if need_weights else None

    def _identity(self) -> Mapping[str, Tensor]:
        weight, bias = self.module.out_proj.weight, self.module.out_proj.bias
        replaced = {"out_proj.weight": torch.eye(weight.shape[0], dtype=weight.dtype)}
        return replaced if bias is None else {**replaced, "out_proj.bias": torch.zeros_like(bias)}


def gradients(answer: Answer, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Of a fixed random mixture of output and weights; zero where an input has no part in it."""
    generator = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64)
    for tensor in answer:
        if tensor is not None:
            loss = loss + (tensor * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)).sum()
    return list(torch.autograd.grad(loss, inputs, materialize_grads=True))


def assert_equal(ours: Tensor | None, theirs: Tensor | None, what: str, tolerance: float = 1e-10) -> None:
    assert (ours is None) == (theirs is None), what
    if ours is None or theirs is None:
        return
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)}, PyTorch's is {tuple(theirs.shape)}"
    assert ours.dtype == theirs.dtype, f"{what}: {ours.dtype}, PyTorch's is {theirs.dtype}"
    if ours.numel():
        difference = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()
        assert difference <= tolerance, f"{what}: differs by {difference:.2e}"  # NaN is more than any tolerance
