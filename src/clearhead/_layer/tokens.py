"""The tokens of a padded batch that are not padding: finding them, gathering them, and padding them again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from .._call.sequences import PackedSequences


@dataclass(frozen=True)
class RealTokens:
    """The T tokens of all items that are not padding, end to end.

    Args:
        shape: B and the length of an item with its padding.
        real: bool (B, length), the tokens that are not padding, on the CPU; ``None`` if each item begins with its own.
        indices: (T,) which of the B · length tokens; ``None`` for all.
        counts: how many of each item.
    """

    shape: tuple[int, int]
    real: Tensor | None
    indices: Tensor | None
    counts: list[int]

    @cached_property
    def starts(self) -> list[int]:
        """The position of each item's first one."""
        return [0] * self.shape[0] if self.real is None else self.real.int().argmax(1).tolist()

    @cached_property
    def contiguous(self) -> bool:
        """Whether each item's have no padding between them."""
        if self.real is None:
            return True
        stops: list[int] = (self.shape[1] - self.real.flip(1).int().argmax(1)).tolist()
        ends = zip(self.starts, stops, self.counts, strict=True)
        return all(stop - start == count or count == 0 for start, stop, count in ends)

    @property
    def positions(self) -> Tensor:
        """(T,) the positions in their items."""
        batch, length = self.shape
        return (torch.arange(batch * length, device="cpu") if self.indices is None else self.indices) % length

    def bounds(self, device: torch.device) -> Tensor:
        """(B + 1,) how many tokens there are before each item, and in all, computed on the device."""
        batch, length = self.shape
        firsts = torch.arange(0, (batch + 1) * length, length, device=device)
        return firsts if self.indices is None else torch.searchsorted(self.indices, firsts)

    def unpad(self, x: Tensor) -> Tensor:
        """(1 or B, length, …) → (T, …)."""
        x = x.expand(*self.shape, *x.shape[2:])
        if self.indices is None:
            return x.flatten(0, 1)
        if x.stride(0) < x.stride(1):  # (length, B, E) in memory, which need not be copied whole
            return x.transpose(0, 1).flatten(0, 1).index_select(0, self._length_first(self.indices))
        return x.flatten(0, 1).index_select(0, self.indices)

    def pad(self, x: Tensor, filling: Tensor | None = None, *, batch_first: bool = True) -> Tensor:
        """(T, …) → (B, length, …), zeros or `filling` for padding; in memory (length, B, …) unless `batch_first`."""
        if self.indices is None:
            return x.unflatten(0, self.shape)
        batch, length = self.shape
        indices = self.indices if batch_first else self._length_first(self.indices)
        template = (x.new_zeros(()) if filling is None else filling).expand(batch * length, *x.shape[1:])
        padded = template.index_copy(0, indices, x)
        return padded.unflatten(0, self.shape) if batch_first else padded.unflatten(0, (length, batch)).transpose(0, 1)

    def put_back(self, x: Tensor) -> Tensor:
        """(1, H, T, D) → (B, H, length, D), zeros for padding."""
        return self.pad(x[0].transpose(0, 1)).transpose(1, 2)

    def _length_first(self, indices: Tensor) -> Tensor:
        batch, length = self.shape
        return indices % length * batch + indices // length


def find_tokens(real: Tensor | None, batch: int, length: int, counts: list[int] | None = None) -> RealTokens:
    """Find the tokens that are not padding.

    Args:
        real: bool (1 or B, length), true for them; ``None`` for all.
        batch, length: of the padded batch.
        counts: how many of each item, which are its first ones. Without them, an accelerator is waited for.
    """
    if real is None:
        return RealTokens((batch, length), None, None, [length] * batch)
    real, real_on_cpu = real.expand(batch, length), None
    if counts is None:
        real_on_cpu = real.cpu()  # whose values are read
        counts = real_on_cpu.sum(1).tolist()
    total = sum(counts)
    # Where nothing is padding the tokens are a view, which costs no gathering.
    if total == batch * length:
        indices = None
    elif real.is_cpu:
        indices = real.flatten().nonzero()[:, 0]
    else:
        # A known number of results waits for no device. If it is wrong, the indices are still in order and in range.
        indices = torch.nonzero_static(real.flatten(), size=total, fill_value=batch * length - 1)[:, 0]
    return RealTokens((batch, length), real_on_cpu, indices, counts)


def sequences_between(queries: RealTokens, keys: RealTokens, device: torch.device) -> PackedSequences:
    """The sequences in which each item's queries attend to its keys, with boundaries on the device."""
    tokens = sum(queries.counts), sum(keys.counts)
    if device.type == "cpu":
        q_bounds, k_bounds = (tuple(accumulate(each.counts, initial=0)) for each in (queries, keys))
        cu_seqlens_q = torch.tensor(q_bounds, device="cpu")
        cu_seqlens_k = cu_seqlens_q if keys is queries else torch.tensor(k_bounds, device="cpu")
        return PackedSequences(cu_seqlens_q, cu_seqlens_k, q_bounds, k_bounds, tokens)
    cu_seqlens_q = queries.bounds(device)
    cu_seqlens_k = cu_seqlens_q if keys is queries else keys.bounds(device)
    longest = max(queries.counts), max(keys.counts)
    return PackedSequences(cu_seqlens_q, cu_seqlens_k, (), (), tokens, longest)
